"""Store BackendPools, and their backends as a driver or the health check reports them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import sqlalchemy as sa
from rollyard_crds.backendpool import BackendPool, BackendPoolSpec, BackendStatus
from rollyard_crds.weights import UNVERIFIED
from sqlalchemy.engine import Connection

from rollyard_api.backends import circuits
from rollyard_api.backends.router import limit_of
from rollyard_api.core.codec import dumps, loads, validated
from rollyard_api.core.conditions import differs, merge_status, stored_metadata, stored_spec, timestamp
from rollyard_api.core.problems import Conflict, Invalid
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import BackendRow, PoolRow, read_all
from rollyard_api.storage.schema import backends, pools, rollouts


def create(tx: Transaction, pool: BackendPool) -> bool:
    """Create the pool and return True, or return False if the same pool exists.

    Raises:
        Conflict: A pool with this name has another spec.
    """
    meta, spec = pool.metadata, pool.spec
    encoded = stored_spec(spec.to_json())
    known = pool_rows.named(tx.conn, meta.namespace, meta.name)
    if known is not None:
        if known.spec != encoded:
            raise differs("BackendPool", meta.namespace, meta.name)
        return False
    row = pool_rows.create(
        tx,
        {
            "namespace": meta.namespace,
            "name": meta.name,
            "metadata": stored_metadata(meta),
            "spec": encoded,
            "model": spec.model,
            "tokenizer": spec.tokenizer or spec.model,
            "max_active": spec.max_active_rollouts,
            "external": spec.engine.external is not None,
        },
    )
    if spec.engine.external is not None:
        put_servers(tx, row, spec.engine.external.urls)
    return True


@dataclass(frozen=True, slots=True)
class Seen:
    """What a driver or a health check finds out about a backend."""

    ready: bool
    message: str = ""
    policy_version: str | None = None
    """The server's label of its weights, or None if it has no label that counts."""

    @classmethod
    def of(cls, row: BackendRow) -> Seen:
        """Return what the row of a backend says."""
        return cls(row.ready, row.message, row.policy_version)


def _put(tx: Transaction, pool: PoolRow, servers: Mapping[str, BackendStatus | None]) -> None:
    """Make these the pool's backends, by URL. Rows that remain keep their circuit, speed, weights and stats.

    None stands for what is already known of a backend; of a new one nothing is known.
    """
    rows = {row.url: row for row in pool_rows.backends_of(tx.conn, pool.id, lock=True)}
    pool_rows.remove_backends(tx, pool.id, rows.keys() - servers.keys())
    new = []
    for position, (url, reported) in enumerate(servers.items()):
        row = rows.get(url)
        values: dict[str, Any] = {"position": position}
        if row is not None and reported is None:
            pool_rows.change_backend(tx, pool.id, url, _differing(row, values))
            continue
        status = reported or BackendStatus(url=url, message="not checked yet")
        values["draining"] = status.draining
        # A driver shows what it has read here about a ready backend, such as why its weights are Stale.
        message = "" if status.ready else status.message
        if row is None:
            version = "" if status.policy_version.startswith(UNVERIFIED) else status.policy_version
            values |= {"ready": status.ready, "message": message, "policy_version": version}
            new.append({"url": url, **values, **_of_label(pool, version)})
        else:
            seen = Seen(status.ready, message, status.policy_version or None)
            pool_rows.change_backend(tx, pool.id, url, _differing(row, values | _found(tx, pool, row, seen)))
    pool_rows.add_backends(tx, pool.id, new)


def _of_label(pool: PoolRow, label: str) -> dict[str, Any]:
    """Return the columns of a server that has just started. Without the pool's label, it is behind."""
    if pool.policy_index == 0 or label == pool.policy_version:
        return {"weights": "Current", "weights_message": "", "policy_index": pool.policy_index}
    message = f"it began with weights {label!r}, the pool is at {pool.policy_version!r}"
    return {"weights": "Stale", "weights_message": message, "policy_index": 0}


