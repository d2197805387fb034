"""When the sandboxes of a node are gone, the rollouts that wait for them are queued at Init again.

Only workers of a node lease the rollouts that have a sandbox there. If the last of these workers has ended,
for example because a batch job reached its time limit or a machine was lost, no worker would ever lease them.
A worker whose sandboxes end with it reports this in its last heartbeat. A node from which no worker is heard
counts as lost after a period in which its sandboxes end by themselves. Neither case counts as a failure of
the rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from rollyard_crds.names import NODE
from sqlalchemy import bindparam
from sqlalchemy.dialects import postgresql, sqlite

from rollyard_api.machine.states import UNFINISHED, RolloutState
from rollyard_api.rollouts.requeue import HELD_COLUMNS, Cause, Return, requeue
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import HeldRollout, read_all
from rollyard_api.storage.schema import nodes, rollouts

HEARD_SECONDS = 5.0
"""The minimum time between two writes of a node's row, in seconds."""
BATCH = 500
_WAITING = (RolloutState.QUEUED_RUN, RolloutState.QUEUED_EVAL)
_UNFINISHED = UNFINISHED


def _upsert(module: Any) -> Any:
    insert = module.insert(nodes)
    later = insert.excluded.heard_at
    return insert.on_conflict_do_update(
        index_elements=[nodes.c.name],
        set_={"heard_at": later},
        where=nodes.c.heard_at < later - HEARD_SECONDS,
    )


_HEARD = {"sqlite": _upsert(sqlite), "postgresql": _upsert(postgresql)}
_NAMED = sa.select(*HELD_COLUMNS).where(
    rollouts.c.sandbox_id.in_(bindparam("b_ids", expanding=True)), rollouts.c.state.in_(_WAITING)
)
_HELD = sa.select(rollouts.c.sandbox_id).where(
    rollouts.c.sandbox_id.in_(bindparam("b_ids", expanding=True)), rollouts.c.lease_expires.is_not(None)
)
_WAITED_FOR = (
    sa.select(rollouts.c.node, rollouts.c.job_id)
    .distinct()
    .where(rollouts.c.state.in_(_WAITING), rollouts.c.node.not_in(("", NODE)))
)
_OF_NODE = (
    sa.select(*HELD_COLUMNS)
    .where(
        rollouts.c.job_id == bindparam("b_job"),
        rollouts.c.state.in_(_WAITING),
        rollouts.c.node == bindparam("b_node"),
    )
    .order_by(rollouts.c.id)
    .limit(BATCH)
    .with_for_update(skip_locked=True)
)


def heard(tx: Transaction, node: str, job_id: int | None = None) -> None:
    """Record that a worker of this node has just sent a request.

    Args:
        job_id: The only job that the worker works for, or None if it works for every job. A worker of one job
            counts for the rollouts of that job alone, because it could otherwise keep another job waiting for
            a node that is gone. It counts only if some of these rollouts are on the node, because no row is
            to be made for a name that is not a node's.
    """
    if node == NODE or (job_id is not None and not _has_rollouts(tx, node, job_id)):
        return
    dialect = "sqlite" if tx.sqlite else "postgresql"
    tx.conn.execute(_HEARD[dialect], {"name": _name(node, job_id), "heard_at": tx.now})


def _name(node: str, job_id: int | None) -> str:
    """Return the name of a row. The node is hashed in a job's own row, as its name may fill the column."""
    if job_id is None:
        return node
    return f"job {job_id}: {hashlib.sha256(node.encode()).hexdigest()}"


def _has_rollouts(tx: Transaction, node: str, job_id: int) -> bool:
    some = sa.select(rollouts.c.id).where(
        rollouts.c.job_id == job_id, rollouts.c.state.in_(_UNFINISHED), rollouts.c.node == node
    )
    return tx.conn.execute(some.limit(1)).first() is not None


def give_up(tx: Transaction, sandboxes: Sequence[str]) -> list[str]:
    """Send the rollouts that wait for these sandboxes back to Init, because the sandboxes end now.

    The sandboxes end together with their worker.

    Returns:
        The sandboxes that no worker uses at the moment. They may be removed.
    """
    used: set[str] = set()
    for at in range(0, len(sandboxes), BATCH):
        some = list(sandboxes[at : at + BATCH])
        ended = read_all(HeldRollout, tx.conn.execute(_NAMED, {"b_ids": some}))
        _begin_anew(tx, ended, "the sandbox ended with the worker that had it")
        used.update(tx.conn.scalars(_HELD, {"b_ids": some}))
    return [sandbox for sandbox in sandboxes if sandbox not in used]


def give_up_silent(tx: Transaction, silent_seconds: float) -> int:
    """Send the rollouts that wait for silent nodes back to Init, and return the number of these rollouts.

    A node is silent if none of its workers was heard for `silent_seconds`. An unknown node counts as heard
    now. A caller that gets BATCH or more calls this function again.
    """
    given_up = 0
    waited_for = sorted((row.node, row.job_id) for row in tx.conn.execute(_WAITED_FOR))
    if not waited_for:
        return 0
    found = tx.conn.execute(sa.select(nodes.c.name, nodes.c.heard_at))
    known = {row.name: row.heard_at for row in found}
    for node, job_id in waited_for:
        names = (node, _name(node, job_id))
        spoke = [known[name] for name in names if name in known]
        if not spoke:
            heard(tx, node, job_id)
        elif max(spoke) < tx.now - silent_seconds:
            rows = read_all(HeldRollout, tx.conn.execute(_OF_NODE, {"b_node": node, "b_job": job_id}))
            _begin_anew(tx, rows, f"no worker of the node was heard for {silent_seconds:g} s")
            given_up += len(rows)
    return given_up


def forget(tx: Transaction, silent_seconds: float) -> None:
    """Delete the rows of nodes that have long been silent and for which no rollout waits."""
    waits = sa.select(rollouts.c.id).where(rollouts.c.state.in_(_WAITING), rollouts.c.node == nodes.c.name)
    tx.conn.execute(
        sa.delete(nodes).where(nodes.c.heard_at < tx.now - 10 * silent_seconds, ~sa.exists(waits))
    )


def grace(tx: Transaction) -> None:
    """Count every node as heard now. This is called after a start, before which no worker could be heard."""
    tx.conn.execute(sa.update(nodes).values(heard_at=tx.now))


def _begin_anew(tx: Transaction, rows: Sequence[HeldRollout], message: str) -> None:
    requeue(tx, [Return(row=row, cause=Cause.NODE_LOST, reason="NodeGone", message=message) for row in rows])
