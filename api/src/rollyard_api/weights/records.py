"""The tables of weight updates: how updates are requested, owned, carried out, ended and superseded.

Every statement that writes `weight_updates` stands here; `storage/pools.py` removes those of a pool that is
removed. The columns of `pools` and `backends` that say which weights are wanted, and which a server has, are
written from here, apart from what a driver or a health check reports about a server (`backends/pools.py`).
The steps of a backend are recorded by the control plane that owns the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.weights import WeightUpdateRequest
from sqlalchemy.engine import Connection

from rollyard_api.core.problems import Conflict, ControlPlaneError, NotFound
from rollyard_api.rollouts import staleness
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import BackendRow, PoolRow, WeightUpdateRow, read_all
from rollyard_api.storage.schema import backends, pools, weight_updates
from rollyard_api.weights.steps import BEHIND, BackendTarget, Observation, WeightStep, need
from rollyard_api.weights.updates import (
    BackendProgress,
    EarlierLogprobs,
    document,
    encoded,
    progress_of,
    request_of,
    serves,
)

TOPIC: Final = "weights"
"""The topic that wakes waiters when a pool's wanted weights or pause change, or are reached."""
LISTED: Final = 100
"""The number of updates, the newest first, that are returned or searched."""
OWNER_SECONDS: Final = 15.0
"""How long a control plane owns an update after each renewal, in seconds.

Where several control planes share a database, one of them carries out an update.
"""
_MAX_MESSAGE: Final = 1000
_TOUCHED: Final = frozenset({"Loading", "Verifying", "Done", "Failed"})
"""The steps of a backend whose server may have the weights of the update."""


class Superseded(ControlPlaneError):
    """Another update is wanted now, or another control plane owns the update."""


def targets(conn: Connection) -> tuple[list[BackendTarget], set[int]]:
    """Return every backend of every pool, and the ids of the pools in which an update is running."""
    by_pool: defaultdict[int, list[BackendRow]] = defaultdict(list)
    for row in read_all(BackendRow, conn.execute(sa.select(backends))):
        by_pool[row.pool_id].append(row)
    every = []
    for pool in read_all(PoolRow, conn.execute(sa.select(pools))):
        rows = by_pool[pool.id]
        update = _desired(conn, pool)
        chain: tuple[WeightUpdateRow, ...] = ()
        if update is not None and any(need(pool, row) == "bring" for row in rows):
            chain = tuple(_succeeded(conn, pool.id, before=update.id))
        every += [BackendTarget(pool, row, update, chain) for row in rows]
    running = sa.select(weight_updates.c.pool_id).where(weight_updates.c.state == "Running")
    return every, set(conn.scalars(running))


def _newest(
    conn: Connection, *where: sa.ColumnElement[bool], limit: int = LISTED, lock: bool = False
) -> list[WeightUpdateRow]:
    """Return updates, the newest first."""
    query = sa.select(weight_updates).where(*where)
    query = query.order_by(weight_updates.c.id.desc()).limit(limit)
    return read_all(WeightUpdateRow, conn.execute(query.with_for_update() if lock else query))


def _desired(conn: Connection, pool: PoolRow, *, lock: bool = False) -> WeightUpdateRow | None:
    """Return the update whose weights every backend of the pool should have, or None before the first."""
    if pool.policy_index == 0:
        return None
    ours = (weight_updates.c.pool_id == pool.id, weight_updates.c.policy_index == pool.policy_index)
    states = weight_updates.c.state.in_(["Running", "Succeeded"])
    return next(iter(_newest(conn, *ours, states, limit=1, lock=lock)), None)


def _succeeded(conn: Connection, pool_id: int, before: int) -> list[WeightUpdateRow]:
    """Return the updates with an id below `before` that every backend had, the newest first."""
    done = (weight_updates.c.pool_id == pool_id, weight_updates.c.state == "Succeeded")
    return _newest(conn, *done, weight_updates.c.id < before)


def listed(conn: Connection, namespace: str, name: str) -> list[dict[str, Any]]:
    """Return a pool's newest updates, the newest first."""
    pool = pool_rows.find(conn, namespace, name)
    return [document(row) for row in _newest(conn, weight_updates.c.pool_id == pool.id)]


def one(conn: Connection, namespace: str, name: str, number: int) -> WeightUpdateRow:
    """Return one update's row.

    Raises:
        NotFound: The pool has no such update.
    """
    pool = pool_rows.find(conn, namespace, name)
    rows = _newest(conn, weight_updates.c.pool_id == pool.id, weight_updates.c.id == number)
    if not rows:
        raise NotFound(f"BackendPool {name!r} has no weight update {number}", reason="UpdateNotFound")
    return rows[0]


