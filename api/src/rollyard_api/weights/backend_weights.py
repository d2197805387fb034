"""Record in the tables that a backend's weight update begins, succeeds or is given up.

The control plane that owns the update calls these functions.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.core.wakeups import QUEUE
from rollyard_api.rollouts import staleness
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import BackendRow, PoolRow, WeightUpdateRow, read_one
from rollyard_api.storage.schema import backends, pools, weight_updates
from rollyard_api.weights import update_records
from rollyard_api.weights.backend_progress import EarlierLogprobs, progress_of
from rollyard_api.weights.backend_targets import PAUSED, BackendTarget
from rollyard_api.weights.verification import Comparison

OWNER_SECONDS: Final = 15.0
"""How long a control plane owns an update after each renewal, in seconds.

Where several control planes share a database, one of them carries out an update.
"""


class Superseded(ControlPlaneError):
    """Another update is wanted now, or another control plane owns the update."""

    reason = "Superseded"


def renew(tx: Transaction, name: str, ids: set[int]) -> None:
    """Renew the ownership of those of these updates that `name` owns."""
    tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id.in_(sorted(ids)), weight_updates.c.owner == name)
        .values(owner_expires=tx.now + OWNER_SECONDS)
    )


def _pool(tx: Transaction, target: BackendTarget) -> PoolRow | None:
    found = tx.conn.execute(sa.select(pools).where(pools.c.id == target.pool.id)).one_or_none()
    return read_one(PoolRow, found)


def take_charge(tx: Transaction, name: str, target: BackendTarget) -> WeightUpdateRow:
    """Return the update's row, locked, and make `name` its owner.

    Raises:
        Superseded: The pool wants another update now, or another control plane owns this one.
    """
    pool = _pool(tx, target)
    update = None if pool is None else update_records.desired(tx.conn, pool, lock=True)
    if update is None or target.update is None or update.id != target.update.id:
        raise Superseded
    _own(tx, name, update)
    return update


def take_charge_of_first(tx: Transaction, name: str, target: BackendTarget) -> None:
    """Make `name` the owner where the weights that the server was started with are wanted.

    The last update's row records the owner.

    Rollouts that the backend may have served with refused weights go back to Init.

    Raises:
        Superseded: Other weights are wanted now, or another control plane is the owner.
    """
    pool = _pool(tx, target)
    if pool is None or pool.policy_index != 0:
        raise Superseded
    last = tx.conn.execute(
        sa.select(weight_updates)
        .where(weight_updates.c.pool_id == pool.id)
        .order_by(weight_updates.c.id.desc())
        .limit(1)
        .with_for_update()
    ).one_or_none()
    if last is not None:
        _own(tx, name, WeightUpdateRow(*last))
    staleness.fence(tx, pool.namespace, pool.name, target.row.url)


def _own(tx: Transaction, name: str, update: WeightUpdateRow) -> None:
    others = update.owner is not None and update.owner != name
    # On SQLite there is one control plane at a time, so another name belongs to a predecessor.
    if others and not tx.sqlite and (update.owner_expires or 0.0) > tx.now:
        raise Superseded
    tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id == update.id)
        .values(owner=name, owner_expires=tx.now + OWNER_SECONDS)
    )


def begin(
    tx: Transaction,
    name: str,
    target: BackendTarget,
    *,
    fence: bool,
    before: EarlierLogprobs | None = None,
) -> None:
    """Record that the backend gets no more rollouts and that this process may have paused its server.

    Args:
        before: What the server gave with its weights until now, if this could be measured.
    """
    update = take_charge(tx, name, target)
    values: dict[str, Any] = {"weights": "Updating", "weights_message": f"to {update.policy_version}"}
    if target.restored:
        values["weights"] = "Failed"  # It stays so until it is verified, also for a successor.
    if target.row.policy_index == update.policy_index or target.row.weights in ("Stale", "Failed"):
        values["policy_index"] = update_records.BEHIND
    update_records.set_backend(tx, target.pool.id, target.row.url, **values)
    update_records.note(
        tx,
        update.id,
        target.row.url,
        step="Pausing",
        message="",
        **({} if before is None else {"before": before}),
    )
    if fence:
        staleness.fence(tx, target.pool.namespace, target.pool.name, target.row.url)


def note(tx: Transaction, name: str, target: BackendTarget, values: dict[str, Any]) -> None:
    """Record the backend's progress in its part of the update.

    Raises:
        Superseded: This control plane does not own the update any more.
    """
    update = take_charge(tx, name, target)
    update_records.note(tx, update.id, target.row.url, **values)


def _now(tx: Transaction, target: BackendTarget) -> BackendRow | None:
    where = (backends.c.pool_id == target.pool.id, backends.c.url == target.row.url)
    found = tx.conn.execute(sa.select(backends).where(*where).with_for_update()).one_or_none()
    return read_one(BackendRow, found)


def mark(tx: Transaction, target: BackendTarget, values: dict[str, Any]) -> None:
    """Write columns of a backend.

    Raises:
        Superseded: The backend's weights have been changed since they were read.
    """
    row = _now(tx, target)
    seen = target.row
    if row is None or (row.weights, row.policy_index) != (seen.weights, seen.policy_index):
        raise Superseded
    update_records.set_backend(tx, target.pool.id, seen.url, **values)
    tx.wake(update_records.TOPIC)
    tx.wake(QUEUE)


def paused(tx: Transaction, target: BackendTarget) -> None:
    """Record that the backend's server is paused, because its pool is."""
    row = _now(tx, target)
    if row is not None and row.weights == "Updating" and row.policy_index == target.row.policy_index:
        update_records.set_backend(tx, target.pool.id, target.row.url, weights_message=PAUSED)
        tx.wake(update_records.TOPIC)


