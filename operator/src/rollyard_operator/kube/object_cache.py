"""Caches of the objects that a watch reports. They keep the newest version and call a listener on changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Object

Key = tuple[str, str]
"""The namespace and the name of an object."""
REMEMBERED = 10_000
OWNER_UIDS = (labels.JOB_UID, labels.POOL_UID)


def key_of(obj: Object) -> Key:
    """Return the namespace and the name of an object."""
    meta = obj["metadata"]
    return meta["namespace"], meta["name"]


def uid_of(obj: Object) -> str:
    """Return the uid of an object."""
    uid: str = obj["metadata"]["uid"]
    return uid


def version_of(obj: Object) -> int:
    """Return the resource version of an object, or 0 if it has none."""
    # Resource versions of one cluster are comparable as numbers (KEP-5504).
    return int(obj["metadata"].get("resourceVersion") or 0)


class ObjectCache:
    """The objects of one kind. A watch, lists and answers to the operator's own writes feed it, in any order.

    A version that is older than the known one is ignored, and a removed object does not come back.
    """

    def __init__(self, listener: Callable[[Object], None] = lambda obj: None) -> None:
        self._objects: dict[Key, Object] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._listeners = [listener]

    def listen(self, listener: Callable[[Object], None]) -> None:
        """Call a further listener with each object that changes or disappears from now on."""
        self._listeners.append(listener)

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, key: Key) -> Object | None:
        """Return the object with this name, or None."""
        return self._objects.get(key)

    def put(self, obj: Object) -> bool:
        """Store an object that was seen. Return whether it is new."""
        key, uid = key_of(obj), uid_of(obj)
        before = self._objects.get(key)
        if uid in self._gone or (before is not None and version_of(obj) <= version_of(before)):
            return False
        obj = {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "managedFields"}}
        if before is not None:
            self._unindex(before)
            if uid_of(before) != uid:
                self._bury(uid_of(before))
        self._objects[key] = obj
        self._index(obj)
        self._tell(obj)
        return True

    def remove(self, key: Key, uid: str) -> bool:
        """Remove the object with this uid, which is gone. Return whether it was known."""
        self._bury(uid)
        before = self._objects.get(key)
        if before is None or uid_of(before) != uid:
            return False
        del self._objects[key]
        self._unindex(before)
        self._tell(before)
        return True

    def take(self, listed: Iterable[Object], version: int, namespace: str | None = None) -> None:
        """Store a complete list as of a resource version, of one namespace or (None) of all namespaces.

        Objects that are missing in the list are removed, unless a later version of them was seen.
        """
        there = set()
        for obj in listed:
            there.add(uid_of(obj))
            self.put(obj)
        for obj in self:
            ours = namespace in (None, key_of(obj)[0])
            if ours and version_of(obj) <= version and uid_of(obj) not in there:
                self.remove(key_of(obj), uid_of(obj))

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _tell(self, obj: Object) -> None:
        for listener in self._listeners:
            listener(obj)

    def _index(self, obj: Object) -> None:
        """Add an object to additional indexes. The default does nothing."""

    def _unindex(self, obj: Object) -> None:
        """Remove an object from the indexes of `_index`."""


class PodCache(ObjectCache):
    """The pods of one installation, also by component and by the job or pool that owns them."""

    def __init__(self, listener: Callable[[Object], None] = lambda pod: None) -> None:
        super().__init__(listener)
        self._owned: dict[str, dict[Key, None]] = {}
        self._by_component: dict[str, dict[Key, None]] = {}

    def pods(self, namespace: str | None = None, component: str | None = None) -> list[Object]:
        """Return all pods, or those of a namespace or a component (`stage-worker`, `backend`, `sandbox`)."""
        keys = self._objects if component is None else self._by_component.get(component, ())
        return [self._objects[key] for key in keys if namespace in (None, key[0])]

    def owned(self, uid: str, component: str) -> list[Object]:
        """Return the pods of a component that belong to the job or pool with this uid, sorted by name."""
        pods = (self._objects[key] for key in sorted(self._owned.get(uid, ())))
        return [pod for pod in pods if labels.label_of(pod, labels.COMPONENT) == component]

    def _index(self, obj: Object) -> None:
        if component := labels.label_of(obj, labels.COMPONENT):
            self._by_component.setdefault(component, {})[key_of(obj)] = None
        for name in OWNER_UIDS:
            if uid := labels.label_of(obj, name):
                self._owned.setdefault(uid, {})[key_of(obj)] = None

    def _unindex(self, obj: Object) -> None:
        self._by_component.get(labels.label_of(obj, labels.COMPONENT), {}).pop(key_of(obj), None)
        for name in OWNER_UIDS:
            if uid := labels.label_of(obj, name):
                keys = self._owned.get(uid, {})
                keys.pop(key_of(obj), None)
                if not keys:
                    self._owned.pop(uid, None)
