"""Rollouts that are too old for the pool's weights are queued at Init again or cancelled.

The age of a rollout is the number of weight updates since it entered Run (`rollouts.policy_index`). The
`maxPolicyLag` of its job is the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import outcomes, timing
from rollyard_api.rollouts.ending import Ending, end
from rollyard_api.rollouts.requeue import Cause, Return, requeue
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import AgedRollout, columns, read_all
from rollyard_api.storage.schema import backends, jobs, pools, rollouts
from rollyard_api.trajectories import spans

REASON = "PolicyTooStale"
TOO_STALE = "more weight updates than maxPolicyLag came since it entered Run"

_AT = columns(AgedRollout, rollouts, jobs)
_REACHED = (
    sa.select(sa.func.max(backends.c.policy_index))
    .join_from(backends, pools, pools.c.id == backends.c.pool_id)
    .where(
        pools.c.namespace == bindparam("b_namespace"),
        pools.c.name == bindparam("b_pool"),
        backends.c.weights == "Current",
    )
)
_BEHIND = (
    sa.select(*_AT)
    .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
    .where(
        jobs.c.namespace == bindparam("b_namespace"),
        jobs.c.pool == bindparam("b_pool"),
        jobs.c.finished_at.is_(None),
        rollouts.c.state.in_([RolloutState.LEASED_RUN, RolloutState.QUEUED_EVAL]),
        rollouts.c.policy_index < bindparam("b_index"),
    )
    .order_by(rollouts.c.id)
    .with_for_update(of=rollouts)
)
_PLACES = (
    sa.select(pools.c.namespace, pools.c.name)
    .distinct()
    .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
    .join(pools, sa.and_(pools.c.namespace == jobs.c.namespace, pools.c.name == jobs.c.pool))
    .where(
        rollouts.c.id.in_(bindparam("b_ids", expanding=True)),
        rollouts.c.policy_index < pools.c.policy_index,
    )
)


def reached(tx: Transaction, namespace: str, pool: str) -> int:
    """Return the index of the newest weights that a backend of the pool samples with; 0 before any update."""
    return tx.conn.execute(_REACHED, {"b_namespace": namespace, "b_pool": pool}).scalar_one() or 0


def enforce(tx: Transaction, namespace: str, pool: str) -> int:
    """Take back the pool's rollouts that are too stale in Run or before Eval, and return their number."""
    index = reached(tx, namespace, pool)
    asked = {"b_namespace": namespace, "b_pool": pool, "b_index": index}
    stale = []
    for row in read_all(AgedRollout, tx.conn.execute(_BEHIND, asked)):
        lag = row.limits.max_policy_lag
        if lag is not None and row.policy_index is not None and index - row.policy_index > lag:
            stale.append(row)
    return take_back(tx, stale)


def take_back(tx: Transaction, rows: Sequence[AgedRollout]) -> int:
    """Queue these rollouts at Init again or cancel them, as their jobs specify, and return their number."""
    cancelled = [row for row in rows if row.limits.stale_rollouts == "Cancel"]
    gone = {row.id for row in cancelled}
    restart(tx, [row for row in rows if row.id not in gone], REASON, TOO_STALE)
    if cancelled:
        end(tx, [ending(tx, row) for row in cancelled])
        tx.count("stale_rollouts", "cancelled", value=len(cancelled))
    return len(rows)


def ending(tx: Transaction, row: AgedRollout) -> Ending:
    """Return the ending of a rollout that is too stale."""
    stage = row.state.stage or ""
    return Ending(
        rollout=row.id,
        job_id=row.job_id,
        group_no=row.group_no,
        state=RolloutState.CANCELLED,
        stage=stage,
        reason=REASON,
        message=TOO_STALE,
        timings=_timings(tx, row, stage),
        settled=row.settled,
    )


def restart(tx: Transaction, rows: Sequence[AgedRollout], reason: str, message: str) -> None:
    """Queue rollouts at Init again, without sandbox and carry; this does not count as an attempt.

    The lease ends with it. Its holder learns this from its next heartbeat, and its later reports are stale.
    The sandbox then belongs to no rollout, and the heartbeat of its node therefore names it an orphan.
    """
    if not rows:
        return
    requeue(tx, [Return(row=row, cause=Cause.NEW_WEIGHTS, reason=reason, message=message) for row in rows])
    tx.count("stale_rollouts", "restarted", value=len(rows))


def complete(tx: Transaction, results: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Call `outcomes.complete`, and then take back the rollouts that left Run and are too stale for Eval."""
    told = outcomes.complete(tx, results)
    ran = [
        outcome["rollout"]
        for outcome, item in zip(told, results, strict=True)
        if outcome["outcome"] == "accepted" and item["stage"] == "run"
    ]
    if ran:
        places = tx.conn.execute(_PLACES, {"b_ids": ran}).all()
        for namespace, pool in sorted((row.namespace, row.name) for row in places):
            enforce(tx, namespace, pool)
    return told


def fence(tx: Transaction, namespace: str, pool: str, url: str) -> int:
    """Queue the rollouts in Run on this backend at Init again, and return their number."""
    query = (
        sa.select(*_AT)
        .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
        .where(
            jobs.c.namespace == namespace,
            jobs.c.pool == pool,
            rollouts.c.backend == url,
            rollouts.c.state == RolloutState.LEASED_RUN,
        )
        .order_by(rollouts.c.id)
        .with_for_update(of=rollouts)
    )
    rows = read_all(AgedRollout, tx.conn.execute(query))
    restart(tx, rows, "WeightsUpdated", "the backend got other weights while the rollout was in Run")
    return len(rows)


def _timings(tx: Transaction, row: AgedRollout, stage: str) -> str:
    since = max(0.0, tx.now - row.since)
    if row.state.is_leased:
        spans.worked(tx, row.id, stage, row.token, row.since, worker=row.worker, node=row.node, error=REASON)
        return timing.add(row.timings, stage, active=since)
    spans.waited(tx, row.id, stage, row.since, reason=REASON)
    return timing.add(row.timings, stage, queued=since)
