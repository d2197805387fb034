"""The leases of a worker that has died are taken back at once, because its driver saw the process end."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollyard_api.rollouts.lease_expiry import EXPIRY_BATCH, expire
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import jobs, rollouts

_JOB = sa.select(jobs.c.id).where(
    jobs.c.namespace == bindparam("b_namespace"),
    jobs.c.name == bindparam("b_name"),
    jobs.c.deleted_at.is_(None),
)
_END_LEASES = (
    sa.update(rollouts)
    .where(
        rollouts.c.lease_expires.is_not(None),
        rollouts.c.job_id == bindparam("b_job"),
        rollouts.c.worker == bindparam("b_worker"),
    )
    .values(lease_expires=0.0)
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
    returned = tx.conn.execute(_END_LEASES, named).rowcount
    left = returned
    while left > 0:
        taken = expire(tx, max_expiries)
        left = left - taken if taken == EXPIRY_BATCH else 0
    return Death(returned, completed)