def _found(tx: Transaction, pool: PoolRow, row: BackendRow, seen: Seen) -> dict[str, Any]:
    """Return the columns that follow from what was found out about a backend."""
    values: dict[str, Any] = {"ready": seen.ready, "message": seen.message}
    label, began = seen.policy_version, seen.ready and not row.ready
    if began:
        values |= circuits.values(circuits.of(row).restarted(tx.now)) | {"restart_requested": False}
        values["places"] = None  # Its cache may have another size now.
    if row.weights == "Updating" or (label is not None and label.startswith(UNVERIFIED)):
        return values  # Labels concern only the weight update now.
    # Drivers know a label from the start of a server. The control plane reads the labels of external
    # servers itself, and a label that differs from the last one means that the server was restarted.
    believed = pool.policy_index == 0 or pool.external or began
    if label is not None and believed and label != row.policy_version:
        values["policy_version"] = label
        if row.weights == "Current":
            values |= _of_label(pool, label)
    elif label is None and began and row.weights == "Current":
        values |= _of_label(pool, "")  # It is not known whether the server was restarted.
    return values


def _differing(row: BackendRow, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if getattr(row, name) != value}


def put_backends(tx: Transaction, namespace: str, name: str, reported: Sequence[BackendStatus]) -> None:
    """Replace the pool's backends by those that its driver reports.

    Raises:
        NotFound: There is no such pool.
        Conflict: The pool is external, and the control plane checks its servers itself.
    """
    pool = pool_rows.find(tx.conn, namespace, name)
    if pool.external:
        raise Conflict(
            f"BackendPool {name!r} is external: its servers are spec.engine.external.urls, "
            "checked by the control plane",
            reason="ExternalPool",
        )
    _put(tx, pool, {backend.url: backend for backend in reported})


def mark(tx: Transaction, pool_id: int, url: str, before: Seen, after: Seen) -> None:
    """Record the result of a health check of an external backend, unless its row has changed since."""
    row = pool_rows.locked_backend(tx, pool_id, url)
    pool = pool_rows.by_id(tx.conn, pool_id)
    if row is None or pool is None or Seen.of(row) != before:
        return
    pool_rows.change_backend(tx, pool_id, url, _differing(row, _found(tx, pool, row, after)))


_FIXED: Final = "cannot be changed; make another pool"


def patch(tx: Transaction, namespace: str, name: str, changes: dict[str, Any]) -> None:
    """Merge `changes` into the spec (RFC 7386): replicas, limits, arguments or external URLs.

    Raises:
        NotFound: There is no such pool.
        Invalid: A field is wrong or may not change, such as the model, the tokenizer or the engine's type.
    """
    pool = pool_rows.find(tx.conn, namespace, name, lock=True)
    before = BackendPoolSpec.model_validate(loads(pool.spec))
    after = validated(BackendPoolSpec, merge(loads(pool.spec), changes), "spec")
    problems = fixed(before, after)
    if after.engine.external is not None and before.replicas != after.replicas:
        problems.append("spec.replicas: an external pool has one backend for each of engine.external.urls")
    if problems:
        raise Invalid.of(*problems)
    change(tx, pool, after)


def fixed(before: BackendPoolSpec, after: BackendPoolSpec) -> list[str]:
    """Return one line for each changed field that may not change."""
    return [
        f"spec.{field}: is {old!r} and {_FIXED}"
        for field, old, new in (
            ("model", before.model, after.model),
            ("tokenizer", before.tokenizer or before.model, after.tokenizer or after.model),
            ("engine.type", before.engine.type, after.engine.type),
            ("placement", before.placement, after.placement),
        )
        if old != new
    ]


def change(tx: Transaction, pool: PoolRow, after: BackendPoolSpec) -> None:
    """Give the pool in this locked row another spec. The same spec changes nothing."""
    encoded = stored_spec(after.to_json())
    if encoded == pool.spec:
        return
    values = {"spec": encoded, "generation": pool.generation + 1, "max_active": after.max_active_rollouts}
    pool_rows.change(tx, pool.id, values)
    if after.engine.external is not None:
        put_servers(tx, pool, after.engine.external.urls)


def put_servers(tx: Transaction, pool: PoolRow, urls: Sequence[str]) -> None:
    """Make these the servers of an external pool, of which there may be none.

    The spec stays as it is, and with it the object of a driver that would register its own spec again.
    """
    _put(tx, pool, dict.fromkeys(urls))


