"""The tables of weight updates: how updates are requested, owned, carried out, ended and superseded.

Every statement that writes `weight_updates` is here; `storage/pools.py` removes those of a pool that is
removed. The columns of `pools` and `backends` that say which weights are wanted, and which a server has, are
written from here, apart from what a driver or a health check reports about a server (`backends/pools.py`).
The steps of a backend are recorded by the control plane that owns the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.weights import PauseMode, WeightUpdateRequest
from sqlalchemy.engine import Connection

from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.core.problems import Conflict, NotFound
from rollyard_api.rollouts import staleness
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import BackendRow, PoolRow, WeightUpdateRow, read_all, read_one
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
_STANDS: Final = weight_updates.c.state.in_(("Running", "Succeeded"))
_OF_POOL: Final = (
    sa.select(weight_updates)
    .where(weight_updates.c.pool_id == sa.bindparam("b_pool"))
    .order_by(weight_updates.c.id.desc())
)


class Superseded(ControlPlaneError):
    """The pool wants another update now, or another control plane owns the update."""


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


def _newest(conn: Connection, pool_id: int, *where: sa.ColumnElement[bool]) -> list[WeightUpdateRow]:
    """Return updates of a pool, the newest first."""
    query = _OF_POOL.where(*where).limit(LISTED)
    return read_all(WeightUpdateRow, conn.execute(query, {"b_pool": pool_id}))


def _one(
    conn: Connection, pool_id: int, *where: sa.ColumnElement[bool], lock: bool = False
) -> WeightUpdateRow | None:
    """Return the newest such update of a pool, whose row is locked until the commit if `lock`, or None."""
    query = _OF_POOL.where(*where).limit(1)
    rows = conn.execute(query.with_for_update() if lock else query, {"b_pool": pool_id})
    return read_one(WeightUpdateRow, rows.one_or_none())


def _desired(conn: Connection, pool: PoolRow, *, lock: bool = False) -> WeightUpdateRow | None:
    """Return the update whose weights every backend of the pool should have, or None before the first."""
    if pool.policy_index == 0:
        return None
    return _one(conn, pool.id, weight_updates.c.policy_index == pool.policy_index, lock=lock)


def _succeeded(conn: Connection, pool_id: int, before: int) -> list[WeightUpdateRow]:
    """Return the updates with an id below `before` that every backend had, the newest first."""
    return _newest(conn, pool_id, weight_updates.c.state == "Succeeded", weight_updates.c.id < before)


def listed(conn: Connection, namespace: str, name: str) -> list[dict[str, Any]]:
    """Return a pool's newest updates, the newest first."""
    pool = pool_rows.find(conn, namespace, name)
    return [document(row) for row in _newest(conn, pool.id)]


def one(conn: Connection, namespace: str, name: str, number: int) -> WeightUpdateRow:
    """Return one update's row.

    Raises:
        NotFound: The pool has no such update.
    """
    pool = pool_rows.find(conn, namespace, name)
    row = _one(conn, pool.id, weight_updates.c.id == number)
    if row is None:
        raise NotFound(f"BackendPool {name!r} has no weight update {number}", reason="UpdateNotFound")
    return row


def earlier(conn: Connection, pool_id: int, url: str, policy_index: int) -> EarlierLogprobs | None:
    """Return what a backend was last seen to give with the weights of an index, or None if unknown."""
    for row in _newest(conn, pool_id):
        part = progress_of(row).get(url)
        if part is not None and part.before is not None and part.before.policy_index == policy_index:
            return part.before
    return None


def standing(conn: Connection, pool: PoolRow, request: WeightUpdateRequest) -> WeightUpdateRow | None:
    """Return the update that gave the pool the requested version from the same source, or None.

    Raises:
        Conflict: The version already names other weights, so tokens under it could not be distinguished.
    """
    named = weight_updates.c.policy_version == request.policy_version
    for row in _newest(conn, pool.id, named, weight_updates.c.state != "Failed"):
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


