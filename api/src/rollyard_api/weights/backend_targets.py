"""Backends beside the weights that their pools want for them, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.storage.rows import BackendRow, PoolRow, WeightUpdateRow, read_all
from rollyard_api.storage.schema import backends, weight_updates
from rollyard_api.storage.schema import pools as pools_table
from rollyard_api.weights import update_records

PAUSED: Final = "paused"
"""`weights_message` of a backend of a paused pool, once its server is paused."""

Action = Literal["bring", "stale", "watch", "pause", "hold", "resume", "look"]


@dataclass(frozen=True, slots=True)
class BackendTarget:
    """A backend, its pool and the update that they should have, as one reader saw them."""

    pool: PoolRow
    row: BackendRow
    update: WeightUpdateRow | None
    chain: tuple[WeightUpdateRow, ...]
    """The updates that every backend had before it, the newest first."""

    @property
    def key(self) -> tuple[int, str]:
        return self.pool.id, self.row.url

    @property
    def wanted(self) -> tuple[int, int]:
        """Changes whenever other weights are wanted than before."""
        return self.pool.policy_index, 0 if self.update is None else self.update.id

    @property
    def begun(self) -> bool:
        """Whether the update is being made, not redone for a server that has lost it."""
        if self.update is None or self.update.state != "Running":
            return False
        part = update_records.progress_of(self.update).get(self.row.url)
        return part is None or part.step != "Done"

    @property
    def restored(self) -> bool:
        """Whether the server may have weights that were refused: nothing of it is believed unverified."""
        row = self.row
        behind = row.policy_index == update_records.BEHIND
        return bool(row.weights == "Failed" and (behind or row.restart_requested))


def action(pool: PoolRow, row: BackendRow) -> Action:
    """What a backend needs: pure, of its row and its pool's."""
    waits = row.restart_requested and row.policy_index == pool.policy_index
    if row.policy_index != pool.policy_index or row.weights in ("Stale", "Failed"):
        if waits:
            return "watch"
        # One that we may have paused is tended even if its health check, which it cannot pass, fails.
        return "bring" if row.ready or row.weights in ("Updating", "Failed") else "stale"
    if pool.paused:
        return "hold" if row.weights == "Updating" and row.weights_message == PAUSED else "pause"
    return "resume" if row.weights == "Updating" else "look"


def read(conn: Connection) -> list[BackendTarget]:
    """Every backend of every pool."""
    found = []
    for pool in read_all(PoolRow, conn.execute(sa.select(pools_table))):
        query = sa.select(backends).where(backends.c.pool_id == pool.id)
        rows = read_all(BackendRow, conn.execute(query))
        update = update_records.desired(conn, pool)
        chain: tuple[WeightUpdateRow, ...] = ()
        if any(action(pool, row) == "bring" for row in rows) and update is not None:
            chain = tuple(update_records.succeeded(conn, pool.id, before=update.id))
        found += [BackendTarget(pool, row, update, chain) for row in rows]
    return found


def pools_without_backends(conn: Connection) -> set[int]:
    """Those where an update runs."""
    query = (
        sa.select(weight_updates.c.pool_id)
        .outerjoin(backends, backends.c.pool_id == weight_updates.c.pool_id)
        .where(weight_updates.c.state == "Running", backends.c.url.is_(None))
    )
    return set(conn.scalars(query))
