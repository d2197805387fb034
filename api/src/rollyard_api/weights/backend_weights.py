"""A backend's weights in the tables: begun, done, given up, by the control plane that is in charge."""

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
from rollyard_api.weights.backend_targets import PAUSED, BackendTarget
from rollyard_api.weights.verification import Comparison

OWNER_SECONDS: Final = 15.0
"""One of several control planes on a database carries out an update, and says so for that long."""


class Superseded(ControlPlaneError):
    """Another update, or another control plane, is in charge now."""

    reason = "Superseded"


def renew(tx: Transaction, name: str, ids: set[int]) -> None:
    """Say that `name` still carries out these updates, where they are its own."""
    tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id.in_(sorted(ids)), weight_updates.c.owner == name)
        .values(owner_expires=tx.now + OWNER_SECONDS)
    )


def _pool(tx: Transaction, target: BackendTarget) -> PoolRow | None:
    found = tx.conn.execute(sa.select(pools).where(pools.c.id == target.pool.id)).one_or_none()
    return read_one(PoolRow, found)


def take_charge(tx: Transaction, name: str, target: BackendTarget) -> WeightUpdateRow:
    """The update's row, locked, if it is still the pool's and `name`'s, or nobody's.

    Raises:
        Superseded: it is not.
    """
    pool = _pool(tx, target)
    update = None if pool is None else update_records.desired(tx.conn, pool, lock=True)
    if update is None or target.update is None or update.id != target.update.id:
        raise Superseded
    _own(tx, name, update)
    return update


def take_charge_of_first(tx: Transaction, name: str, target: BackendTarget) -> None:
    """Do the same where the weights of the server's start are wanted.

    The last update's row says who carries it out.

    Rollouts that the backend may have served with refused weights go back to Init.

    Raises:
        Superseded: others are wanted by now, or somebody else sees to it.
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
    # On SQLite there is one control plane at a time: another name is its predecessor's.
    if others and not tx.sqlite and (update.owner_expires or 0.0) > tx.now:
        raise Superseded
    tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id == update.id)
        .values(owner=name, owner_expires=tx.now + OWNER_SECONDS)
    )


def begin(tx: Transaction, name: str, target: BackendTarget, *, fence: bool) -> None:
    """From here on no rollout is given to the backend, and we may have paused it."""
    update = take_charge(tx, name, target)
    values: dict[str, Any] = {"weights": "Updating", "weights_message": f"to {update.policy_version}"}
    if target.restored:
        values["weights"] = "Failed"  # until it is verified, also for a successor of this process
    if target.row.policy_index == update.policy_index or target.row.weights in ("Stale", "Failed"):
        values["policy_index"] = update_records.BEHIND
    update_records.set_backend(tx, target.pool.id, target.row.url, **values)
    update_records.note(tx, update.id, target.row.url, step="Pausing", message="")
    if fence:
        staleness.fence(tx, target.pool.namespace, target.pool.name, target.row.url)


def note(tx: Transaction, name: str, target: BackendTarget, values: dict[str, Any]) -> None:
    """Tell how far the backend is, in its part of the update.

    Raises:
        Superseded: the update is not ours any more.
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
        Superseded: somebody has changed its weights since they were read.
    """
    row = _now(tx, target)
    seen = target.row
    if row is None or (row.weights, row.policy_index) != (seen.weights, seen.policy_index):
        raise Superseded
    update_records.set_backend(tx, target.pool.id, seen.url, **values)
    tx.wake(update_records.TOPIC)
    tx.wake(QUEUE)


def paused(tx: Transaction, target: BackendTarget) -> None:
    """Its server is paused, as its pool is."""
    row = _now(tx, target)
    if row is not None and row.weights == "Updating" and row.policy_index == target.row.policy_index:
        update_records.set_backend(tx, target.pool.id, target.row.url, weights_message=PAUSED)
        tx.wake(update_records.TOPIC)


def tell(tx: Transaction, target: BackendTarget, message: str) -> None:
    """What went wrong with it last."""
    row = _now(tx, target)
    if row is not None and row.weights != "Current":
        update_records.set_backend(tx, target.pool.id, target.row.url, weights_message=message)
    if target.update is not None:
        update_records.note(tx, target.update.id, target.row.url, message=message)


def verified_by(tx: Transaction, target: BackendTarget, source: str) -> None:
    """What the update's backends are compared with."""
    assert target.update is not None
    tx.conn.execute(
        sa.update(weight_updates)
        .where(weight_updates.c.id == target.update.id, weight_updates.c.state == "Running")
        .values(verified_by=source)
    )


def finite(number: float | None) -> float | None:
    """A difference as JSON can hold it, rounded; None: there is none, or it is infinite."""
    return None if number is None or number == float("inf") else round(number, 6)


def done(
    tx: Transaction,
    target: BackendTarget,
    verified: bool | None,
    comparison: Comparison | None,
    paused: float | None = None,
    message: str = "",
) -> None:
    """The backend has the update's weights; `verified` None: as it was before.

    Args:
        paused: seconds from pause to resume.
        message: why they were not verified.
    """
    update = target.update
    assert update is not None
    found = tx.conn.execute(
        sa.select(weight_updates).where(weight_updates.c.id == update.id).with_for_update()
    ).one()
    row = WeightUpdateRow(*found)
    if row.state == "Failed":
        # Another backend was found to have wrong weights meanwhile.
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
    """Only a restart of the server mends it; it waits for that at the version that it could not reach."""
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
    # It stays paused: what its rollouts ask of it would wait until then.
    staleness.fence(tx, target.pool.namespace, target.pool.name, target.row.url)
    tx.wake(update_records.TOPIC)


def give_up_loading(tx: Transaction, target: BackendTarget, message: str) -> None:
    """A server that loads no weights: the update fails where none loads them, else the server is at fault."""
    update = target.update
    assert update is not None
    row = update_records.note(tx, update.id, target.row.url, step="Failed", message=message)
    if row is not None and all(part.step == "Failed" for part in update_records.progress_of(row).values()):
        update_records.refuse(tx, target.pool.id, update.id, f"{target.row.url}: {message}")
        return
    pool = _pool(tx, target)
    if pool is not None and pool.policy_index == update.policy_index:
        restart(tx, target, message)
