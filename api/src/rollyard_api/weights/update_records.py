"""Weight updates in the tables: how they are requested, superseded, tracked per backend and ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
import sqlalchemy as sa
from rollyard_crds.weights import WeightSource, WeightUpdateRequest
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps
from rollyard_api.core.conditions import timestamp
from rollyard_api.core.problems import Conflict, NotFound
from rollyard_api.core.wakeups import QUEUE
from rollyard_api.rollouts import staleness
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import PoolRow, WeightUpdateRow, read_all, read_one
from rollyard_api.storage.schema import backends, weight_updates
from rollyard_api.storage.schema import pools as pools_table
from rollyard_api.weights import backend_progress

TOPIC: Final = "weights"
"""The topic that wakes waiters when a pool's wanted weights or pause change, or are reached."""
LISTED: Final = 100
"""The number of updates in one answer. The newest are returned."""
BEHIND: Final = -1
"""The policy_index of a backend whose weights are not known."""
_MAX_MESSAGE = 1000
_NO_BACKEND = "waits for a backend: no backend has these weights yet"


def request_of(row: WeightUpdateRow) -> WeightUpdateRequest:
    """Return the request that a row of weight_updates records."""
    return WeightUpdateRequest.model_validate_json(row.request)


def document(row: WeightUpdateRow) -> dict[str, Any]:
    """Return a row as the REST API presents it."""
    asked, parts = request_of(row), backend_progress.public(row)
    message = row.message
    if row.state == "Running" and not parts:
        message = "; ".join(filter(None, (_NO_BACKEND, message)))
    return {
        "id": row.id,
        "policyVersion": row.policy_version,
        "source": asked.source.to_json(),
        "mode": asked.mode,
        "inFlight": asked.in_flight,
        "state": row.state,
        "verified": bool(row.verified),
        "verifiedBy": row.verified_by,
        "message": message,
        "backends": [orjson.Fragment(dumps(item)) for item in parts],
        "createdAt": timestamp(row.created_at),
        "finishedAt": None if row.finished_at is None else timestamp(row.finished_at),
    }


def listed(conn: Connection, namespace: str, name: str) -> list[dict[str, Any]]:
    """Return a pool's newest updates, the newest first."""
    pool = pool_rows.find(conn, namespace, name)
    query = sa.select(weight_updates).where(weight_updates.c.pool_id == pool.id)
    newest = query.order_by(weight_updates.c.id.desc()).limit(LISTED)
    return [document(row) for row in read_all(WeightUpdateRow, conn.execute(newest))]


def one(conn: Connection, namespace: str, name: str, number: int) -> WeightUpdateRow:
    """Return one update's row.

    Raises:
        NotFound: The pool has no such update.
    """
    pool = pool_rows.find(conn, namespace, name)
    query = sa.select(weight_updates).where(
        weight_updates.c.pool_id == pool.id, weight_updates.c.id == number
    )
    row = conn.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"BackendPool {name!r} has no weight update {number}", reason="UpdateNotFound")
    return WeightUpdateRow(*row)


def desired(conn: Connection, pool: PoolRow, *, lock: bool = False) -> WeightUpdateRow | None:
    """Return the update whose weights every backend of the pool should have, or None before the first."""
    if pool.policy_index == 0:
        return None
    query = (
        sa.select(weight_updates)
        .where(
            weight_updates.c.pool_id == pool.id,
            weight_updates.c.policy_index == pool.policy_index,
            weight_updates.c.state.in_(["Running", "Succeeded"]),
        )
        .order_by(weight_updates.c.id.desc())
        .limit(1)
    )
    found = conn.execute(query.with_for_update() if lock else query).one_or_none()
    return read_one(WeightUpdateRow, found)


def succeeded(conn: Connection, pool_id: int, before: int | None = None) -> list[WeightUpdateRow]:
    """Return updates that every backend had, the newest first, with an id below `before` if it is given."""
    query = sa.select(weight_updates).where(
        weight_updates.c.pool_id == pool_id, weight_updates.c.state == "Succeeded"
    )
    if before is not None:
        query = query.where(weight_updates.c.id < before)
    newest = query.order_by(weight_updates.c.id.desc()).limit(LISTED)
    return read_all(WeightUpdateRow, conn.execute(newest))


