"""RolloutJobs are created, found, changed and given tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import sqlalchemy as sa
from rollyard_crds.claims import shape_of
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobSpec
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps, loads, unpack
from rollyard_api.core.conditions import merge_conditions
from rollyard_api.core.problems import Conflict
from rollyard_api.core.room import Room
from rollyard_api.jobs import blobs
from rollyard_api.jobs.task_sources import blob_of
from rollyard_api.jobs.tasks import TaskRow
from rollyard_api.machine.jobs import prefix_of
from rollyard_api.machine.limits import Limits
from rollyard_api.rollouts import transitions
from rollyard_api.storage import groups as group_rows
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import groups
from rollyard_api.trajectories import unread

SKIPPED_ROWS: Final = "skippedRows"
"""The key of the skipped rows in a stored status. They are known when a job is created, and stay."""
_OWN_METADATA = ("name", "namespace", "uid", "generation", "creationTimestamp", "deletionTimestamp")

_INSERT_BYTES: Final = 8 << 20
"""The number of bytes of tasks that are inserted at once."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A checked manifest whose tasks have been read."""

    namespace: str
    name: str
    metadata: bytes
    spec: RolloutJobSpec
    spec_json: bytes
    digest: str
    tasks: Sequence[TaskRow]
    object_uid: str | None = None
    """The uid of the Kubernetes object for which the job is registered."""
    skipped: SkippedRows | None = None
    """The rows of the task list that were left out."""


