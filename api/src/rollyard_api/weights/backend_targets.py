"""Pair backends with the weights that their pools want, and decide what each backend needs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.storage.rows import BackendRow, PoolRow, WeightUpdateRow, read_all
from rollyard_api.storage.schema import backends, weight_updates
from rollyard_api.storage.schema import pools as pools_table
from rollyard_api.weights import update_records
from rollyard_api.weights.backend_progress import progress_of

PAUSED: Final = "paused"
"""The `weights_message` of a backend in a paused pool, once its server has been paused."""

Action = Literal["bring", "stale", "watch", "pause", "hold", "resume", "look"]


@dataclass(frozen=True, slots=True)
class BackendTarget:
    """A backend, its pool and the update that both should have, as one read of the tables found them."""

    pool: PoolRow
    row: BackendRow
    update: WeightUpdateRow | None
    chain: tuple[WeightUpdateRow, ...]
    """The updates that every backend had before `update`, the newest first."""

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the backend: the pool's id and the URL."""
        return self.pool.id, self.row.url

    @property
    def wanted(self) -> tuple[int, int]:
        """A pair that changes whenever the weights that are wanted change."""
        return self.pool.policy_index, 0 if self.update is None else self.update.id

    @property
    def begun(self) -> bool:
        """Whether the update is in progress, as opposed to repeated for a server that lost its weights.

        Pushed weights are only in the servers that the pool had when they were pushed.
        """
        if self.update is None or self.update.state != "Running":
            return False
        part = progress_of(self.update).get(self.row.url)
        if part is None:
            return not update_records.request_of(self.update).source.pushed
        return part.step != "Done"

    @property
    def restored(self) -> bool:
        """Whether the server may hold refused weights, so nothing is trusted without verification."""
        row = self.row
        behind = row.policy_index == update_records.BEHIND
        return bool(row.weights == "Failed" and (behind or row.restart_requested))


def action(pool: PoolRow, row: BackendRow) -> Action:
    """Return what a backend needs, which depends only on its row and its pool's row."""
    waits = row.restart_requested and row.policy_index == pool.policy_index
    if row.policy_index != pool.policy_index or row.weights in ("Stale", "Failed"):
        if waits:
            return "watch"
        # A backend that we may have paused is handled even though it cannot pass its health check.
        return "bring" if row.ready or row.weights in ("Updating", "Failed") else "stale"
    if pool.paused:
        return "hold" if row.weights == "Updating" and row.weights_message == PAUSED else "pause"
    return "resume" if row.weights == "Updating" else "look"


# These are built once, because they are asked for several times a second.
_POOLS = sa.select(pools_table)
_BACKENDS = sa.select(backends)
_WITHOUT_BACKENDS = (
    sa.select(weight_updates.c.pool_id)
    .outerjoin(backends, backends.c.pool_id == weight_updates.c.pool_id)
    .where(weight_updates.c.state == "Running", backends.c.url.is_(None))
)


def read(conn: Connection) -> list[BackendTarget]:
    """Return every backend of every pool."""
    found = []
    by_pool: defaultdict[int, list[BackendRow]] = defaultdict(list)
    for row in read_all(BackendRow, conn.execute(_BACKENDS)):
        by_pool[row.pool_id].append(row)
    for pool in read_all(PoolRow, conn.execute(_POOLS)):
        rows = by_pool[pool.id]
        update = update_records.desired(conn, pool)
        chain: tuple[WeightUpdateRow, ...] = ()
        if any(action(pool, row) == "bring" for row in rows) and update is not None:
            chain = tuple(update_records.succeeded(conn, pool.id, before=update.id))
        found += [BackendTarget(pool, row, update, chain) for row in rows]
    return found


def pools_without_backends(conn: Connection) -> set[int]:
    """Return the ids of the pools without backends in which an update is running."""
    return set(conn.scalars(_WITHOUT_BACKENDS))
