"""While a pool has no ready backend, its rollouts wait in the queues of Init and Run and use no attempt.

They wait until the deadline of their job, or for a limited time where the job has no deadline. Then they end
as failed with the reason NoBackend. A Run that was under way when the last backend was lost returns to its
queue, and the attempt is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from rollyard_api.backends.assignment import Key, without_backend
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import timing
from rollyard_api.rollouts.ending import Ending, end
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import UnfinishedRollout, columns, read_all
from rollyard_api.storage.schema import jobs, rollouts
from rollyard_api.trajectories import spans

REASON = "NoBackend"
BATCH = 1000
"""The number of rollouts that are ended in one transaction."""
_BACKEND_GONE = ("BackendUnavailable", REASON)
"""The reasons of Run failures that an outage explains."""
WAITING = (RolloutState.QUEUED_INIT, RolloutState.QUEUED_RUN)
"""The states of rollouts that cannot get further than Run's queue during an outage."""


def excused(tx: Transaction, failures: Iterable[tuple[int, dict[str, Any]]]) -> set[str]:
    """Return the rollouts among these, each with its job's number, that failed because of an outage.

    A worker that knows that the pool had no ready backend reports the reason NoBackend. The others report
    BackendUnavailable, and the pool is looked at.
    """
    asked = [(job_id, item) for job_id, item in failures if _concerns_backend(item)]
    if not asked:
        return set()
    query = sa.select(jobs.c.id, jobs.c.namespace, jobs.c.pool)
    found = tx.conn.execute(query.where(jobs.c.id.in_({job_id for job_id, _ in asked})))
    keys = {row.id: (row.namespace, row.pool) for row in found if row.pool is not None}
    gone = without_backend(tx, set(keys.values()))
    return {item["rollout"] for job_id, item in asked if item["reason"] == REASON or keys.get(job_id) in gone}


def _concerns_backend(item: dict[str, Any]) -> bool:
    return item["stage"] == "run" and item["reason"] in _BACKEND_GONE


def look(tx: Transaction) -> None:
    """Note for each unfinished job since when its pool has had no ready backend.

    The time while a job is suspended does not count.
    """
    query = sa.select(jobs.c.id, jobs.c.namespace, jobs.c.pool, jobs.c.suspended, jobs.c.outage_began).where(
        jobs.c.finished_at.is_(None), jobs.c.pool.is_not(None)
    )
    live = list(tx.conn.execute(query.order_by(jobs.c.id)))
    keys: set[Key] = {(row.namespace, row.pool) for row in live}
    gone = without_backend(tx, keys) if keys else set()
    for row in live:
        waits = (row.namespace, row.pool) in gone and not row.suspended
        if waits != (row.outage_began is not None):
            since = tx.now if waits else None
            tx.conn.execute(sa.update(jobs).where(jobs.c.id == row.id).values(outage_began=since))


def end_overdue(tx: Transaction, patience: float) -> int:
    """End rollouts that have waited in the queue of Init or Run for `patience` seconds of an outage.

    Jobs with a deadline are left out, because their rollouts wait until then.

    Returns:
        The number of rollouts that were ended. A caller that gets BATCH calls this function again.
    """
    since = tx.now - patience
    query = (
        sa.select(*columns(UnfinishedRollout, rollouts))
        .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
        .where(
            jobs.c.finished_at.is_(None),
            jobs.c.cancel_reason.is_(None),
            jobs.c.deadline_at.is_(None),
            jobs.c.outage_began <= since,
            rollouts.c.state.in_(WAITING),
            rollouts.c.since <= since,
        )
        .order_by(rollouts.c.id)
        .limit(BATCH)
        .with_for_update(of=rollouts, skip_locked=True)
    )
    rows = read_all(UnfinishedRollout, tx.conn.execute(query))
    if rows:
        message = f"the pool had no ready backend for {patience:g} s"
        end(tx, [ending(tx, row, message) for row in rows])
    return len(rows)


def ending(tx: Transaction, row: UnfinishedRollout, message: str) -> Ending:
    """Return the ending of a rollout that waits in a queue, and has waited for a backend too long."""
    stage = row.state.stage or ""
    spans.waited(tx, row.id, stage, row.since, reason=REASON)
    return Ending(
        rollout=row.id,
        job_id=row.job_id,
        group_no=row.group_no,
        state=RolloutState.FAILED,
        stage=stage,
        reason=REASON,
        message=message,
        timings=timing.add(row.timings, stage, queued=max(0.0, tx.now - row.since)),
        settled=row.settled,
    )