def prepare(job: RolloutJob, tasks: Sequence[TaskRow]) -> NewJob:
    """Return what `create` stores of a manifest."""
    meta = {k: v for k, v in job.metadata.to_json().items() if k not in _OWN_METADATA}
    spec = orjson.dumps(job.spec.to_json(), option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(spec).hexdigest()
    return NewJob(job.metadata.namespace, job.metadata.name, dumps(meta), job.spec, spec, digest, tasks)


def same(conn: Connection, new: NewJob) -> bool:
    """Return whether this job exists already with the same spec.

    Raises:
        Conflict: The job exists with another spec.
    """
    job = job_rows.named(conn, new.namespace, new.name)
    if job is None:
        return False
    if job.digest != new.digest:
        raise Conflict(
            f"RolloutJob {new.name!r} exists in namespace {new.namespace!r} with another spec; "
            "delete it first or choose another name",
            reason="AlreadyExists",
        )
    return True


def create(tx: Transaction, new: NewJob, room: Room) -> bool:
    """Create the job and queue its tasks; return False if the same job exists already.

    Raises:
        Conflict: A job of this name has another spec.
        QueueFull: There is no room for so many rollouts.
        Invalid: The upload that the job names is gone.
    """
    if same(tx.conn, new):
        return False
    spec = new.spec
    digest = blob_of(spec.tasks.url or "")
    started = None if spec.suspend else tx.now
    job = job_rows.create(
        tx,
        {
            "namespace": new.namespace,
            "name": new.name,
            "metadata": new.metadata,
            "spec": new.spec_json,
            "digest": new.digest,
            "limits": Limits.of(spec),
            "status": dumps(_status_of(new)),
            "pool": None if spec.backend_ref is None else spec.backend_ref.name,
            "priority": spec.priority,
            "suspended": spec.suspend,
            "closed": not spec.tasks.stream,
            "started_at": started,
            "deadline_at": deadline_at(started, spec.active_deadline_seconds),
            "object_uid": new.object_uid,
            "warm": warm_of(spec),
            "blob_id": None if digest is None else blobs.hold(tx, new.namespace, digest),
        },
    )
    if spec.dynamic_sampling is not None:
        # The steps of a stream are opened one by one (see `targets`).
        target = 0 if spec.tasks.stream else spec.dynamic_sampling.target_groups
        job_rows.begin_sampling(tx, job.id, target=target, samples=spec.samples_per_task)
    if new.tasks:
        _enqueue(tx, job, new.tasks, room)
    return True


def _status_of(new: NewJob) -> dict[str, Any]:
    """Return the status of a new job, before its driver has reported any."""
    skipped = new.skipped
    return {} if skipped is None or not skipped.count else {SKIPPED_ROWS: skipped.to_json()}


def tasks_of(conn: Connection, namespace: str, name: str, ids: Sequence[str], max_bytes: int) -> list[bytes]:
    """Return the tasks of a job that have these ids, as JSON, in the order of the ids.

    There are as many as `max_bytes` bytes hold, and at least one. Unknown ids are left out.

    Raises:
        NotFound: There is no such job in this namespace.
    """
    job = job_rows.find(conn, namespace, name)
    found: list[bytes] = []
    total = 0
    for task_id in ids:
        query = sa.select(groups.c.task).where(groups.c.job_id == job.id, groups.c.task_id == task_id)
        packed = conn.execute(query).scalar_one_or_none()
        if packed is None:
            continue
        task = unpack(packed)
        total += len(task)
        if found and total > max_bytes:
            break
        found.append(task)
    return found


def warm_of(spec: RolloutJobSpec) -> bytes | None:
    """Return the shape and number of sandboxes that a driver on Kubernetes keeps warm, or None if none."""
    if spec.sandbox.warm == 0 or spec.placement not in (None, "kubernetes"):
        return None
    return dumps({"shape": shape_of(spec.sandbox).model_dump(), "count": spec.sandbox.warm})


def deadline_at(started: float | None, seconds: int | None) -> float | None:
    """Return when a job that was admitted at `started` is past its active deadline; None stands for never."""
    return None if started is None or seconds is None else started + seconds


def _enqueue(tx: Transaction, job: JobRow, tasks: Sequence[TaskRow], room: Room) -> None:
    samples = job.limits.samples
    adding = samples * len(tasks)
    total, own = job_rows.unfinished_rollouts(tx.conn, job.namespace)
    room.check("unfinished rollouts", job.namespace, total=total, own=own, adding=adding, retry_after=10)
    first = job.groups
    waiting: list[dict[str, Any]] = []
    size = 0
    for i, task in enumerate(tasks):
        waiting.append(
            {"job_id": job.id, "no": first + i, "task_id": task.id, "task": task.packed, "remaining": samples}
        )
        size += len(task.packed)
        # Large tasks are in a file (see `KeptTasks`), and few of them are in memory at once.
        if size > _INSERT_BYTES:
            group_rows.add(tx, waiting)
            waiting, size = [], 0
    if waiting:
        group_rows.add(tx, waiting)
    job_rows.add_groups(tx, job.id, len(tasks))
    if job.limits.sampling is not None:
        transitions.advance(tx, job.id)
    else:
        numbers = range(first, first + len(tasks))
        transitions.start(tx, job.id, prefix_of(job.name, job.uid), numbers, samples)


def push(
    tx: Transaction, namespace: str, name: str, tasks: Sequence[TaskRow], room: Room, max_unread: int | None
) -> dict[str, int]:
    """Add tasks to an open stream. A task whose id the job already has changes nothing.

    `max_unread` is None if the caller delivers the results itself, and so leaves no cursor.

    Returns:
        The number of accepted tasks and the number of repeated ones.

    Raises:
        Conflict: The job is a batch job, closed or cancelled, or `max_unread` of its results are unread.
        QueueFull: There is no room for the rollouts. None of the tasks was added.
    """
    job = job_rows.find_locked(tx, namespace, name)
    if job.cancel_reason is not None:
        raise Conflict(f"RolloutJob {name!r} is cancelled and takes no more tasks", reason="JobCancelled")
    if job.closed:
        raise Conflict(f"RolloutJob {name!r} is closed and takes no more tasks", reason="JobClosed")
    known: set[str] = set()
    ids = [t.id for t in tasks]
    for at in range(0, len(ids), 500):
        known.update(
            tx.conn.scalars(
                sa.select(groups.c.task_id).where(
                    groups.c.job_id == job.id, groups.c.task_id.in_(ids[at : at + 500])
                )
            )
        )
    fresh = [t for t in tasks if t.id not in known]
    if fresh:
        if max_unread is not None:
            unread.check(job, job.limits.samples, max_unread)
        _enqueue(tx, job, fresh, room)
    return {"accepted": len(fresh), "repeated": len(tasks) - len(fresh)}


def close(tx: Transaction, namespace: str, name: str) -> None:
    """Close a job, to which no more tasks will be added. Closing it twice has no further effect."""
    job = job_rows.find_locked(tx, namespace, name)
    if not job.closed:
        job_rows.close(tx, job.id)
        if job.limits.sampling is not None:
            transitions.advance(tx, job.id)
        elif job.ended == job.total:
            job_rows.finish(tx, job.id)


def patch(tx: Transaction, namespace: str, name: str, *, suspend: bool | None, priority: int | None) -> None:
    """Suspend or resume a job, or change its priority. The deadline of a suspended job does not run."""
    job = job_rows.find_locked(tx, namespace, name)
    spec = loads(job.spec)
    values: dict[str, Any] = {}
    if suspend is not None and suspend != job.suspended:
        spec["suspend"] = suspend
        started = None if suspend else tx.now
        deadline = deadline_at(started, job.limits.deadline_seconds)
        values |= {"suspended": suspend, "started_at": started, "deadline_at": deadline}
    if priority is not None and priority != job.priority:
        spec["priority"] = priority
        values["priority"] = priority
    if values:
        values |= {"spec": orjson.dumps(spec, option=orjson.OPT_SORT_KEYS), "generation": job.generation + 1}
        job_rows.change(tx, job.id, values)


def put_status(tx: Transaction, namespace: str, name: str, status: dict[str, Any]) -> None:
    """Take phase, conditions, observedGeneration and message from the driver, and keep the skipped rows.

    The lastTransitionTime of a condition changes only when the status of the condition changes.
    """
    job = job_rows.find_locked(tx, namespace, name)
    before = loads(job.status)
    status = {k: status[k] for k in ("phase", "conditions", "observedGeneration", "message") if k in status}
    status |= {k: before[k] for k in (SKIPPED_ROWS,) if k in before}
    status["conditions"] = merge_conditions(before.get("conditions", []), status.get("conditions", []))
    if status != before:
        job_rows.put_status(tx, job.id, dumps(status))