def served_model(pool: PoolRow, source: WeightSource) -> str | None:
    """Return the model name under which these weights are requested, or None for the model's own name."""
    if source.lora is not None:
        return source.lora.name
    return None if source.checkpoint is not None else pool.served_model


def lock_pool(tx: Transaction, namespace: str, name: str) -> PoolRow:
    """Return the pool's row, locked.

    Raises:
        NotFound: There is no such pool.
    """
    query = sa.select(pools_table).where(pools_table.c.namespace == namespace, pools_table.c.name == name)
    found = tx.conn.execute(query.with_for_update()).one_or_none()
    return read_one(PoolRow, found) or pool_rows.find(tx.conn, namespace, name)


def standing(conn: Connection, pool: PoolRow, asked: WeightUpdateRequest) -> WeightUpdateRow | None:
    """Return the update that gave the pool the requested version from the same source, or None.

    Raises:
        Conflict: The version already names other weights, so tokens under it could not be distinguished.
    """
    rows = conn.execute(
        sa.select(weight_updates)
        .where(
            weight_updates.c.pool_id == pool.id,
            weight_updates.c.policy_version == asked.policy_version,
            weight_updates.c.state != "Failed",
        )
        .order_by(weight_updates.c.id.desc())
    )
    for row in read_all(WeightUpdateRow, rows):
        if request_of(row).source != asked.source:
            raise Conflict(
                f"policyVersion: {asked.policy_version!r} names the weights of update {row.id} already, "
                "from another source; give every set of weights a version of its own",
                reason="PolicyVersionExists",
            )
    now = desired(conn, pool)
    return now if now is not None and now.policy_version == asked.policy_version else None


def add(
    tx: Transaction, namespace: str, name: str, asked: WeightUpdateRequest, note: str
) -> tuple[WeightUpdateRow, bool]:
    """Record an update. A running update is superseded, since a trainer wants its newest weights.

    Returns:
        The row, and whether it is new.

    Raises:
        NotFound: There is no such pool.
        Conflict: The version names other weights, the model's name would change under rollouts, or there is
            no backend that the weights can have been pushed into.
    """
    pool = lock_pool(tx, namespace, name)
    found = standing(tx.conn, pool, asked)
    if found is not None:
        return _again(tx, pool, found, asked), False
    urls = pool_rows.servers(tx.conn, pool.id)
    if asked.source.pushed and not urls:
        raise Conflict(
            f"source.pushed: BackendPool {name!r} has no backend that has got weights; push them once it has "
            "one, or give a checkpoint",
            reason="NoBackends",
        )
    serves = served_model(pool, asked.source)
    if serves != pool.served_model and asked.in_flight != "restart":
        raise Conflict(
            f"inFlight: these weights are served as {serves or pool.model!r}, rollouts in flight ask for "
            f"{pool.served_model or pool.model!r}: give inFlight 'restart'",
            reason="ModelNameChanges",
        )
    superseded = tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.pool_id == pool.id, weight_updates.c.state == "Running")
        .values(state="Superseded", finished_at=tx.now, message="a later update came")
    ).rowcount
    if superseded:
        tx.count("weight_updates", "Superseded", value=superseded)
    # An index is never reused, so no backend's index can mean the weights of an update that failed.
    last = tx.conn.execute(
        sa.select(sa.func.max(weight_updates.c.policy_index)).where(weight_updates.c.pool_id == pool.id)
    ).scalar_one()
    row = tx.conn.execute(
        sa.insert(weight_updates)
        .values(
            pool_id=pool.id,
            policy_version=asked.policy_version,
            policy_index=(last or 0) + 1,
            request=asked.model_dump_json(by_alias=True).encode(),
            state="Running",
            verified=False,
            verified_by="",
            message=note,
            progress=backend_progress.encoded(
                {url: backend_progress.BackendProgress(url=url) for url in urls}
            ),
            created_at=tx.now,
        )
        .returning(weight_updates)
    ).one()
    _want(tx, pool.id, row.policy_version, row.policy_index, serves)
    return WeightUpdateRow(*row), True