def earlier(conn: Connection, pool_id: int, url: str, policy_index: int) -> EarlierLogprobs | None:
    """Return what a backend was last seen to give with the weights of an index, or None if unknown."""
    for row in _newest(conn, weight_updates.c.pool_id == pool_id):
        part = progress_of(row).get(url)
        if part is not None and part.before is not None and part.before.policy_index == policy_index:
            return part.before
    return None


def standing(conn: Connection, pool: PoolRow, request: WeightUpdateRequest) -> WeightUpdateRow | None:
    """Return the update that gave the pool the requested version from the same source, or None.

    Raises:
        Conflict: The version already names other weights, so tokens under it could not be distinguished.
    """
    ours, standing = weight_updates.c.pool_id == pool.id, weight_updates.c.state != "Failed"
    for row in _newest(conn, ours, standing, weight_updates.c.policy_version == request.policy_version):
        if request_of(row).source != request.source:
            raise Conflict(
                f"policyVersion: {request.policy_version!r} names the weights of update {row.id} already, "
                "from another source; give every set of weights a version of its own",
                reason="PolicyVersionExists",
            )
    now = _desired(conn, pool)
    return now if now is not None and now.policy_version == request.policy_version else None


def _change_pool(tx: Transaction, pool_id: int, **values: Any) -> None:
    pool_rows.change(tx, pool_id, values)
    tx.wake(TOPIC)


def _change(tx: Transaction, row: WeightUpdateRow, **values: Any) -> WeightUpdateRow:
    """Write columns of an update and return the changed row."""
    tx.wake(TOPIC)
    statement = sa.update(weight_updates).where(weight_updates.c.id == row.id).values(**values)
    return WeightUpdateRow(*tx.conn.execute(statement.returning(weight_updates)).one())


def _change_backend(tx: Transaction, pool_id: int, url: str, **values: Any) -> None:
    if "weights_message" in values:
        values["weights_message"] = values["weights_message"][:_MAX_MESSAGE]
    pool_rows.change_backend(tx, pool_id, url, values)
    tx.wake(TOPIC)


def note(tx: Transaction, update_id: int, url: str, **values: Any) -> WeightUpdateRow | None:
    """Change one backend's part of a running update; return the row, or None if it no longer runs."""
    running = (weight_updates.c.id == update_id, weight_updates.c.state == "Running")
    rows = _newest(tx.conn, *running, lock=True)
    if not rows:
        return None
    row, progress = rows[0], progress_of(rows[0])
    before = progress.get(url, BackendProgress(url=url))
    if "message" in values:
        values["message"] = values["message"][:_MAX_MESSAGE]
    progress[url] = before.model_copy(update=values)
    return _change(tx, row, progress=encoded(progress)) if progress[url] != before else row


def add(
    tx: Transaction, namespace: str, name: str, request: WeightUpdateRequest, note: str
) -> tuple[WeightUpdateRow, bool]:
    """Record an update. A running update is superseded, since a trainer wants its newest weights.

    Returns:
        The row, and whether it is new.

    Raises:
        NotFound: There is no such pool.
        Conflict: The version names other weights, the model's name would change under rollouts, or there is
            no backend that the weights can have been pushed into.
    """
    pool = pool_rows.find(tx.conn, namespace, name, lock=True)
    same = standing(tx.conn, pool, request)
    if same is not None:
        return _again(tx, same), False
    urls = pool_rows.servers(tx.conn, pool.id)
    if request.source.pushed and not urls:
        raise Conflict(
            f"source.pushed: BackendPool {name!r} has no backend that has got weights; push them once it has "
            "one, or give a checkpoint",
            reason="NoBackends",
        )
    source = request.source
    # None stands for the model's own name. Pushed weights keep the name that there is.
    served = source.lora.name if source.lora is not None else pool.served_model if source.pushed else None
    if served != pool.served_model and request.in_flight != "restart":
        raise Conflict(
            f"inFlight: these weights are served as {served or pool.model!r}, rollouts in flight ask for "
            f"{pool.served_model or pool.model!r}: give inFlight 'restart'",
            reason="ModelNameChanges",
        )
    ours = weight_updates.c.pool_id == pool.id
    superseded = tx.conn.execute(
        sa.update(weight_updates)
        .where(ours, weight_updates.c.state == "Running")
        .values(state="Superseded", finished_at=tx.now, message="a later update came")
    ).rowcount
    if superseded:
        tx.count("weight_updates", "Superseded", value=superseded)
    # An index is never reused, so no backend's index can mean the weights of an update that failed.
    last = tx.conn.scalar(sa.select(sa.func.max(weight_updates.c.policy_index)).where(ours))
    row = tx.conn.execute(
        sa.insert(weight_updates)
        .values(
            pool_id=pool.id,
            policy_version=request.policy_version,
            policy_index=(last or 0) + 1,
            request=request.model_dump_json(by_alias=True).encode(),
            state="Running",
            verified=False,
            verified_by="",
            message=note,
            progress=encoded({url: BackendProgress(url=url) for url in urls}),
            created_at=tx.now,
        )
        .returning(weight_updates)
    ).one()
    wanted = {"policy_version": row.policy_version, "policy_index": row.policy_index}
    _change_pool(tx, pool.id, **wanted, served_model=served)
    return WeightUpdateRow(*row), True


