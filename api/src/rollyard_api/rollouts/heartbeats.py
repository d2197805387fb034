"""Heartbeats, which renew leases, list the sandboxes of a node, and show that its workers are alive.

Only workers of a node lease the rollouts that have a sandbox there. If the last of these workers has ended,
for example because a batch job reached its time limit or a machine was lost, no worker would ever lease them.
A worker whose sandboxes end with it reports this in its last heartbeat. A node from which no worker is heard
counts as lost after a period in which its sandboxes end by themselves. Neither case counts as a failure of
the rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa
from rollyard_crds.names import NODE

from rollyard_api.machine.events import NodeLost
from rollyard_api.machine.states import UNFINISHED, RolloutState
from rollyard_api.rollouts import transitions
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import nodes, rollouts
from rollyard_api.storage.statements import by_dialect, chunks

HEARD_SECONDS: Final = 5.0
"""The minimum time between two writes of a node's row, in seconds."""
NODE_BATCH: Final = 500
"""The number of rollouts of one node that are sent back in one transaction."""


def renew(
    tx: Transaction, leases: Sequence[tuple[str, int]], lease_seconds: float
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Renew leases, each of which is named by its rollout and its fencing token.

    Returns:
        The lost leases, which have expired or were fenced off by a newer token, and the cancelled ones.
    """
    if not leases:
        return [], []
    states = rollout_rows.leases(tx, (rollout for rollout, _ in leases))
    lost, cancelled, renewed = [], [], []
    for lease in leases:
        state = states.get(lease)
        if state == RolloutState.CANCELLED:
            cancelled.append(lease)
        elif state is not None and state.is_leased:
            renewed.append(lease)
        else:
            lost.append(lease)
    rollout_rows.renew(tx, renewed, tx.now + lease_seconds)
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
        orphans = [s for s, first in listed.items() if oldest_init is None or first < oldest_init]
        pending = {s: first for s, first in listed.items() if s not in set(orphans)}
        if pending:
            self.first_listed[node] = pending
        else:
            self.first_listed.pop(node, None)
        return orphans


def claims(tx: Transaction, node: str, sandboxes: Sequence[str]) -> tuple[list[str], float | None]:
    """Return the sandboxes that no rollout names, and the start time of the node's oldest Init lease.

    The start time is None if the node has no Init lease or if every sandbox is named.
    """
    known = rollout_rows.with_sandbox(tx, sandboxes)
    unnamed = [s for s in sandboxes if s not in known]
    return unnamed, rollout_rows.oldest_init(tx, node) if unnamed else None


def give_up(tx: Transaction, sandboxes: Sequence[str]) -> list[str]:
    """Send the rollouts that wait for these sandboxes back to Init, because the sandboxes end now.

    The sandboxes end together with their worker.

    Returns:
        The sandboxes that no worker uses at the moment. They may be removed.
    """
    ended = NodeLost("the sandbox ended with the worker that had it")
    for batch in chunks(sandboxes):
        transitions.happened(tx, rollout_rows.for_sandboxes(tx, batch), ended)
    used = rollout_rows.with_sandbox(tx, sandboxes, leased=True)
    return [sandbox for sandbox in sandboxes if sandbox not in used]


# When each node was last heard from.

_HEARD: Final = by_dialect(
    lambda insert: (new := insert(nodes)).on_conflict_do_update(
        index_elements=[nodes.c.name],
        set_={"heard_at": new.excluded.heard_at},
        where=nodes.c.heard_at < new.excluded.heard_at - HEARD_SECONDS,
    )
)


def heard(tx: Transaction, node: str, job_id: int | None = None) -> None:
    """Record that a worker of this node has just sent a request.

    Args:
        tx: The transaction.
        node: The node of the worker.
        job_id: The only job that the worker works for, or None if it works for every job. A worker of one job
            counts for the rollouts of that job alone, because it could otherwise keep another job waiting for
            a node that is gone. It counts only if some of these rollouts are on the node, because no row must
            be made for a name that is not a node's.
    """
    if node == NODE or (job_id is not None and not _has_rollouts(tx, node, job_id)):
        return
    tx.conn.execute(_HEARD[tx.sqlite], {"name": _name(node, job_id), "heard_at": tx.now})


def _name(node: str, job_id: int | None) -> str:
    """Return the name of a row. The node is hashed in a job's own row, as its name may fill the column."""
    if job_id is None:
        return node
    return f"job {job_id}: {hashlib.sha256(node.encode()).hexdigest()}"


def _has_rollouts(tx: Transaction, node: str, job_id: int) -> bool:
    matching = sa.select(rollouts.c.id).where(
        rollouts.c.job_id == job_id, rollouts.c.state.in_(UNFINISHED), rollouts.c.node == node
    )
    return tx.conn.execute(matching.limit(1)).first() is not None


def give_up_silent(tx: Transaction, silent_seconds: float) -> int:
    """Send the rollouts that wait for silent nodes back to Init, and return the number of these rollouts.

    A node is silent if none of its workers was heard from for `silent_seconds`. An unknown node counts as
    heard now. A caller that gets NODE_BATCH or more calls this function again.
    """
    given_up = 0
    waited_for = rollout_rows.waited_for(tx)
    if not waited_for:
        return 0
    known = {row.name: row.heard_at for row in tx.conn.execute(sa.select(nodes))}
    silent = NodeLost(f"no worker of the node was heard for {silent_seconds:g} s")
    for node, job_id in waited_for:
        spoke = [known[name] for name in (node, _name(node, job_id)) if name in known]
        if not spoke:
            heard(tx, node, job_id)
        elif max(spoke) < tx.now - silent_seconds:
            rows = rollout_rows.at_node(tx, job_id, node, NODE_BATCH)
            transitions.happened(tx, rows, silent)
            given_up += len(rows)
    return given_up


def forget(tx: Transaction, silent_seconds: float) -> None:
    """Delete the rows of nodes that have long been silent and for which no rollout waits."""
    waited_for = {node for node, _ in rollout_rows.waited_for(tx)}
    old = sa.select(nodes.c.name).where(nodes.c.heard_at < tx.now - 10 * silent_seconds)
    for name in set(tx.conn.scalars(old)) - waited_for:
        tx.conn.execute(sa.delete(nodes).where(nodes.c.name == name))


def grace(tx: Transaction, lease_seconds: float) -> None:
    """Give every lease its full time, and count every node as heard now.

    This is called after a start, before which no worker could renew a lease or be heard.
    """
    rollout_rows.grace(tx, lease_seconds)
    tx.conn.execute(sa.update(nodes).values(heard_at=tx.now))