def _again(
    tx: Transaction, pool: PoolRow, row: WeightUpdateRow, asked: WeightUpdateRequest
) -> WeightUpdateRow:
    """Repeat an update, which changes nothing unless servers lack pushed weights: restarted or new ones."""
    lost = tx.conn.scalars(
        sa.select(backends.c.url).where(
            backends.c.pool_id == pool.id, backends.c.weights.in_(["Stale", "Failed"])
        )
    ).all()
    if not asked.source.pushed or not lost:
        return row
    progress = backend_progress.progress_of(row) | {
        url: backend_progress.BackendProgress(url=url) for url in lost
    }
    tx.wake(TOPIC)
    return change(tx, row, state="Running", finished_at=None, progress=backend_progress.encoded(progress))


def _want(tx: Transaction, pool_id: int, version: str, index: int, serves: str | None) -> None:
    tx.conn.execute(
        sa.update(pools_table)
        .where(pools_table.c.id == pool_id)
        .values(policy_version=version, policy_index=index, served_model=serves)
    )
    tx.wake(TOPIC)


def change(tx: Transaction, row: WeightUpdateRow, **values: Any) -> WeightUpdateRow:
    """Write columns of an update and return the changed row."""
    tx.wake(TOPIC)
    changed = tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id == row.id)
        .values(**values)
        .returning(weight_updates)
    ).one()
    return WeightUpdateRow(*changed)


def set_backend(tx: Transaction, pool_id: int, url: str, **values: Any) -> None:
    """Write columns of a backend."""
    if "weights_message" in values:
        values["weights_message"] = values["weights_message"][:_MAX_MESSAGE]
    where = (backends.c.pool_id == pool_id, backends.c.url == url)
    tx.conn.execute(sa.update(backends).where(*where).values(**values))


def note(tx: Transaction, update_id: int, url: str, **values: Any) -> WeightUpdateRow | None:
    """Change one backend's part of a running update; return the row, or None if it no longer runs."""
    found = tx.conn.execute(
        sa.select(weight_updates)
        .where(weight_updates.c.id == update_id, weight_updates.c.state == "Running")
        .with_for_update()
    ).one_or_none()
    row = read_one(WeightUpdateRow, found)
    if row is None:
        return None
    progress = backend_progress.progress_of(row)
    before = progress.get(url, backend_progress.BackendProgress(url=url))
    if "message" in values:
        values["message"] = values["message"][:_MAX_MESSAGE]
    progress[url] = before.model_copy(update=values)
    return change(tx, row, progress=backend_progress.encoded(progress)) if progress[url] != before else row


def settle(tx: Transaction, pool_id: int) -> None:
    """End a running update once every backend of the pool has its weights.

    In a pool without backends the update waits for one, because nothing has shown yet that the weights are
    good.
    """
    found = tx.conn.execute(sa.select(pools_table).where(pools_table.c.id == pool_id)).one_or_none()
    pool = read_one(PoolRow, found)
    if pool is None:
        return
    row = desired(tx.conn, pool, lock=True)
    if row is None or row.state != "Running":
        return
    having = {
        b.url: b.policy_index == row.policy_index and b.weights in ("Current", "Updating")
        for b in tx.conn.execute(
            sa.select(backends).where(backends.c.pool_id == pool.id, backends.c.draining.is_(False))
        )
    }
    known = backend_progress.progress_of(row)
    progress = {url: item for url, item in known.items() if url in having}
    if not having and known:
        change(tx, row, progress=backend_progress.encoded(progress))
    if not having or not all(having.values()):
        return
    parts = [progress[url] for url in having if url in progress]
    verified = bool(parts) and all(item.verified for item in parts)
    change(
        tx,
        row,
        state="Succeeded",
        verified=verified,
        verified_by=row.verified_by if verified else "",
        message=row.message or next((item.message for item in parts if item.message), ""),
        progress=backend_progress.encoded(progress),
        finished_at=tx.now,
    )
    tx.count("weight_updates", "Succeeded")
    staleness.enforce(tx, pool.namespace, pool.name)