def note(tx: Transaction, row: WeightUpdateRow, url: str, **values: Any) -> WeightUpdateRow:
    """Change one backend's part of an update while it runs, and return the update's row, which is locked."""
    progress = progress_of(row)
    before = progress.get(url, BackendProgress(url=url))
    if "message" in values:
        values["message"] = values["message"][:_MAX_MESSAGE]
    progress[url] = before.model_copy(update=values)
    if row.state != "Running" or progress[url] == before:
        return row
    return _change(tx, row, progress=encoded(progress))


def add(
    tx: Transaction, namespace: str, name: str, request: WeightUpdateRequest, note: str
) -> tuple[WeightUpdateRow, bool]:
    """Record an update. A running update is superseded, because a trainer wants its newest weights.

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
    labels = {"policy_version": row.policy_version, "policy_index": row.policy_index}
    _change_pool(tx, pool.id, **labels, served_model=served)
    return WeightUpdateRow(*row), True


def _again(tx: Transaction, row: WeightUpdateRow) -> WeightUpdateRow:
    """Repeat an update, which changes nothing unless restarted or new servers lack pushed weights."""
    rows = pool_rows.backends_of(tx.conn, row.pool_id)
    lost = [backend.url for backend in rows if backend.weights in ("Stale", "Failed")]
    if not request_of(row).source.pushed or not lost:
        return row
    progress = progress_of(row) | {url: BackendProgress(url=url) for url in lost}
    return _change(tx, row, state="Running", finished_at=None, progress=encoded(progress))


def pause(tx: Transaction, namespace: str, name: str, mode: PauseMode | None) -> None:
    """Pause the pool, so that no rollout enters Run and its servers sample nothing.

    With the mode None its rollouts continue, each backend's as soon as its server has been resumed.
    """
    pool = pool_rows.find(tx.conn, namespace, name, lock=True)
    _change_pool(tx, pool.id, paused=mode is not None, pause_mode=mode)


def renew(tx: Transaction, name: str, ids: set[int]) -> None:
    """Renew the ownership of those of these updates that `name` owns."""
    tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id.in_(sorted(ids)), weight_updates.c.owner == name)
        .values(owner_expires=tx.now + OWNER_SECONDS)
    )


def as_owner(
    tx: Transaction,
    name: str,
    target: BackendTarget,
    operation: Callable[..., None],
    *,
    claims: bool = True,
    **values: Any,
) -> None:
    """Make `name` the owner of the wanted update, and call an operation that only its owner may do.

    The pool's row is locked before the update's, as `add` does. Until the commit, no other weights are wanted
    and no rollout is assigned to a backend of the pool.

    Args:
        name: The name of a control plane.
        target: A backend, as it was read.
        operation: One of the functions below that take a row. It gets the update's row, locked, or None where
            the weights that the server was started with are wanted. The row of the last update, if there is
            one, records their owner.
        claims: Whether `name` owns the update afterwards. A control plane that only reports a failure may be
            the one that reaches no server, and would keep the others from the update.
        values: The operation's further arguments.

    Raises:
        Superseded: The pool wants other weights now, or another control plane is the owner.
    """
    pool, update = pool_rows.by_id(tx.conn, target.pool.id, lock=True), target.update
    if pool is None or pool.policy_index != target.pool.policy_index:
        raise Superseded
    this = () if update is None else (weight_updates.c.id == update.id, _STANDS)
    row = _one(tx.conn, pool.id, *this, lock=True)
    if row is None and update is not None:
        raise Superseded  # Another control plane has ended it since the pool's row was read.
    if row is not None:
        others = row.owner is not None and row.owner != name
        # On SQLite there is one control plane at a time, so another name belongs to a predecessor.
        if others and not tx.sqlite and (row.owner_expires or 0.0) > tx.now:
            raise Superseded
        if claims:
            owned = {"owner": name, "owner_expires": tx.now + OWNER_SECONDS}
            tx.conn.execute(sa.update(weight_updates).where(weight_updates.c.id == row.id).values(**owned))
    operation(tx, target, None if update is None else row, **values)


def begin(
    tx: Transaction, target: BackendTarget, row: WeightUpdateRow | None, observation: Observation
) -> None:
    """Record that the backend gets no more rollouts and that this process may have paused its server.

    Rollouts that do not continue across the update, or that refused weights may have served, return to Init.
    """
    if row is not None:
        values: dict[str, Any] = {"weights": "Updating", "weights_message": f"to {row.policy_version}"}
        if target.restored:
            values["weights"] = "Failed"  # It stays so until it is verified, even for a successor.
        # An earlier attempt may have loaded some of the weights without a label, and can no longer be seen.
        tried = target.row.url in _touched([row])
        if tried or target.row.policy_index == row.policy_index or target.row.weights in ("Stale", "Failed"):
            values["policy_index"] = BEHIND
        _change_backend(tx, target.pool.id, target.row.url, **values)
        measured = {} if observation.before is None else {"before": observation.before}
        row = note(tx, row, target.row.url, step="Pausing", message="", **measured)
        if observation.reference is not None and target.begun and row.state == "Running":
            _change(tx, row, verified_by=observation.reference.source)
    if row is None or target.lenient or target.restored:
        staleness.fence(tx, target.pool.namespace, target.pool.name, target.row.url)


def advance(tx: Transaction, target: BackendTarget, row: WeightUpdateRow | None, **values: Any) -> None:
    """Record the backend's progress in its part of the update."""
    if row is not None:
        note(tx, row, target.row.url, **values)


