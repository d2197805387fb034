"""Leases are renewed by heartbeats and expire without them; orphaned sandboxes are found here, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts.requeue import HELD_COLUMNS, Cause, Return, requeue
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import HeldRollout, read_all
from rollyard_api.storage.schema import rollouts

EXPIRY_BATCH = 500
"""The number of expired leases that are taken back in one transaction."""

_NAMED = sa.select(rollouts.c.id, rollouts.c.token, rollouts.c.state).where(
    rollouts.c.id.in_(bindparam("b_ids", expanding=True))
)
_RENEW = (
    sa.update(rollouts)
    .where(
        rollouts.c.id == bindparam("b_id"),
        rollouts.c.token == bindparam("b_token"),
        rollouts.c.lease_expires.is_not(None),
    )
    .values(lease_expires=bindparam("b_expires"))
)
_KNOWN = sa.select(rollouts.c.sandbox_id).where(rollouts.c.sandbox_id.in_(bindparam("b_ids", expanding=True)))
_INITS = sa.select(sa.func.min(rollouts.c.since)).where(
    rollouts.c.lease_expires.is_not(None),
    rollouts.c.state == RolloutState.LEASED_INIT,
    rollouts.c.node == bindparam("b_node"),
)
_EXPIRED = (
    sa.select(*HELD_COLUMNS)
    .where(rollouts.c.lease_expires < bindparam("b_now"))
    .order_by(rollouts.c.lease_expires)
    .limit(EXPIRY_BATCH)
    .with_for_update(skip_locked=True)
)
_GRACE = (
    sa.update(rollouts)
    .where(rollouts.c.lease_expires.is_not(None), rollouts.c.lease_expires < bindparam("b_until"))
    .values(lease_expires=bindparam("b_until"))
)


def renew(
    tx: Transaction, leases: Sequence[tuple[str, int]], lease_seconds: float
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Renew leases, each of which is named by its rollout and its fencing token.

    Returns:
        The lost leases, which have expired or were fenced off by a newer token, and the cancelled ones.
    """
    if not leases:
        return [], []
    ids = sorted({rollout for rollout, _ in leases})
    rows = {row.id: row for row in tx.conn.execute(_NAMED, {"b_ids": ids})}
    lost, cancelled, held = [], [], []
    for rollout, token in leases:
        row = rows.get(rollout)
        if row is None or row.token != token:
            lost.append((rollout, token))
        elif row.state == RolloutState.CANCELLED:
            cancelled.append((rollout, token))
        elif not row.state.is_leased:
            lost.append((rollout, token))
        else:
            held.append({"b_id": rollout, "b_token": token, "b_expires": tx.now + lease_seconds})
    if held:
        # Every change of several rows goes in the order of the ids, because two replicas could deadlock
        # otherwise.
        tx.conn.execute(_RENEW, sorted(held, key=lambda change: str(change["b_id"])))
    return lost, cancelled


@dataclass(slots=True)
class Unclaimed:
    """The times at which each sandbox that no rollout names was first listed, by node.

    An Init in progress has claimed its sandbox before it reports the sandbox to the control plane. Such a
    sandbox was first listed after its lease was granted. A sandbox that was listed before every Init lease of
    its node therefore belongs to none of them.
    """

    first_listed: dict[str, dict[str, float]] = field(default_factory=dict)

    def orphans(self, node: str, unnamed: Sequence[str], oldest_init: float | None, now: float) -> list[str]:
        """Return the sandboxes that no unfinished rollout names and no running Init can own."""
        before = self.first_listed.get(node, {})
        listed = {sandbox: before.get(sandbox, now) for sandbox in unnamed}
        found = [s for s, first in listed.items() if oldest_init is None or first < oldest_init]
        kept = {s: first for s, first in listed.items() if s not in set(found)}
        if kept:
            self.first_listed[node] = kept
        else:
            self.first_listed.pop(node, None)
        return found


def claims(tx: Transaction, node: str, sandboxes: Sequence[str]) -> tuple[list[str], float | None]:
    """Return the sandboxes that no rollout names, and the start time of the node's oldest Init lease.

    The start time is None if the node has no Init lease or if every sandbox is named.
    """
    known: set[str] = set()
    for at in range(0, len(sandboxes), 500):
        known.update(tx.conn.scalars(_KNOWN, {"b_ids": list(sandboxes[at : at + 500])}))
    unnamed = [s for s in sandboxes if s not in known]
    if not unnamed:
        return [], None
    return unnamed, tx.conn.execute(_INITS, {"b_node": node}).scalar_one()


def expire(tx: Transaction, max_expiries: int) -> int:
    """Take back expired leases, and return their number, which is at most EXPIRY_BATCH.

    A caller that gets EXPIRY_BATCH calls this function again. After Init and Run the rollout begins again at
    Init, because its sandbox is dirty or gone. Eval is tried once more in the same sandbox, and then the
    rollout begins again at Init.
    """
    rows = read_all(HeldRollout, tx.conn.execute(_EXPIRED, {"b_now": tx.now}))
    for row in rows:
        tx.count("expiries", row.state.stage or "")
    message = "the lease expired, because its worker did not renew it"
    returns = [
        Return(row=row, cause=Cause.LEASE_LOST, reason="LeaseExpired", message=message) for row in rows
    ]
    requeue(tx, returns, max_expiries=max_expiries)
    return len(rows)


def grace(tx: Transaction, lease_seconds: float) -> None:
    """Give every lease its full time. This is called after a start, before which workers could not renew."""
    tx.conn.execute(_GRACE, {"b_until": tx.now + lease_seconds})
