"""Rollouts that are too old for the pool's weights, which are queued at Init again or cancelled.

The age of a rollout is the number of weight updates since it entered Run (`rollouts.policy_index`). The
`maxPolicyLag` of its job is the limit. The lease of a rollout ends with it. Its holder learns this from its
next heartbeat, and its later reports are stale. The sandbox then belongs to no rollout, and the heartbeat of
its node therefore names it an orphan.
"""

from __future__ import annotations

from typing import Final

from rollyard_api.machine.events import NewWeights
from rollyard_api.machine.rollout import Rejection, decide
from rollyard_api.rollouts import transitions
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction

REASON: Final = "PolicyTooStale"
TOO_STALE: Final = "more weight updates than maxPolicyLag came since it entered Run"


def enforce(tx: Transaction, namespace: str, pool: str) -> int:
    """Take back the pool's rollouts in Run or before Eval that are too stale, and return their number."""
    index = rollout_rows.reached(tx, namespace, pool)
    decided: list[transitions.Decided] = []
    for row, limits in rollout_rows.behind(tx, namespace, pool, index):
        lag = limits.max_policy_lag
        if lag is not None and row.policy_index is not None and index - row.policy_index > lag:
            event = NewWeights(REASON, TOO_STALE, cancel=limits.stale_rollouts == "Cancel")
            decision = decide(row, event, limits, tx.now)
            if not isinstance(decision, Rejection):
                decided.append((row, decision))
    transitions.apply(tx, decided)
    return len(decided)


def fence(tx: Transaction, namespace: str, pool: str, url: str) -> int:
    """Queue the rollouts in Run on this backend at Init again, and return their number."""
    rows = rollout_rows.running_on(tx, namespace, pool, url)
    message = "the backend got other weights while the rollout was in Run"
    transitions.happened(tx, rows, NewWeights("WeightsUpdated", message))
    return len(rows)