def mark(tx: Transaction, target: BackendTarget, values: dict[str, Any]) -> None:
    """Write columns of a backend.

    Raises:
        Superseded: The backend's weights have been changed since they were read.
    """
    known = target.row
    row = pool_rows.locked_backend(tx, target.pool.id, known.url)
    if row is None or (row.weights, row.policy_index) != (known.weights, known.policy_index):
        raise Superseded
    _change_backend(tx, target.pool.id, known.url, **values)


def done(
    tx: Transaction,
    target: BackendTarget,
    row: WeightUpdateRow | None,
    observation: Observation,
    message: str = "",
) -> None:
    """Record that the backend has the wanted weights.

    Args:
        observation: What the steps have shown. If nothing was loaded, the earlier verification stays.
        message: The reason why the weights were not verified.
    """
    pool, url = target.pool, target.row.url
    loaded = observation.last is not WeightStep.LOOK
    current: dict[str, Any] = {"weights": "Current", "weights_message": "", "restart_requested": False}
    version = (
        row.policy_version if row is not None else observation.first_label if loaded else observation.label
    )
    if version is not None:
        current["policy_version"] = version[:128]
    _change_backend(tx, pool.id, url, policy_index=pool.policy_index, **current)
    if row is None:
        return
    part: dict[str, Any] = {"step": "Done", "message": message}
    if loaded:
        part |= {"verified": observation.comparison is not None, "max_difference": observation.difference}
    note(tx, row, url, **part)
    if observation.paused is not None:
        tx.count("weight_update_paused_seconds", value=observation.paused)
    if row.state == "Running" and request_of(row).source.pushed:
        _change_pool(tx, pool.id, paused=False, pause_mode=None)
    settle(tx, pool.id)
    staleness.enforce(tx, pool.namespace, pool.name)


def failed(
    tx: Transaction, target: BackendTarget, row: WeightUpdateRow | None, message: str, *, for_good: bool
) -> None:
    """Record the last error of the backend.

    Args:
        for_good: Whether its server is believed to be unable to load the weights. The update fails if no
            server can load them. Otherwise this server is at fault and must be restarted.
    """
    url = target.row.url
    backend = pool_rows.locked_backend(tx, target.pool.id, url)
    if backend is not None and backend.weights != "Current":
        _change_backend(tx, target.pool.id, url, weights_message=message)
    if row is None:
        return
    row = note(tx, row, url, message=message, **({"step": "Failed"} if for_good else {}))
    if for_good and row.state == "Running" and all(p.step == "Failed" for p in progress_of(row).values()):
        refuse(tx, target, row, f"{url}: {message}")
    elif for_good:
        restart(tx, target, row, message)


