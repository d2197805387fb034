"""Objects as a watch reports them: the newest of each, and who is called when one changes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from rollyard_operator.kube import labels
from rollyard_operator.kube.labels import Object

Key = tuple[str, str]
"""Namespace and name."""
REMEMBERED = 10_000
OWNER_UIDS = (labels.JOB_UID, labels.POOL_UID)


def key_of(obj: Object) -> Key:
    """Namespace and name of an object."""
    meta = obj["metadata"]
    return meta["namespace"], meta["name"]


def uid_of(obj: Object) -> str:
    """The object's uid."""
    uid: str = obj["metadata"]["uid"]
    return uid


def version_of(obj: Object) -> int:
    """The object's resource version; 0 where it has none."""
    # Resource versions of one cluster are comparable as numbers (KEP-5504).
    return int(obj["metadata"].get("resourceVersion") or 0)


class ObjectCache:
    """The objects of one kind. A watch, lists and the answers to our own writes feed it, in any order.

    What is older than what is known is ignored, and what was removed does not come back.
    """

    def __init__(self, listener: Callable[[Object], None] = lambda obj: None) -> None:
        self._objects: dict[Key, Object] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._listener = listener
        self._revision = 0
        self._changed = asyncio.Event()

    @property
    def revision(self) -> int:
        """Rises with every change."""
        return self._revision

    def listen(self, listener: Callable[[Object], None]) -> None:
        """Call `listener` with each object that changed or went, from now on."""
        self._listener = listener

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, key: Key) -> Object | None:
        """The object of this name."""
        return self._objects.get(key)

    def put(self, obj: Object) -> bool:
        """Take what was seen; whether it is news."""
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
        """The object with this uid is gone; whether it was known."""
        self._bury(uid)
        before = self._objects.get(key)
        if before is None or uid_of(before) != uid:
            return False
        del self._objects[key]
        self._unindex(before)
        self._tell(before)
        return True

    def take(self, listed: Iterable[Object], version: int, namespace: str | None = None) -> None:
        """Take a list of all there was at a resource version, in a namespace or (None) in all of them.

        What is missing there is gone, unless it was seen later than that.
        """
        there = set()
        for obj in listed:
            there.add(uid_of(obj))
            self.put(obj)
        for obj in self:
            ours = namespace in (None, key_of(obj)[0])
            if ours and version_of(obj) <= version and uid_of(obj) not in there:
                self.remove(key_of(obj), uid_of(obj))

    async def wait(self, revision: int, timeout: float) -> int:
        """The revision, once it is another than `revision` or after `timeout` seconds."""
        if self._revision == revision:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self._revision

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _tell(self, obj: Object) -> None:
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()
        self._listener(obj)

    def _index(self, obj: Object) -> None:
        """For those who look objects up otherwise."""

    def _unindex(self, obj: Object) -> None:
        """Undo `_index`."""


class PodCache(ObjectCache):
    """The pods of one installation, also by component and by the job or pool that owns them."""

    def __init__(self, listener: Callable[[Object], None] = lambda pod: None) -> None:
        super().__init__(listener)
        self._owned: dict[str, dict[Key, None]] = {}
        self._by_component: dict[str, dict[Key, None]] = {}

    def pods(self, namespace: str | None = None, component: str | None = None) -> list[Object]:
        """All of them, or those of a namespace or component (`stage-worker`, `backend`, `sandbox`)."""
        keys = self._objects if component is None else self._by_component.get(component, ())
        return [self._objects[key] for key in keys if namespace in (None, key[0])]

    def owned(self, uid: str, component: str) -> list[Object]:
        """Those of a component that belong to the job or pool with this uid, by name."""
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
