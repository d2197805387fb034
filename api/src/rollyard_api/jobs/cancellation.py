"""Jobs are cancelled, ended at their deadline, deleted, and removed after their time to live."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads
from rollyard_api.core.problems import NotFound
from rollyard_api.jobs import blobs
from rollyard_api.machine.events import BackendAwaited, Cancelled
from rollyard_api.machine.rollout import Rollout
from rollyard_api.machine.states import TRANSITIONS
from rollyard_api.rollouts import transitions
from rollyard_api.storage import groups as group_rows
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.jobs import DELETED
from rollyard_api.storage.schema import cursors, groups, jobs, rollouts
from rollyard_api.trajectories import view_rows

DEADLINE = "DeadlineExceeded"
"""The reason of a job that was cancelled at its deadline."""
BATCH = 2000
"""The number of rollouts that are ended or removed in one transaction. Other requests run between two
transactions."""
CANCELLED = Cancelled("Cancelled")
"""What happens to a rollout that somebody does not want any more."""


def cancel_job(tx: Transaction, namespace: str, name: str, reason: str) -> int:
    """Remove the job from all queues. Its rollouts are ended by `cancel_some`, batch by batch.

    Returns:
        The id of the job.
    """
    job = job_rows.find_locked(tx, namespace, name)
    if job.cancel_reason is None and job.finished_at is None:
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
    late: list[Rollout] = []
    if job.cancel_reason == DEADLINE and job.outage_began is not None:
        late = [row for row in rows if row.state in TRANSITIONS[BackendAwaited]]
        awaited = BackendAwaited("the pool had no ready backend until the job's deadline")
        transitions.happened(tx, late, awaited)
    ended = {row.id for row in late}
    cancelled = Cancelled(job.cancel_reason)
    transitions.happened(tx, [row for row in rows if row.id not in ended], cancelled)
    return len(rows)


def cancel_part(tx: Transaction, namespace: str, name: str, *, group: str | None, rollout: str | None) -> int:
    """End one unfinished rollout, or the unfinished rollouts of one group, and return how many were ended.

    Raises:
        NotFound: The job has no such group or rollout.
    """
    job = job_rows.find_locked(tx, namespace, name)
    if rollout is not None:
        found = tx.conn.execute(
            sa.select(rollouts.c.id).where(rollouts.c.job_id == job.id, rollouts.c.id == rollout)
        ).first()
        if found is None:
            raise NotFound(f"RolloutJob {name!r} has no rollout {rollout!r}", reason="RolloutNotFound")
        rows = rollout_rows.unfinished(tx, job.id, rollout=rollout)
    else:
        no = tx.conn.execute(
            sa.select(groups.c.no).where(groups.c.job_id == job.id, groups.c.task_id == group)
        ).scalar_one_or_none()
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


def delete_job(tx: Transaction, namespace: str, name: str) -> int:
    """Cancel the job and hide it, and return its id.

    The name is free at once. The rows are removed by `purge_some`.
    """
    job_id = cancel_job(tx, namespace, name, DELETED)
    job_rows.delete(tx, job_id)
    return job_id


def enforce(tx: Transaction) -> None:
    """Cancel jobs that are past their active deadline, and delete finished jobs past their time to live."""
    for job_id in job_rows.past_deadline(tx):
        job_rows.conclude(tx, job_id, DEADLINE)
    for job_id, finished_at, spec in job_rows.without_removal(tx):
        ttl = loads(spec).get("ttlSecondsAfterFinished")
        job_rows.delete_later(tx, job_id, float("inf") if ttl is None else finished_at + ttl)
    job_rows.delete_old(tx)


def deleted_jobs(conn: Connection) -> list[int]:
    """Return the ids of the deleted jobs that can be removed.

    All rollouts of such a job have ended and are in the trajectory store.
    """
    pending = sa.exists().where(rollouts.c.job_id == jobs.c.id, rollouts.c.pending.is_not(None))
    query = sa.select(jobs.c.id).where(
        jobs.c.deleted_at.is_not(None), jobs.c.finished_at.is_not(None), sa.not_(pending)
    )
    return list(conn.scalars(query))


def left_over(conn: Connection) -> tuple[list[int], list[int]]:
    """Return the ids of the jobs whose cancellation has not ended, and of the deleted jobs to remove."""
    return job_rows.cancelling(conn), deleted_jobs(conn)


def purge_some(tx: Transaction, job_id: int) -> bool:
    """Remove up to BATCH rollouts of a deleted job, and finally the job; return True when nothing is left."""
    removed = rollout_rows.remove(tx, job_id, BATCH)
    if not view_rows.forget(tx, job_id, BATCH) or removed == BATCH:
        return False
    group_rows.remove(tx, job_id)
    tx.conn.execute(sa.delete(cursors).where(cursors.c.job_id == job_id))
    blob_id = job_rows.remove(tx, job_id)
    if blob_id is not None:
        blobs.let_go(tx, blob_id)
    return True