def tell(tx: Transaction, target: BackendTarget, message: str) -> None:
    """Record the last error of the backend."""
    row = _now(tx, target)
    if row is not None and row.weights != "Current":
        update_records.set_backend(tx, target.pool.id, target.row.url, weights_message=message)
    if target.update is not None:
        update_records.note(tx, target.update.id, target.row.url, message=message)


def verified_by(tx: Transaction, target: BackendTarget, source: str) -> None:
    """Record what the weights of the update's backends are compared with."""
    assert target.update is not None
    tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id == target.update.id, weight_updates.c.state == "Running")
        .values(verified_by=source)
    )


def finite(number: float | None) -> float | None:
    """Return a rounded difference that JSON can hold, or None if there is none or it is infinite."""
    return None if number is None or number == float("inf") else round(number, 6)


def done(
    tx: Transaction,
    target: BackendTarget,
    verified: bool | None,
    comparison: Comparison | None,
    paused: float | None = None,
    message: str = "",
) -> None:
    """Record that the backend has the update's weights.

    Args:
        verified: Whether they were verified. None keeps what was recorded before.
        paused: The time from pause to resume, in seconds.
        message: The reason why they were not verified.
    """
    update = target.update
    assert update is not None
    found = tx.conn.execute(
        sa.select(weight_updates).where(weight_updates.c.id == update.id).with_for_update()
    ).one()
    row = WeightUpdateRow(*found)
    if row.state == "Failed":
        # Another backend was found to have wrong weights in the meantime.
        values = {
            "weights": "Failed",
            "weights_message": "it has refused weights",
            "policy_index": update_records.BEHIND,
        }
        update_records.set_backend(tx, target.pool.id, target.row.url, **values)
        return
    update_records.set_backend(
        tx,
        target.pool.id,
        target.row.url,
        weights="Current",
        weights_message="",
        policy_index=update.policy_index,
        policy_version=update.policy_version,
        restart_requested=False,
    )
    changes: dict[str, Any] = {"step": "Done", "message": ""}
    if verified is not None:
        difference = None if comparison is None else finite(comparison.max_difference)
        changes |= {"verified": verified, "max_difference": difference, "message": message}
    update_records.note(tx, update.id, target.row.url, **changes)
    if paused is not None:
        tx.count("paused_seconds", value=paused)
    if row.state == "Running" and update_records.request_of(row).source.pushed:
        update_records.unpause(tx, target.pool.id)
    tx.wake(update_records.TOPIC)
    tx.wake(QUEUE)
    update_records.settle(tx, target.pool.id)
    staleness.enforce(tx, target.pool.namespace, target.pool.name)


def restart(tx: Transaction, target: BackendTarget, message: str) -> None:
    """Mark a backend whose server must be restarted; it waits at the version that it could not reach."""
    if _now(tx, target) is None:
        return
    update_records.set_backend(
        tx,
        target.pool.id,
        target.row.url,
        weights="Failed",
        weights_message=f"{message}; {'restart it' if target.pool.external else 'its driver restarts it'}",
        policy_index=target.pool.policy_index,
        restart_requested=True,
    )
    # The server stays paused, so requests of its rollouts would wait until the restart.
    staleness.fence(tx, target.pool.namespace, target.pool.name, target.row.url)
    tx.wake(update_records.TOPIC)


def give_up_loading(tx: Transaction, target: BackendTarget, message: str) -> None:
    """Record that a server cannot load the weights.

    The update fails if no server can load them. Otherwise this server is at fault and must be restarted.
    """
    update = target.update
    assert update is not None
    row = update_records.note(tx, update.id, target.row.url, step="Failed", message=message)
    if row is not None and all(part.step == "Failed" for part in progress_of(row).values()):
        update_records.refuse(tx, target.pool.id, update.id, f"{target.row.url}: {message}")
        return
    pool = _pool(tx, target)
    if pool is not None and pool.policy_index == update.policy_index:
        restart(tx, target, message)