def restart(tx: Transaction, target: BackendTarget, _row: WeightUpdateRow | None, message: str) -> None:
    """Mark a backend whose server must be restarted; it waits at the version that it could not reach."""
    message += "; restart it" if target.pool.external else "; its driver restarts it"
    failed = {"weights": "Failed", "policy_index": target.pool.policy_index, "restart_requested": True}
    _change_backend(tx, target.pool.id, target.row.url, **failed, weights_message=message)
    # The server stays paused, so requests of its rollouts would wait until the restart.
    staleness.fence(tx, target.pool.namespace, target.pool.name, target.row.url)


def settle(tx: Transaction, pool_id: int) -> None:
    """End a running update once every backend of the pool has its weights.

    In a pool without backends the update waits for one, because nothing has shown yet that the weights are
    good.
    """
    pool = pool_rows.by_id(tx.conn, pool_id)
    row = None if pool is None else _desired(tx.conn, pool, lock=True)
    if pool is None or row is None or row.state != "Running":
        return
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
    verified = bool(progress) and all(part.verified for part in progress.values())
    _change(
        tx,
        row,
        state="Succeeded",
        verified=verified,
        verified_by=row.verified_by if verified else "",
        message=row.message or next((part.message for part in progress.values() if part.message), ""),
        progress=encoded(progress),
        finished_at=tx.now,
    )
    tx.count("weight_updates", "Succeeded")
    staleness.enforce(tx, pool.namespace, pool.name)


def refuse(
    tx: Transaction, target: BackendTarget, row: WeightUpdateRow | None, message: str, *, keeps: bool = False
) -> None:
    """Fail the update if it runs, so that the pool wants its previous weights again.

    Backends that may have the new weights are marked as BEHIND: they are loaded and verified before they are
    used.

    Args:
        message: Why the weights are refused.
        keeps: Whether the server of the backend has refused them and still has the previous ones.
    """
    if row is None or row.state != "Running":
        return
    url, pool_id = target.row.url, row.pool_id
    if keeps:
        row = note(tx, row, url, step="Failed", message=message)
    _change(tx, row, state="Failed", message=message[:4096], finished_at=tx.now)
    tx.count("weight_updates", "Failed")
    chain = _succeeded(tx.conn, pool_id, before=row.id)
    unknown = {"weights": "Failed", "policy_index": BEHIND, "restart_requested": False}
    unknown["weights_message"] = f"it may have refused weights ({row.policy_version})"
    for backend in (_touched([row]) - ({url} if keeps else set())) | _interrupted(tx.conn, pool_id, chain):
        _change_backend(tx, pool_id, backend, **unknown)
    version, index = (chain[0].policy_version, chain[0].policy_index) if chain else ("", 0)
    _change_pool(tx, pool_id, policy_version=version, policy_index=index, served_model=serves(chain))


def _interrupted(conn: Connection, pool_id: int, chain: Sequence[WeightUpdateRow]) -> set[str]:
    """Return the backends that were being loaded when their update was superseded, and not loaded later.

    Such a backend still has the label and the index of its earlier weights. It counts only if no update has
    succeeded since; `chain` are those that have, the newest first. If there is none, the weights that the
    servers were started with are wanted. No label distinguishes them from those of an update, so
    a backend that has got the weights of any update counts, too.
    """
    known = pool_rows.backends_of(conn, pool_id)
    updating = {row.url for row in known if row.weights == "Updating"}
    since = weight_updates.c.id > (chain[0].id if chain else 0)
    rows = _newest(conn, pool_id, weight_updates.c.state == "Superseded", since)
    updated = set() if chain else {row.url for row in known if row.policy_index > 0}
    return (_touched(rows) & updating) | updated


def _touched(rows: Iterable[WeightUpdateRow]) -> set[str]:
    """Return the servers that may have the weights of one of these updates."""
    return {part.url for row in rows for part in progress_of(row).values() if part.step in _TOUCHED}
