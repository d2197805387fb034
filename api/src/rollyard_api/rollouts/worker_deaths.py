"""The leases of a worker that has died are taken back at once, because its driver saw the process end."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollyard_api.rollouts.requeue import HELD_COLUMNS, Cause, Return, requeue
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import HeldRollout, read_all
from rollyard_api.storage.schema import jobs, rollouts

REASON = "WorkerDied"
BATCH = 500
"""The number of leases that are taken back with one statement."""

_JOB = sa.select(jobs.c.id).where(
    jobs.c.namespace == bindparam("b_namespace"),
    jobs.c.name == bindparam("b_name"),
    jobs.c.deleted_at.is_(None),
)
_HELD = (
    sa.select(*HELD_COLUMNS)
    .where(
        rollouts.c.lease_expires.is_not(None),
        rollouts.c.job_id == bindparam("b_job"),
        rollouts.c.worker == bindparam("b_worker"),
    )
    .order_by(rollouts.c.id)
    .limit(bindparam("b_limit"))
    .with_for_update()
)
# The last lease of a rollout names the worker, and a completed stage is recorded under the lease's token.
_COMPLETED = (
    sa.select(rollouts.c.id)
    .where(
        rollouts.c.job_id == bindparam("b_job"),
        rollouts.c.worker == bindparam("b_worker"),
        (" " + rollouts.c.settled + " ").like("% c" + sa.cast(rollouts.c.token, sa.String) + " %"),
    )
    .limit(1)
)


@dataclass(frozen=True, slots=True)
class Death:
    """What the control plane knew of a worker that has died."""

    returned: int
    """The number of leases that were taken back."""
    completed: bool
    """Whether the worker was the last one to complete a stage of at least one rollout."""


def take_back(tx: Transaction, namespace: str, job: str, worker: str, max_expiries: int) -> Death:
    """Take back the leases of a dead worker of one job, as if they had expired now.

    A repeat finds no lease and changes nothing. A worker that is not dead after all loses its leases and
    learns so with its next heartbeat; the fencing tokens protect its rollouts.

    Args:
        max_expiries: The number of leases of one rollout that may expire, as for `lease_expiry.expire`.
    """
    job_id = tx.conn.execute(_JOB, {"b_namespace": namespace, "b_name": job}).scalar_one_or_none()
    if job_id is None:
        return Death(0, False)
    named = {"b_job": job_id, "b_worker": worker}
    completed = tx.conn.execute(_COMPLETED, named).first() is not None
    returned = 0
    while rows := read_all(HeldRollout, tx.conn.execute(_HELD, named | {"b_limit": BATCH})):
        for row in rows:
            tx.count("expiries", row.state.stage or "")
        lost = [
            Return(row=row, cause=Cause.LEASE_LOST, reason=REASON, message="its driver saw the worker end")
            for row in rows
        ]
        requeue(tx, lost, max_expiries=max_expiries)
        returned += len(rows)
    return Death(returned, completed)
