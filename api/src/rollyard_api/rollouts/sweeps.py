"""What is noticed without a report: leases that expire, workers that die, outages, and missing rewards.

While a pool has no ready backend, its rollouts wait in the queues of Init and Run and use no attempt. They
wait until the deadline of their job, or for a limited time where the job has no deadline. Then they end as
failed with the reason NoBackend. Rollouts whose rewards the trainer gives wait for these as long as their job
says, and end as failed with the reason RewardNotGiven.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from rollyard_crds.workers import WorkerDeath, WorkerDied

from rollyard_api.backends.assignment import Key, without_backend
from rollyard_api.machine.events import BackendAwaited, LeaseLost, RewardAwaited
from rollyard_api.rollouts import transitions
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import jobs

EXPIRY_BATCH: Final = 500
"""The number of leases that are taken back in one transaction because they have expired."""
OUTAGE_BATCH: Final = 1000
"""The number of rollouts that are ended in one transaction because of an outage."""
_WITH_POOLS: Final = (
    sa.select(jobs.c.id, jobs.c.namespace, jobs.c.pool, jobs.c.suspended, jobs.c.outage_began)
    .where(jobs.c.finished_at.is_(None), jobs.c.pool.is_not(None))
    .order_by(jobs.c.id)
)


def expire(tx: Transaction) -> int:
    """Take back expired leases, and return their number, which is at most EXPIRY_BATCH.

    A caller that gets EXPIRY_BATCH calls this function again. After Init and Run the rollout begins again at
    Init, because its sandbox is dirty or gone. Eval is tried once more in the same sandbox, and then the
    rollout begins again at Init.
    """
    rows = rollout_rows.expired(tx, EXPIRY_BATCH)
    message = "the lease expired, because its worker did not renew it"
    transitions.happened(tx, rows, LeaseLost("LeaseExpired", message))
    return len(rows)


def worker_died(tx: Transaction, report: WorkerDied) -> WorkerDeath:
    """Take back the leases of a dead worker of one job, as if they had expired now.

    A repeat finds no lease and changes nothing. A worker that is not dead after all loses its leases, and
    learns this from its next heartbeat; the fencing tokens protect its rollouts.

    Args:
        tx: The transaction.
        report: The worker, whose process its driver saw end, and the job.
    """
    job = job_rows.named(tx.conn, report.namespace, report.job)
    if job is None:
        return WorkerDeath(returned=0, completed=False)
    completed = rollout_rows.has_completed(tx, job.id, report.worker)
    returned = 0
    died = LeaseLost("WorkerDied", "its driver saw the worker end")
    while rows := rollout_rows.held_by(tx, job.id, report.worker, EXPIRY_BATCH):
        transitions.happened(tx, rows, died)
        returned += len(rows)
    return WorkerDeath(returned=returned, completed=completed)


def note_outages(tx: Transaction) -> None:
    """Note for each unfinished job since when its pool has had no ready backend.

    The time while a job is suspended does not count.
    """
    live = tx.conn.execute(_WITH_POOLS).all()
    keys: set[Key] = {(row.namespace, row.pool) for row in live}
    unreachable = without_backend(tx, keys) if keys else set()
    for row in live:
        waits = (row.namespace, row.pool) in unreachable and not row.suspended
        if waits != (row.outage_began is not None):
            job_rows.note_outage(tx, row.id, tx.now if waits else None)


def end_overdue(tx: Transaction, patience: float) -> int:
    """End rollouts that have waited in the queue of Init or Run for `patience` seconds of an outage.

    Jobs with a deadline are left out, because their rollouts wait until then.

    Returns:
        The number of rollouts that were ended. A caller that gets OUTAGE_BATCH calls this function again.
    """
    rows = rollout_rows.overdue(tx, tx.now - patience, OUTAGE_BATCH)
    transitions.happened(tx, rows, BackendAwaited(f"the pool had no ready backend for {patience:g} s"))
    return len(rows)


def end_unrewarded(tx: Transaction, not_before: float) -> int:
    """End rollouts that have waited for the trainer's reward as long as their job allows.

    Args:
        tx: The transaction.
        not_before: The time before which none is ended, in seconds since the epoch. After a start, a trainer
            gets a moment to hand in what it could not while the control plane was down.

    Returns:
        The number of rollouts that were ended, or OUTAGE_BATCH if there may be more. In that case a caller
        calls this function again.
    """
    if tx.now < not_before:
        return 0
    ended = 0
    for job_id, seconds in job_rows.rewarded_by_trainers(tx).items():
        rows = rollout_rows.unrewarded(tx, job_id, tx.now - seconds, OUTAGE_BATCH - ended)
        message = (
            f"the trainer handed in no reward within {seconds:g} s: call client.rewards (POST …/rewards)"
        )
        transitions.happened(tx, rows, RewardAwaited(message))
        ended += len(rows)
        if ended == OUTAGE_BATCH:
            break
    return ended