_TOUCHED: Final = frozenset({"Loading", "Verifying", "Done", "Failed"})


def refuse(tx: Transaction, pool_id: int, update_id: int, message: str, *, refused_by: str = "") -> None:
    """Fail a running update, so that the pool wants its previous weights again.

    Backends that may have the new weights are marked as BEHIND.

    Args:
        refused_by: The server that refused the weights and still has the previous ones.
    """
    found = tx.conn.execute(
        sa.select(pools_table).where(pools_table.c.id == pool_id).with_for_update()
    ).one_or_none()
    pool = read_one(PoolRow, found)
    if pool is None:
        return
    row = desired(tx.conn, pool, lock=True)
    if row is None or row.id != update_id or row.state != "Running":
        return
    progress = backend_progress.progress_of(row)
    if refused_by in progress:
        failed = {"step": "Failed", "message": message[:_MAX_MESSAGE]}
        progress[refused_by] = progress[refused_by].model_copy(update=failed)
    change(
        tx,
        row,
        state="Failed",
        message=message[:4096],
        finished_at=tx.now,
        progress=backend_progress.encoded(progress),
    )
    tx.count("weight_updates", "Failed")
    touched = {item.url for item in progress.values() if item.step in _TOUCHED} - {refused_by}
    chain = succeeded(tx.conn, pool.id, before=row.id)
    for url in touched | _interrupted(tx.conn, pool.id, chain[0].id if chain else 0):
        why = f"it may have refused weights ({row.policy_version})"
        set_backend(
            tx,
            pool.id,
            url,
            weights="Failed",
            weights_message=why,
            policy_index=BEHIND,
            restart_requested=False,
        )
    if not chain:
        _want(tx, pool.id, "", 0, None)
    else:
        _want(tx, pool.id, chain[0].policy_version, chain[0].policy_index, serves(chain))


def _interrupted(conn: Connection, pool_id: int, since: int) -> set[str]:
    """Return the backends that were being loaded when their update was superseded, and not loaded later.

    Such a backend still has the label and the index of its earlier weights.

    Args:
        conn: The connection.
        pool_id: The pool.
        since: The id of the last update that succeeded.
    """
    where = (backends.c.pool_id == pool_id, backends.c.weights == "Updating")
    updating = set(conn.scalars(sa.select(backends.c.url).where(*where)))
    query = sa.select(weight_updates).where(
        weight_updates.c.pool_id == pool_id,
        weight_updates.c.state == "Superseded",
        weight_updates.c.id > since,
    )
    newest = query.order_by(weight_updates.c.id.desc()).limit(LISTED)
    parts = [
        part
        for row in read_all(WeightUpdateRow, conn.execute(newest))
        for part in backend_progress.progress_of(row).values()
    ]
    return {part.url for part in parts if part.step in _TOUCHED} & updating


def serves(chain: Sequence[WeightUpdateRow]) -> str | None:
    """Return the model name that these updates, the newest first, lead to, or None for the model's own."""
    name: str | None = None
    for update in reversed(chain):
        source = request_of(update).source
        if source.lora is not None:
            name = source.lora.name
        elif source.checkpoint is not None:
            name = None
    return name


def pause(tx: Transaction, namespace: str, name: str, mode: str) -> PoolRow:
    """Pause the pool: no rollout enters Run, and the servers sample nothing."""
    pool = lock_pool(tx, namespace, name)
    tx.conn.execute(
        sa.update(pools_table).where(pools_table.c.id == pool.id).values(paused=True, pause_mode=mode)
    )
    tx.wake(TOPIC)
    return pool


def resume(tx: Transaction, namespace: str, name: str) -> PoolRow:
    """Undo `pause`."""
    pool = lock_pool(tx, namespace, name)
    unpause(tx, pool.id)
    return pool


def unpause(tx: Transaction, pool_id: int) -> None:
    """Let the pool's rollouts continue, each backend's as soon as its server has been resumed."""
    tx.conn.execute(
        sa.update(pools_table).where(pools_table.c.id == pool_id).values(paused=False, pause_mode=None)
    )
    tx.wake(TOPIC)
    tx.wake(QUEUE)
