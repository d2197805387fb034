"""Read RolloutJob and BackendPool objects of a cluster, and write their status."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from rollyard_crds import BackendPool, BackendPoolStatus, RolloutJob, RolloutJobStatus
from rollyard_crds.base import ObjectMeta
from rollyard_crds.fields.annotations import OBJECT_UID
from rollyard_crds.reading.manifest import ManifestError, describe

from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.events import EventRecorder, notes
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import ObjectCache, key_of, uid_of

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
ORIGIN = "rollyard.dev/origin"
"""The annotation of an object that the operator made. Its value is `rest`."""
KINDS: dict[str, type[RolloutJob] | type[BackendPool]] = {
    "RolloutJob": RolloutJob,
    "BackendPool": BackendPool,
}
ThingT = TypeVar("ThingT", RolloutJob, BackendPool)
StatusT = TypeVar("StatusT", RolloutJobStatus, BackendPoolStatus)


def generation_of(obj: Object) -> int:
    """Return the generation of the object's spec."""
    return int(obj["metadata"].get("generation") or 0)


def is_leaving(obj: Object) -> bool:
    """Return whether the deletion of the object has been requested."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def fingerprint(obj: Object) -> tuple[object, ...]:
    """Return the fields of an object whose changes wake its loop, which are all except the status."""
    meta = obj["metadata"]
    return (
        meta["uid"],
        meta.get("generation"),
        meta.get("deletionTimestamp"),
        meta.get("labels"),
        meta.get("annotations"),
    )


class Reader(Generic[ThingT]):
    """Reads objects as models. A spec may hold thousands of tasks, so it is read once per generation."""

    def __init__(self, model: type[ThingT]) -> None:
        self._model: type[ThingT] = model
        self._read: tuple[str, int] | None = None
        self._spec: ThingT | None = None

    def read(self, obj: Object) -> ThingT:
        """Return the object as a model.

        Raises:
            ManifestError: A field is wrong, although the cluster's schema accepts it.
        """
        uid, generation = uid_of(obj), generation_of(obj)
        try:
            if self._spec is None or self._read != (uid, generation):
                name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
                document = {
                    "apiVersion": obj["apiVersion"],
                    "kind": obj["kind"],
                    "metadata": {"name": name, "namespace": namespace},
                    "spec": obj["spec"],
                }
                self._spec = self._model.model_validate(document)
                self._read = (uid, generation)
            return self._spec.model_copy(update={"metadata": metadata(obj), "status": self.status(obj)})
        except ValidationError as error:
            raise ManifestError(describe(error, model=self._model)) from error

    def status(self, obj: Object) -> Any:
        """Return the status of the object. It is empty if the object's status is unknown to this version."""
        kind = RolloutJobStatus if self._model is RolloutJob else BackendPoolStatus
        try:
            return kind.model_validate(obj.get("status") or {})
        except ValidationError:
            return kind()


def metadata(obj: Object) -> ObjectMeta:
    """Return the metadata of the object, without the parts that repeat the whole manifest."""
    meta = dict(obj["metadata"])
    meta["annotations"] = {k: v for k, v in (meta.get("annotations") or {}).items() if k != LAST_APPLIED}
    meta.pop("managedFields", None)
    return ObjectMeta.model_validate(meta)


def registration(thing: ThingT) -> ThingT:
    """Return the manifest for registration, with an annotation that names the Kubernetes object."""
    meta = thing.metadata
    annotations = {**meta.annotations, OBJECT_UID: meta.uid or ""}
    kept = ObjectMeta(name=meta.name, namespace=meta.namespace, labels=meta.labels, annotations=annotations)
    return thing.model_copy(update={"metadata": kept})


def mirrored(obj: Object, view: RolloutJob | BackendPool, before: StatusT) -> StatusT:
    """Return the status that another driver reported to the control plane, in the generations of the object.

    Args:
        view: The control plane's view, whose spec is known to come from the object.
        before: The object's status. What the driver has not processed yet keeps its observed generation.
    """
    newest = view.metadata.generation or 0

    def of_object(observed: int | None) -> int:
        return generation_of(obj) if (observed or 0) >= newest else before.observed_generation

    conditions = [
        one.model_copy(update={"observed_generation": of_object(one.observed_generation)})
        for one in view.status.conditions
    ]
    changes = {"conditions": conditions, "observed_generation": of_object(view.status.observed_generation)}
    status: StatusT = view.status.model_copy(update=changes)  # type: ignore[assignment]
    return status


async def write_status(
    kube: KubeClient,
    recorder: EventRecorder,
    cache: ObjectCache,
    obj: Object,
    before: StatusT,
    after: StatusT,
) -> None:
    """Write a status, and publish its transitions as events.

    Raises:
        KubeConflict: `obj` is outdated, and its name may belong to another object. Read it again.
        KubeError: The status was refused.
    """
    namespace, name = key_of(obj)
    body = after.to_json()
    # A merge patch keeps fields that it does not name, so removed fields are set to null.
    removed = {field: None for field in before.to_json() if field not in body}
    fresh = await kube.patch_status(
        obj["kind"], namespace, name, body | removed, version=obj["metadata"]["resourceVersion"]
    )
    if fresh is None:
        cache.remove(key_of(obj), uid_of(obj))
        return
    cache.put(fresh)
    for note in notes(before.conditions, after.conditions):
        recorder.put(obj, note)
