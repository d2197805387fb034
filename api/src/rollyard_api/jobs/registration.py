"""Registration by drivers of the jobs and pools whose spec is kept elsewhere, in a Kubernetes object.

Registration is level-based. The driver may send the state of the object at any time, and the control plane
creates, changes or keeps its own job or pool. An object that was deleted and created again has another uid.
The job or pool that was registered for the old object is then replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rollyard_crds.backendpool import BackendPool, BackendPoolSpec
from rollyard_crds.base import ObjectMeta
from rollyard_crds.fields.annotations import CANCEL_REASON, CLOSED, DELETE_REQUESTED, OBJECT_UID

from rollyard_api.backends import pools
from rollyard_api.core.codec import dumps, loads
from rollyard_api.core.conditions import differs
from rollyard_api.core.limits import Quota
from rollyard_api.core.problems import Invalid
from rollyard_api.jobs import jobs, manifests
from rollyard_api.jobs.manifests import NewJob
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.jobs import DELETED

_NOT_KEPT: Final = frozenset(
    {CLOSED, CANCEL_REASON, DELETE_REQUESTED, "kubectl.kubernetes.io/last-applied-configuration"}
)
"""The annotations that the control plane sets itself or that repeat the whole manifest."""
_MAX_UID: Final = 128


def of_object(meta: ObjectMeta) -> ObjectMeta:
    """Return the part of an object's metadata that is kept: its name, namespace, labels and annotations.

    What the Kubernetes server adds to the metadata is not kept.

    Raises:
        Invalid: The annotation with the object's uid is too long for a uid.
    """
    uid = meta.annotations.get(OBJECT_UID, "")
    if len(uid) > _MAX_UID:
        raise Invalid.of(
            f"metadata.annotations[{OBJECT_UID}]: must be a uid of at most {_MAX_UID} characters"
        )
    annotations = {k: v for k, v in meta.annotations.items() if k not in _NOT_KEPT}
    return ObjectMeta(name=meta.name, namespace=meta.namespace, labels=meta.labels, annotations=annotations)


def object_uid(meta: ObjectMeta) -> str | None:
    """Return the uid of the object that a manifest refers to, or None if it names none."""
    return meta.annotations.get(OBJECT_UID) or None


def _another(old: str | None, new: str | None) -> bool:
    return old is not None and new is not None and old != new


@dataclass(frozen=True, slots=True)
class Registered:
    """The result of a registration.

    `made` is True if the job was just created and False if it existed. It is None if the tasks must be read
    first; in this case nothing was changed.
    """

    made: bool | None
    replaced: int | None = None
    """The id of the job that was replaced. Its rollouts have yet to be ended."""


def register_job(tx: Transaction, new: NewJob, quota: Quota) -> Registered:
    """Create the job, or update those of its fields that may change.

    The tasks of the manifest are needed only if the job is created, within the quota of unfinished rollouts.

    Raises:
        Conflict: A field that cannot change differs, and the object is not known to be another one.
        LimitReached: There is no room for so many rollouts.
    """
    job = job_rows.named(tx.conn, new.namespace, new.name, lock=True)
    if job is not None and not _another(job.object_uid, new.object_uid):
        job_rows.change(tx, job.id, manifests.registered(job, new, tx.now))
        return Registered(False)
    if new.tasks is None:
        return Registered(None)
    replaced = None if job is None else jobs.delete(tx, new.namespace, new.name)
    return Registered(jobs.create(tx, new, quota), replaced)


def register_pool(tx: Transaction, pool: BackendPool) -> bool:
    """Create the pool, or update its spec, labels and annotations; return whether it was created.

    Raises:
        Conflict: The model, the tokenizer or the type of the engine differs, and the object is not known to
            be another one.
    """
    meta = pool.metadata
    row = pool_rows.named(tx.conn, meta.namespace, meta.name, lock=True)
    if row is None:
        return pools.create(tx, pool)
    known = loads(row.metadata)
    annotations = known.get("annotations") or {}
    if _another(annotations.get(OBJECT_UID) or None, object_uid(meta)):
        pools.delete(tx, meta.namespace, meta.name)
        return pools.create(tx, pool)
    wrong = pools.fixed(BackendPoolSpec.model_validate(loads(row.spec)), pool.spec)
    if wrong:
        raise differs("BackendPool", meta.namespace, meta.name, wrong)
    pools.change(tx, row, pool.spec)
    own = {k: v for k, v in annotations.items() if k in (OBJECT_UID, DELETE_REQUESTED)}
    merged = {"labels": meta.labels, "annotations": own | meta.annotations}
    if known != merged:
        pool_rows.describe(tx, row.id, metadata=dumps(merged))
    return False


def delete_job(tx: Transaction, namespace: str, name: str) -> int:
    """Cancel a job, and remove it at once if it is not registered for an object.

    The driver of an object would register the job again. It learns of the deletion from the cancel reason,
    deletes the object, and then removes the job with `jobs.delete`.

    Returns:
        The id of the job.
    """
    job = job_rows.find_locked(tx, namespace, name)
    if job.object_uid is None:
        return jobs.delete(tx, namespace, name)
    jobs.cancel(tx, namespace, name, DELETED)
    if job.cancel_reason != DELETED:
        # This replaces another reason, and it covers a job that has ended, which `cancel` leaves alone.
        job_rows.ask_for_deletion(tx, job.id)
    return job.id


def delete_pool(tx: Transaction, namespace: str, name: str) -> bool:
    """Remove a pool and return True, or mark it for its driver and return False.

    A driver that finds the mark deletes the object of the pool and then removes the pool.
    """
    row = pool_rows.find(tx.conn, namespace, name)
    meta = loads(row.metadata)
    annotations = meta.get("annotations") or {}
    if OBJECT_UID not in annotations:
        pools.delete(tx, namespace, name)
        return True
    meta["annotations"] = annotations | {DELETE_REQUESTED: "true"}
    pool_rows.describe(tx, row.id, metadata=dumps(meta))
    return False