def _again(tx: Transaction, row: WeightUpdateRow) -> WeightUpdateRow:
    """Repeat an update, which changes nothing unless servers lack pushed weights: restarted or new ones."""
    rows = pool_rows.backends_of(tx.conn, row.pool_id)
    lost = [backend.url for backend in rows if backend.weights in ("Stale", "Failed")]
    if not request_of(row).source.pushed or not lost:
        return row
    progress = progress_of(row) | {url: BackendProgress(url=url) for url in lost}
    return _change(tx, row, state="Running", finished_at=None, progress=encoded(progress))


def pause(tx: Transaction, namespace: str, name: str, mode: str) -> None:
    """Pause the pool: no rollout enters Run, and the servers sample nothing."""
    pool = pool_rows.find(tx.conn, namespace, name, lock=True)
    _change_pool(tx, pool.id, paused=True, pause_mode=mode)


def resume(tx: Transaction, namespace: str, name: str) -> None:
    """Undo `pause`: the pool's rollouts continue, each backend's as soon as its server has been resumed."""
    pool = pool_rows.find(tx.conn, namespace, name, lock=True)
    _change_pool(tx, pool.id, paused=False, pause_mode=None)


def renew(tx: Transaction, name: str, ids: set[int]) -> None:
    """Renew the ownership of those of these updates that `name` owns."""
    tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id.in_(sorted(ids)), weight_updates.c.owner == name)
        .values(owner_expires=tx.now + OWNER_SECONDS)
    )


def take_charge(tx: Transaction, name: str, target: BackendTarget) -> WeightUpdateRow | None:
    """Make `name` the owner of the wanted update, and return the update's row, locked.

    Where the weights that the server was started with are wanted, the last update's row records the owner. It
    is None if there was no update.

    Raises:
        Superseded: The pool wants other weights now, or another control plane is the owner.
    """
    pool = pool_rows.by_id(tx.conn, target.pool.id)
    if pool is None or pool.policy_index != target.pool.policy_index:
        raise Superseded
    if target.update is None:
        row = next(iter(_newest(tx.conn, weight_updates.c.pool_id == pool.id, limit=1, lock=True)), None)
    else:
        row = _desired(tx.conn, pool, lock=True)
        if row is None or row.id != target.update.id:
            raise Superseded
    if row is None:
        return None
    others = row.owner is not None and row.owner != name
    # On SQLite there is one control plane at a time, so another name belongs to a predecessor.
    if others and not tx.sqlite and (row.owner_expires or 0.0) > tx.now:
        raise Superseded
    owned = {"owner": name, "owner_expires": tx.now + OWNER_SECONDS}
    tx.conn.execute(sa.update(weight_updates).where(weight_updates.c.id == row.id).values(**owned))
    return row


def begin(tx: Transaction, name: str, target: BackendTarget, seen: Observation) -> None:
    """Record that the backend gets no more rollouts and that this process may have paused its server.

    Rollouts that do not continue over the update, or that refused weights may have served, return to Init.

    Raises:
        Superseded: The pool wants other weights now, or another control plane is the owner.
    """
    row = take_charge(tx, name, target)
    if row is not None and target.update is not None:
        values: dict[str, Any] = {"weights": "Updating", "weights_message": f"to {row.policy_version}"}
        if target.restored:
            values["weights"] = "Failed"  # It stays so until it is verified, also for a successor.
        if target.row.policy_index == row.policy_index or target.row.weights in ("Stale", "Failed"):
            values["policy_index"] = BEHIND
        _change_backend(tx, target.pool.id, target.row.url, **values)
        measured = {} if seen.before is None else {"before": seen.before}
        note(tx, row.id, target.row.url, step="Pausing", message="", **measured)
        if seen.reference is not None and target.begun and row.state == "Running":
            _change(tx, row, verified_by=seen.reference.source)
    loads = seen.last is not WeightStep.LOOK
    if loads and (target.lenient or target.restored or target.update is None):
        staleness.fence(tx, target.pool.namespace, target.pool.name, target.row.url)


