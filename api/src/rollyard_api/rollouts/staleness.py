"""Rollouts that are too old for the pool's weights: they go back to Init, or are cancelled.

A rollout's age is the number of weight updates since it entered Run (`rollouts.policy_index`);
its job's `maxPolicyLag` bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollyard_api.core.codec import loads
from rollyard_api.core.states import RolloutState
from rollyard_api.rollouts import outcomes, timing
from rollyard_api.rollouts.ending import Ending, end
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import AgedRollout, columns, read_all
from rollyard_api.storage.schema import backends, jobs, pools, rollouts

REASON = "PolicyTooStale"

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


def max_lag(limits: dict[str, Any]) -> int | None:
    """A job's `maxPolicyLag`, from its limits."""
    lag: int | None = limits.get("max_policy_lag")
    return lag


def reached(tx: Transaction, namespace: str, pool: str) -> int:
    """The newest weights that a backend of the pool samples with, as an index; 0 before any update."""
    return tx.conn.execute(_REACHED, {"b_namespace": namespace, "b_pool": pool}).scalar_one() or 0


def enforce(tx: Transaction, namespace: str, pool: str) -> int:
    """Take back the pool's rollouts that have become too stale in Run or before Eval; returns how many."""
    index = reached(tx, namespace, pool)
    query = (
        sa.select(*_AT)
        .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
        .where(
            jobs.c.namespace == namespace,
            jobs.c.pool == pool,
            jobs.c.finished_at.is_(None),
            rollouts.c.state.in_([RolloutState.LEASED_RUN, RolloutState.QUEUED_EVAL]),
            rollouts.c.policy_index < index,
        )
        .order_by(rollouts.c.id)
        .with_for_update(of=rollouts)
    )
    stale = []
    for row in read_all(AgedRollout, tx.conn.execute(query)):
        lag = max_lag(loads(row.limits))
        if lag is not None and row.policy_index is not None and index - row.policy_index > lag:
            stale.append(row)
    return take_back(tx, stale)


def take_back(tx: Transaction, rows: Sequence[AgedRollout]) -> int:
    """Take these rollouts back to Init, or cancel them, as their jobs say."""
    cancelled = [row for row in rows if loads(row.limits).get("stale_rollouts") == "Cancel"]
    gone = {row.id for row in cancelled}
    restart(tx, [row for row in rows if row.id not in gone], REASON)
    if cancelled:
        end(tx, [ending(tx, row) for row in cancelled])
        tx.count("stale_rollouts", "cancelled", value=len(cancelled))
    return len(rows)


def ending(tx: Transaction, row: AgedRollout) -> Ending:
    """The end of a rollout that is too stale."""
    stage = row.state.stage or ""
    return Ending(
        rollout=row.id,
        job_id=row.job_id,
        group_no=row.group_no,
        state=RolloutState.CANCELLED,
        stage=stage,
        reason=REASON,
        message="more weight updates than maxPolicyLag came since it entered Run",
        timings=_timings(tx, row, stage),
        settled=row.settled,
    )


def restart(tx: Transaction, rows: Sequence[AgedRollout], reason: str) -> None:
    """Back to Init with neither sandbox nor carry; not counted as an attempt.

    The lease ends with it: its holder learns so by its next heartbeat, and what it sends is stale.
    Its sandbox belongs to no rollout any more, so that the heartbeat of its node names it an orphan.
    """
    if not rows:
        return
    changes = []
    for row in rows:
        stage = row.state.stage or "run"
        changes.append(outcomes.requeued(row, tx.now, "init", timings=_timings(tx, row, stage)))
        tx.emit(row.job_id, rollout=row.id, stage="init", status="queued", reward=None, reason=reason)
    outcomes.requeue(tx, changes)
    tx.count("stale_rollouts", "restarted", value=len(rows))


def complete(tx: Transaction, results: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """`outcomes.complete`, then what has just left Run and is too stale for Eval is taken back."""
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
    """Take whatever is in Run on this backend back to Init, and return how many rollouts that were."""
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
    restart(tx, rows, "WeightsUpdated")
    return len(rows)


def _timings(tx: Transaction, row: AgedRollout, stage: str) -> str:
    since = max(0.0, tx.now - row.since)
    if row.state.is_leased:
        return timing.add(row.timings, stage, active=since)
    return timing.add(row.timings, stage, queued=since)
