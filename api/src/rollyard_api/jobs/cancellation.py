"""Jobs are cancelled, ended at their deadline, deleted, and removed after their time to live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads
from rollyard_api.core.problems import NotFound
from rollyard_api.jobs import blobs
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import outages
from rollyard_api.rollouts.ending import cancelled, end
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import view_tables
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.jobs import DELETED
from rollyard_api.storage.rows import UnfinishedRollout, columns, read_all
from rollyard_api.storage.schema import (
    cursors,
    groups,
    jobs,
    payloads,
    rollouts,
)

DEADLINE = "DeadlineExceeded"
"""The reason of a job that was cancelled at its deadline."""
BATCH = 2000
"""The number of rollouts that are ended or removed in one transaction. Other requests run between two
transactions."""


def _cancel_rows(tx: Transaction, rows: Sequence[UnfinishedRollout], reason: str) -> None:
    end(tx, [cancelled(row, reason) for row in rows])


def _unfinished(job_id: int) -> sa.Select[Any]:
    return (
        sa.select(*columns(UnfinishedRollout, rollouts))
        .where(rollouts.c.job_id == job_id, rollouts.c.state < RolloutState.SUCCEEDED)
        .order_by(rollouts.c.id)
        .with_for_update()
    )


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
    rows = read_all(UnfinishedRollout, tx.conn.execute(_unfinished(job_id).limit(BATCH)))
    late = job.cancel_reason == DEADLINE and job.outage_began is not None
    endings = [
        outages.ending(tx, row, "the pool had no ready backend until the job's deadline")
        if late and row.state in outages.WAITING
        else cancelled(row, job.cancel_reason)
        for row in rows
    ]
    if endings:
        end(tx, endings)
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
        query = _unfinished(job.id).where(rollouts.c.id == rollout)
    else:
        no = tx.conn.execute(
            sa.select(groups.c.no).where(groups.c.job_id == job.id, groups.c.task_id == group)
        ).scalar_one_or_none()
        if no is None:
            raise NotFound(f"RolloutJob {name!r} has no group {group!r}", reason="GroupNotFound")
        query = _unfinished(job.id).where(rollouts.c.group_no == no)
    rows = read_all(UnfinishedRollout, tx.conn.execute(query))
    if rows:
        _cancel_rows(tx, rows, "Cancelled")
    return len(rows)


def cancel_unfinished(tx: Transaction, job_id: int, rollout: str | None = None) -> int:
    """End up to BATCH unfinished rollouts of a job that stays open, or only the given one.

    Returns:
        How many were ended. With 0, none is left.
    """
    query = _unfinished(job_id).limit(BATCH)
    if rollout is not None:
        query = query.where(rollouts.c.id == rollout)
    rows = read_all(UnfinishedRollout, tx.conn.execute(query))
    if rows:
        _cancel_rows(tx, rows, "Cancelled")
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
    ids = list(tx.conn.scalars(sa.select(rollouts.c.id).where(rollouts.c.job_id == job_id).limit(BATCH)))
    for at in range(0, len(ids), 500):
        some = ids[at : at + 500]
        tx.conn.execute(sa.delete(payloads).where(payloads.c.rollout_id.in_(some)))
        tx.conn.execute(sa.delete(rollouts).where(rollouts.c.id.in_(some)))
    if not view_tables.forget(tx.conn, job_id, BATCH) or len(ids) == BATCH:
        return False
    for table in (groups, cursors):
        tx.conn.execute(sa.delete(table).where(table.c.job_id == job_id))
    blob_id = job_rows.remove(tx, job_id)
    if blob_id is not None:
        blobs.let_go(tx, blob_id)
    return True