def advance(tx: Transaction, name: str, target: BackendTarget, values: dict[str, Any]) -> None:
    """Record the backend's progress in its part of the update.

    Raises:
        Superseded: This control plane does not own the update any more.
    """
    row = take_charge(tx, name, target)
    if row is not None and target.update is not None:
        note(tx, row.id, target.row.url, **values)


def mark(tx: Transaction, target: BackendTarget, values: dict[str, Any]) -> None:
    """Write columns of a backend.

    Raises:
        Superseded: The backend's weights have been changed since they were read.
    """
    seen = target.row
    row = pool_rows.locked_backend(tx, target.pool.id, seen.url)
    if row is None or (row.weights, row.policy_index) != (seen.weights, seen.policy_index):
        raise Superseded
    _change_backend(tx, target.pool.id, seen.url, **values)


def tell(tx: Transaction, target: BackendTarget, message: str) -> None:
    """Record the last error of the backend."""
    row = pool_rows.locked_backend(tx, target.pool.id, target.row.url)
    if row is not None and row.weights != "Current":
        _change_backend(tx, target.pool.id, target.row.url, weights_message=message)
    if target.update is not None:
        note(tx, target.update.id, target.row.url, message=message)


def done(tx: Transaction, target: BackendTarget, seen: Observation, message: str = "") -> None:
    """Record that the backend has the wanted weights.

    Args:
        seen: What the steps have shown. If nothing was loaded, the earlier verification stays.
        message: The reason why the weights were not verified.

    Raises:
        Superseded: The first weights are wanted, and the backend's weights have been changed since they were
            read.
    """
    update, pool, url = target.update, target.pool, target.row.url
    loaded = seen.last is not WeightStep.LOOK
    current: dict[str, Any] = {"weights": "Current", "weights_message": "", "restart_requested": False}
    if update is None:
        label = seen.first_label if loaded else seen.label
        version = {} if label is None else {"policy_version": label[:128]}
        mark(tx, target, {**current, **version, "policy_index": 0})
        return
    (row,) = _newest(tx.conn, weight_updates.c.id == update.id, lock=True)
    if row.state == "Failed":
        # Another backend was found to have wrong weights in the meantime.
        _distrust(tx, pool.id, url, "it has refused weights")
        return
    reached = {"policy_index": update.policy_index, "policy_version": update.policy_version}
    _change_backend(tx, pool.id, url, **current, **reached)
    changes: dict[str, Any] = {"step": "Done", "message": message}
    if loaded:
        difference = None if seen.comparison is None else seen.comparison.finite
        changes |= {"verified": seen.comparison is not None, "max_difference": difference}
    note(tx, update.id, url, **changes)
    if seen.paused is not None:
        tx.count("weight_update_paused_seconds", value=seen.paused)
    if row.state == "Running" and request_of(row).source.pushed:
        _change_pool(tx, pool.id, paused=False, pause_mode=None)
    settle(tx, pool.id)
    staleness.enforce(tx, pool.namespace, pool.name)


def restart(tx: Transaction, target: BackendTarget, message: str) -> None:
    """Mark a backend whose server must be restarted; it waits at the version that it could not reach."""
    if pool_rows.locked_backend(tx, target.pool.id, target.row.url) is None:
        return
    failed = {"weights": "Failed", "policy_index": target.pool.policy_index, "restart_requested": True}
    message += "; restart it" if target.pool.external else "; its driver restarts it"
    _change_backend(tx, target.pool.id, target.row.url, **failed, weights_message=message)
    # The server stays paused, so requests of its rollouts would wait until the restart.
    staleness.fence(tx, target.pool.namespace, target.pool.name, target.row.url)


