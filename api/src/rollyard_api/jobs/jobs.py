"""The lifetime of a RolloutJob: it is created, given tasks, changed, closed, cancelled, deleted and removed.

A job ends by itself when it is closed and its last rollout ends (see `rollouts.transitions`). What ends it
earlier (a cancellation, its deadline, its deletion) takes it out of all queues in one transaction, and its
unfinished rollouts are ended afterwards, batch by batch. A deleted job is hidden at once; its rows are
removed in the same way when its records are in the trajectory store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps, loads, unpack
from rollyard_api.core.conditions import differs
from rollyard_api.core.limits import Quota
from rollyard_api.core.problems import Conflict, NotFound
from rollyard_api.jobs import blobs, manifests
from rollyard_api.jobs.allow_lists import blob_of
from rollyard_api.jobs.manifests import NewJob
from rollyard_api.jobs.tasks import TaskRow
from rollyard_api.machine.events import BackendAwaited, Cancelled
from rollyard_api.machine.jobs import prefix_of
from rollyard_api.machine.states import TRANSITIONS
from rollyard_api.rollouts import transitions
from rollyard_api.storage import groups as group_rows
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage import view_tables
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.jobs import DELETED, SamplingStep
from rollyard_api.storage.rows import JobRow
from rollyard_api.trajectories import acknowledged

DEADLINE: Final = "DeadlineExceeded"
"""The reason of a job that was cancelled at its deadline."""
BATCH: Final = 2000
"""The number of rollouts that are ended or removed in one transaction. Other requests run between two
transactions."""
CANCELLED: Final = Cancelled("Cancelled")
"""What happens to a rollout that is no longer wanted."""
MAX_STEPS: Final = 100_000
"""The most steps of one job, which bounds what their ids take in the database."""
_INSERT_BYTES: Final = 8 << 20
"""The number of bytes of tasks that are inserted at once."""


def same(conn: Connection, new: NewJob) -> bool:
    """Return whether this job exists already with the same spec."""
    job = job_rows.named(conn, new.namespace, new.name)
    return job is not None and job.digest == new.digest


def create(tx: Transaction, new: NewJob, quota: Quota) -> bool:
    """Create the job and queue its tasks; return False if the same job exists already.

    Raises:
        Conflict: A job with this name has another spec.
        LimitReached: There is no room for so many rollouts.
        Invalid: The upload that the job names is gone.
    """
    known = job_rows.named(tx.conn, new.namespace, new.name)
    if known is not None and known.digest != new.digest:
        raise differs("RolloutJob", new.namespace, new.name)
    if known is not None:
        return False
    spec = new.spec
    digest = blob_of(spec.tasks.url or "")
    blob_id = None if digest is None else blobs.hold(tx, new.namespace, digest)
    job = job_rows.create(tx, manifests.created(new, tx.now, blob_id))
    job_rows.keep_plugins(tx, job.id, new.plugins)
    if spec.dynamic_sampling is not None:
        # The steps of a stream are opened one by one (see `open_step`).
        target = 0 if spec.tasks.stream else spec.dynamic_sampling.target_groups
        job_rows.begin_sampling(tx, job.id, target=target, samples=spec.samples_per_task)
    if new.tasks:
        _enqueue(tx, job, new.tasks, quota)
    return True


def _enqueue(tx: Transaction, job: JobRow, tasks: Sequence[TaskRow], quota: Quota) -> None:
    samples = job.limits.samples
    adding = samples * len(tasks)
    total, own = job_rows.unfinished_rollouts(tx.conn, job.namespace)
    quota.check("unfinished rollouts", job.namespace, total=total, own=own, adding=adding, retry_after=10)
    numbers = range(job.groups, job.groups + len(tasks))
    waiting: list[dict[str, Any]] = []
    size = 0
    for no, task in zip(numbers, tasks, strict=True):
        waiting.append(
            {"job_id": job.id, "no": no, "task_id": task.id, "task": task.packed, "remaining": samples}
        )
        size += len(task.packed)
        # Large tasks are in a file (see `KeptTasks`), and few of them are in memory at once.
        if size > _INSERT_BYTES or no == numbers[-1]:
            group_rows.add(tx, waiting)
            waiting, size = [], 0
    job_rows.add_groups(tx, job.id, len(tasks))
    if job.limits.sampling is not None:
        transitions.advance(tx, job.id)
    else:
        transitions.start(tx, job.id, prefix_of(job.name, job.uid), numbers, samples)


def tasks_of(conn: Connection, namespace: str, name: str, ids: Sequence[str], max_bytes: int) -> list[bytes]:
    """Return the tasks of a job that have these ids, as JSON, in the order of the ids.

    There are as many as `max_bytes` bytes hold, and at least one. Unknown ids are left out.

    Raises:
        NotFound: There is no such job in this namespace.
    """
    job = job_rows.find(conn, namespace, name)
    numbers = group_rows.numbers(conn, job.id, ids)
    tasks: list[bytes] = []
    total = 0
    for no in (numbers[task_id] for task_id in ids if task_id in numbers):
        task = unpack(group_rows.named(conn, job.id, [no])[no].task)
        total += len(task)
        if tasks and total > max_bytes:
            break
        tasks.append(task)
    return tasks


def push(
    tx: Transaction, namespace: str, name: str, tasks: Sequence[TaskRow], quota: Quota, max_unread: int | None
) -> dict[str, int]:
    """Add tasks to an open stream. A task whose id the job already has changes nothing.

    `max_unread` is None if the caller delivers the results itself, and so leaves no cursor.

    Returns:
        The number of accepted tasks and the number of repeated ones.

    Raises:
        Conflict: The job is a batch job, closed or cancelled, or `max_unread` of its results are unread.
        LimitReached: There is no room for the rollouts. None of the tasks was added.
    """
    job = job_rows.find_locked(tx, namespace, name)
    _refuse_closed(job, "tasks")
    known = group_rows.numbers(tx.conn, job.id, [task.id for task in tasks])
    fresh = [task for task in tasks if task.id not in known]
    if fresh:
        if max_unread is not None:
            acknowledged.check_unread(tx.conn, job, max_unread)
        _enqueue(tx, job, fresh, quota)
    return {"accepted": len(fresh), "repeated": len(tasks) - len(fresh)}


def _refuse_closed(job: JobRow, noun: str) -> None:
    if job.cancel_reason is not None:
        reason = f"has ended or is ending ({job.cancel_reason})"
        raise Conflict(f"RolloutJob {job.name!r} {reason} and takes no more {noun}", reason="JobCancelled")
    if job.closed:
        raise Conflict(f"RolloutJob {job.name!r} is closed and takes no more {noun}", reason="JobClosed")


def open_step(
    tx: Transaction, namespace: str, name: str, step: str, groups: int | None, max_unread: int
) -> dict[str, Any]:
    """Open a step, which needs `groups` more groups with a signal; opening it again changes nothing.

    Args:
        tx: The transaction.
        namespace: The namespace of the job.
        name: The name of the job, which must be a stream with dynamic sampling.
        step: The id of the step.
        groups: The target of the step; None stands for the job's `targetGroups`.
        max_unread: The number of unread results from which no further step is opened.

    Returns:
        The step: its id, its groups, the job's number of informative groups with which it is met (`goal`),
        whether it is met, and whether it was opened by this call.

    Raises:
        NotFound: There is no such job.
        Conflict: The job is not an open stream with dynamic sampling, the step was opened with another number
            of groups, the job has MAX_STEPS steps, or too many of its results are unread.
    """
    job = job_rows.find_locked(tx, namespace, name)
    rules = job.limits.sampling
    if rules is None:
        raise Conflict(
            f"RolloutJob {name!r} has no spec.dynamicSampling, so it has no targets",
            reason="NoDynamicSampling",
        )
    target = rules.target_groups if groups is None else groups
    known = job_rows.step(tx.conn, job.id, step)
    if known is not None:
        if known.groups != target:
            raise Conflict(
                f"groups: the step {step!r} of RolloutJob {name!r} was opened with {known.groups}, "
                f"not {target}",
                reason="TargetDiffers",
            )
        return _described(tx, job.id, step, known, opened=False)
    if not loads(job.spec)["tasks"].get("stream"):
        raise Conflict(
            f"RolloutJob {name!r} is not a stream: its only target is spec.dynamicSampling.targetGroups",
            reason="NotAStream",
        )
    _refuse_closed(job, "targets")
    acknowledged.check_unread(tx.conn, job, max_unread)
    if job_rows.steps(tx.conn, job.id) >= MAX_STEPS:
        raise Conflict(
            f"RolloutJob {name!r} has {MAX_STEPS} steps, which is the most", reason="TooManyTargets"
        )
    row = job_rows.open_step(tx, job.id, step, target)
    transitions.advance(tx, job.id)
    return _described(tx, job.id, step, row, opened=True)


def _described(
    tx: Transaction, job_id: int, name: str, step: SamplingStep, *, opened: bool
) -> dict[str, Any]:
    met = job_rows.sampling(tx.conn, job_id).informative >= step.goal
    return {"id": name, "groups": step.groups, "goal": step.goal, "met": met, "opened": opened}


def close(tx: Transaction, namespace: str, name: str) -> None:
    """Close a job, so that no more tasks can be added. Closing it twice has no further effect."""
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
    job_rows.change(tx, job.id, manifests.patched(job, tx.now, suspend=suspend, priority=priority))


def put_status(tx: Transaction, namespace: str, name: str, status: dict[str, Any]) -> None:
    """Take phase, conditions, observedGeneration and message from the driver, and keep the skipped rows.

    The lastTransitionTime of a condition changes only when the status of the condition changes.
    """
    job = job_rows.find_locked(tx, namespace, name)
    changed = manifests.reported_status(job, status)
    if changed is not None:
        job_rows.put_status(tx, job.id, dumps(changed))


def cancel(tx: Transaction, namespace: str, name: str, reason: str) -> int:
    """Remove the job from all queues. Its rollouts are ended by `cancel_some`, batch by batch.

    Returns:
        The id of the job.
    """
    job = job_rows.find_locked(tx, namespace, name)
    job_rows.conclude(tx, job.id, reason)
    return job.id


def cancel_some(tx: Transaction, job_id: int) -> int:
    """End up to BATCH rollouts of a cancelled job, and return their number, which is 0 when none is left.

    A rollout that waits for a backend until the job's deadline, while the pool has none, ends as failed.
    """
    job = job_rows.by_id(tx.conn, job_id)
    if job is None or job.cancel_reason is None:
        return 0
    rows = rollout_rows.unfinished(tx, job_id, limit=BATCH)
    late = []
    if job.cancel_reason == DEADLINE and job.outage_began is not None:
        late = [row for row in rows if row.state in TRANSITIONS[BackendAwaited]]
        awaited = BackendAwaited("the pool had no ready backend until the job's deadline")
        transitions.happened(tx, late, awaited)
    ended = {row.id for row in late}
    others = [row for row in rows if row.id not in ended]
    transitions.happened(tx, others, Cancelled(job.cancel_reason))
    return len(rows)


def cancel_part(tx: Transaction, namespace: str, name: str, *, group: str | None, rollout: str | None) -> int:
    """End one unfinished rollout, or the unfinished rollouts of one group, and return how many were ended.

    Raises:
        NotFound: The job has no such group or rollout.
    """
    job = job_rows.find_locked(tx, namespace, name)
    if rollout is not None:
        row = rollout_rows.named(tx, [rollout]).get(rollout)
        if row is None or row.job_id != job.id:
            raise NotFound(f"RolloutJob {name!r} has no rollout {rollout!r}", reason="RolloutNotFound")
        return cancel_unfinished(tx, job.id, rollout)
    no = None if group is None else group_rows.numbers(tx.conn, job.id, [group]).get(group)
    if no is None:
        raise NotFound(f"RolloutJob {name!r} has no group {group!r}", reason="GroupNotFound")
    rows = rollout_rows.unfinished(tx, job.id, group=no)
    transitions.happened(tx, rows, CANCELLED)
    return len(rows)


def cancel_unfinished(tx: Transaction, job_id: int, rollout: str | None = None) -> int:
    """End up to BATCH unfinished rollouts of a job that stays open, or only the given one.

    Returns:
        How many were ended. With 0, none is left.
    """
    rows = rollout_rows.unfinished(tx, job_id, rollout=rollout, limit=BATCH)
    transitions.happened(tx, rows, CANCELLED)
    return len(rows)


def enforce(tx: Transaction) -> None:
    """Cancel jobs that are past their active deadline, and delete finished jobs past their time to live."""
    for job_id in job_rows.past_deadline(tx):
        job_rows.conclude(tx, job_id, DEADLINE)
    job_rows.delete_old(tx)


def delete(tx: Transaction, namespace: str, name: str) -> int:
    """Cancel the job and hide it, and return its id.

    The name is free at once. The rows are removed by `purge_some`.
    """
    job_id = cancel(tx, namespace, name, DELETED)
    job_rows.delete(tx, job_id)
    return job_id


def purge_some(tx: Transaction, job_id: int) -> bool:
    """Remove up to BATCH rollouts of a deleted job, and finally the job; return True when nothing is left."""
    removed = rollout_rows.remove(tx, job_id, BATCH)
    if not view_tables.forget(tx.conn, job_id, BATCH) or removed == BATCH:
        return False
    group_rows.remove(tx, job_id)
    acknowledged.forget_all(tx, job_id)
    blob_id = job_rows.remove(tx, job_id)
    if blob_id is not None:
        blobs.let_go(tx, blob_id)
    return True