def merge(document: Any, changes: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386): null removes a member, objects are merged, all else replaces."""
    if not isinstance(changes, dict):
        return changes
    merged = dict(document) if isinstance(document, dict) else {}
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def put_status(tx: Transaction, namespace: str, name: str, status: dict[str, Any]) -> None:
    """Take conditions, observedGeneration, replicas and selector from the driver's report."""
    pool = pool_rows.find(tx.conn, namespace, name)
    before = loads(pool.status)
    after = merge_status(before, status, ("conditions", "observedGeneration", "replicas", "selector"))
    if after != before:
        pool_rows.describe(tx, pool.id, status=dumps(after))


def delete(tx: Transaction, namespace: str, name: str) -> None:
    """Remove the pool. Jobs that refer to it get no Run lease until there is a pool with that name again."""
    pool_rows.remove(tx, pool_rows.find(tx.conn, namespace, name).id)


def active_rollouts(conn: Connection) -> dict[str, int]:
    """Return the number of rollouts in Run for each backend URL."""
    rows = conn.execute(
        sa.select(rollouts.c.backend, sa.func.count().label("n"))
        .where(
            rollouts.c.lease_expires.is_not(None),
            rollouts.c.state == RolloutState.LEASED_RUN,
            rollouts.c.backend.is_not(None),
        )
        .group_by(rollouts.c.backend)
    )
    return {row.backend: row.n for row in rows}


_POOLS: Final = sa.select(pools).order_by(pools.c.id)
_BACKENDS: Final = sa.select(backends).order_by(backends.c.position)


def listed(conn: Connection, namespace: str | None, name: str | None = None) -> list[dict[str, Any]]:
    """Return pools as the REST API presents them, with backends and live counts of active rollouts."""
    query = _POOLS
    if namespace is not None:
        query = query.where(pools.c.namespace == namespace)
    if name is not None:
        query = query.where(pools.c.name == name)
    active = active_rollouts(conn)
    by_pool: defaultdict[int, list[BackendRow]] = defaultdict(list)
    for backend in read_all(BackendRow, conn.execute(_BACKENDS)):
        by_pool[backend.pool_id].append(backend)
    return [_document(pool, by_pool[pool.id], active) for pool in read_all(PoolRow, conn.execute(query))]


def _document(pool: PoolRow, rows: Sequence[BackendRow], active: dict[str, int]) -> dict[str, Any]:
    ready = sum(bool(b.ready and b.weights == "Current" and not b.draining) for b in rows)
    wanted = len(rows) if pool.external else loads(pool.spec)["replicas"]
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "BackendPool",
        "metadata": {
            **loads(pool.metadata),
            "name": pool.name,
            "namespace": pool.namespace,
            "uid": pool.uid,
            "generation": pool.generation,
            "creationTimestamp": timestamp(pool.created_at),
        },
        "spec": orjson.Fragment(pool.spec),
        "status": {
            "conditions": [],
            "observedGeneration": 0,
            "replicas": len(rows),
            "selector": "",
            **loads(pool.status),
            "readyReplicas": ready,
            "readyText": f"{ready}/{wanted}",
            "policyVersion": pool.policy_version,
            "paused": bool(pool.paused),
            "backends": [_backend(pool, b, active.get(b.url, 0)) for b in rows],
        },
    }


def _backend(pool: PoolRow, row: BackendRow, active: int) -> dict[str, Any]:
    """Return a BackendStatus without the values that are not known yet."""
    message = row.message
    if not message and row.weights != "Current":
        message = row.weights_message
    if not message and row.circuit != "Closed":
        message = f"not used after {row.failures} failures; a probe decides"
    document = {
        "url": row.url,
        "ready": bool(row.ready),
        "activeRollouts": active,
        "maxActiveRollouts": limit_of(pool.max_active, row.places),
        "policyVersion": row.policy_version,
        "weights": row.weights,
        "circuit": row.circuit,
        "draining": bool(row.draining),
        "restartRequested": bool(row.restart_requested),
        "message": message,
    }
    if row.stats is not None:
        document |= loads(row.stats)
    if row.speed is not None:
        document["tokensPerSecond"] = round(row.speed, 1)
    return document