def give_up_loading(tx: Transaction, target: BackendTarget, message: str) -> None:
    """Record that a server cannot load the weights.

    The update fails if no server can load them. Otherwise this server is at fault and must be restarted.
    """
    update = target.update
    assert update is not None
    row = note(tx, update.id, target.row.url, step="Failed", message=message)
    if row is not None and all(part.step == "Failed" for part in progress_of(row).values()):
        refuse(tx, target.pool.id, update.id, f"{target.row.url}: {message}")
        return
    pool = pool_rows.by_id(tx.conn, target.pool.id)
    if pool is not None and pool.policy_index == update.policy_index:
        restart(tx, target, message)


def _running(tx: Transaction, pool_id: int, *, lock: bool = False) -> tuple[PoolRow, WeightUpdateRow] | None:
    """Return the pool, locked if `lock`, and its running update, locked; None if none is running."""
    pool = pool_rows.by_id(tx.conn, pool_id, lock=lock)
    row = None if pool is None else _desired(tx.conn, pool, lock=True)
    return None if pool is None or row is None or row.state != "Running" else (pool, row)


def settle(tx: Transaction, pool_id: int) -> None:
    """End a running update once every backend of the pool has its weights.

    In a pool without backends the update waits for one, because nothing has shown yet that the weights are
    good.
    """
    running = _running(tx, pool_id)
    if running is None:
        return
    pool, row = running
    having = {
        backend.url: backend.policy_index == row.policy_index and backend.weights in ("Current", "Updating")
        for backend in pool_rows.backends_of(tx.conn, pool.id)
        if not backend.draining
    }
    known = progress_of(row)
    progress = {url: part for url, part in known.items() if url in having}
    if not having and known:
        _change(tx, row, progress=encoded(progress))
    if not having or not all(having.values()):
        return
    parts = [progress[url] for url in having if url in progress]
    verified = bool(parts) and all(part.verified for part in parts)
    _change(
        tx,
        row,
        state="Succeeded",
        verified=verified,
        verified_by=row.verified_by if verified else "",
        message=row.message or next((part.message for part in parts if part.message), ""),
        progress=encoded(progress),
        finished_at=tx.now,
    )
    tx.count("weight_updates", "Succeeded")
    staleness.enforce(tx, pool.namespace, pool.name)


def refuse(tx: Transaction, pool_id: int, update_id: int, message: str, *, refused_by: str = "") -> None:
    """Fail a running update, so that the pool wants its previous weights again.

    Backends that may have the new weights are marked as BEHIND.

    Args:
        refused_by: The server that refused the weights and still has the previous ones.
    """
    running = _running(tx, pool_id, lock=True)
    if running is None or running[1].id != update_id:
        return
    pool, row = running
    progress = progress_of(row)
    if refused_by in progress:
        failed = {"step": "Failed", "message": message[:_MAX_MESSAGE]}
        progress[refused_by] = progress[refused_by].model_copy(update=failed)
    ended = {"state": "Failed", "message": message[:4096], "finished_at": tx.now}
    _change(tx, row, **ended, progress=encoded(progress))
    tx.count("weight_updates", "Failed")
    touched = {part.url for part in progress.values() if part.step in _TOUCHED} - {refused_by}
    chain = _succeeded(tx.conn, pool.id, before=row.id)
    for url in touched | _interrupted(tx.conn, pool.id, chain):
        _distrust(tx, pool.id, url, f"it may have refused weights ({row.policy_version})")
    version, index = (chain[0].policy_version, chain[0].policy_index) if chain else ("", 0)
    _change_pool(tx, pool.id, policy_version=version, policy_index=index, served_model=serves(chain))


def _distrust(tx: Transaction, pool_id: int, url: str, message: str) -> None:
    """Mark a backend that may have refused weights: it is loaded and verified before it is used."""
    unknown = {"weights": "Failed", "policy_index": BEHIND, "restart_requested": False}
    _change_backend(tx, pool_id, url, **unknown, weights_message=message)


def _interrupted(conn: Connection, pool_id: int, chain: Sequence[WeightUpdateRow]) -> set[str]:
    """Return the backends that were being loaded when their update was superseded, and not loaded later.

    Such a backend still has the label and the index of its earlier weights. It counts only if no update has
    succeeded since; `chain` are those that have, the newest first.
    """
    updating = {row.url for row in pool_rows.backends_of(conn, pool_id) if row.weights == "Updating"}
    superseded = (weight_updates.c.pool_id == pool_id, weight_updates.c.state == "Superseded")
    since = weight_updates.c.id > (chain[0].id if chain else 0)
    parts = [part for row in _newest(conn, *superseded, since) for part in progress_of(row).values()]
    return {part.url for part in parts if part.step in _TOUCHED} & updating
