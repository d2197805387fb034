"""BackendPools: stored, and their backends as a driver or the health check reports them."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import orjson
import sqlalchemy as sa
from rollyard_crds.backendpool import BackendPool, BackendStatus
from sqlalchemy.engine import Connection

from rollyard_api import states
from rollyard_api.bus import QUEUE
from rollyard_api.codec import dumps, loads
from rollyard_api.database import Transaction
from rollyard_api.jobs import merge_conditions
from rollyard_api.jobviews import timestamp
from rollyard_api.problems import Conflict, NotFound
from rollyard_api.schema import backends, pools, rollouts

_OWN_METADATA = ("name", "namespace", "uid", "generation", "creationTimestamp", "deletionTimestamp")


def find(conn: Connection, namespace: str, name: str) -> Any:
    """The pool's row.

    Raises:
        NotFound: no such pool in this namespace.
    """
    row = conn.execute(
        sa.select(pools).where(pools.c.namespace == namespace, pools.c.name == name)
    ).one_or_none()
    if row is None:
        raise NotFound(f"no BackendPool {name!r} in namespace {namespace!r}", reason="PoolNotFound")
    return row


def create(tx: Transaction, pool: BackendPool) -> bool:
    """Make the pool; False when the same one stands already.

    Raises:
        Conflict: a pool of this name has another spec.
    """
    meta, spec = pool.metadata, pool.spec
    encoded = orjson.dumps(spec.to_json(), option=orjson.OPT_SORT_KEYS)
    found = tx.conn.execute(
        sa.select(pools.c.spec).where(pools.c.namespace == meta.namespace, pools.c.name == meta.name)
    ).one_or_none()
    if found is not None:
        if found.spec != encoded:
            raise Conflict(
                f"BackendPool {meta.name!r} exists in namespace {meta.namespace!r} with another spec; "
                "delete it first or choose another name",
                reason="AlreadyExists",
            )
        return False
    external = spec.engine.external
    pool_id: int = tx.conn.execute(
        sa.insert(pools)
        .values(
            uid=str(uuid.uuid4()),
            namespace=meta.namespace,
            name=meta.name,
            generation=1,
            metadata=dumps({k: v for k, v in meta.to_json().items() if k not in _OWN_METADATA}),
            spec=encoded,
            status=b"{}",
            model=spec.model,
            tokenizer=spec.tokenizer or spec.model,
            max_active=spec.max_active_rollouts,
            external=external is not None,
            created_at=tx.now,
        )
        .returning(pools.c.id)
    ).scalar_one()
    if external is not None:
        unknown = [BackendStatus(url=url, message="not checked yet") for url in external.urls]
        _replace(tx, pool_id, unknown)
    return True


def _replace(tx: Transaction, pool_id: int, reported: Sequence[BackendStatus]) -> None:
    tx.conn.execute(sa.delete(backends).where(backends.c.pool_id == pool_id))
    by_url = {b.url: b for b in reported}
    if by_url:
        tx.conn.execute(
            sa.insert(backends),
            [
                {
                    "pool_id": pool_id,
                    "url": b.url,
                    "position": position,
                    "ready": b.ready,
                    "policy_version": b.policy_version,
                    "message": b.message,
                }
                for position, b in enumerate(by_url.values())
            ],
        )


def put_backends(tx: Transaction, namespace: str, name: str, reported: Sequence[BackendStatus]) -> None:
    """Replace what is known of the pool's backends.

    Raises:
        NotFound: no such pool.
        Conflict: the pool is external; the control plane checks its servers itself.
    """
    pool = find(tx.conn, namespace, name)
    if pool.external:
        raise Conflict(
            f"BackendPool {name!r} is external: its servers are spec.engine.external.urls, "
            "checked by the control plane",
            reason="ExternalPool",
        )
    _replace(tx, pool.id, reported)
    tx.wake(QUEUE)


def mark(tx: Transaction, pool_id: int, url: str, *, ready: bool, message: str) -> None:
    """What a health check found out about one external backend."""
    tx.conn.execute(
        sa.update(backends)
        .where(backends.c.pool_id == pool_id, backends.c.url == url)
        .values(ready=ready, message=message)
    )
    tx.wake(QUEUE)


def put_status(tx: Transaction, namespace: str, name: str, status: dict[str, Any]) -> None:
    """Take conditions, observedGeneration, replicas and selector from the driver."""
    pool = find(tx.conn, namespace, name)
    before = loads(pool.status)
    status = {
        k: status[k] for k in ("conditions", "observedGeneration", "replicas", "selector") if k in status
    }
    status["conditions"] = merge_conditions(before.get("conditions", []), status.get("conditions", []))
    tx.conn.execute(sa.update(pools).where(pools.c.id == pool.id).values(status=dumps(status)))


def delete(tx: Transaction, namespace: str, name: str) -> None:
    """Remove the pool; jobs that refer to it get no Run lease until there is one of that name again."""
    pool = find(tx.conn, namespace, name)
    tx.conn.execute(sa.delete(backends).where(backends.c.pool_id == pool.id))
    tx.conn.execute(sa.delete(pools).where(pools.c.id == pool.id))


def active_rollouts(conn: Connection) -> dict[str, int]:
    """Rollouts in Run per backend URL."""
    rows = conn.execute(
        sa.select(rollouts.c.backend, sa.func.count().label("n"))
        .where(
            rollouts.c.lease_expires.is_not(None),
            rollouts.c.state == states.leased("run"),
            rollouts.c.backend.is_not(None),
        )
        .group_by(rollouts.c.backend)
    )
    return {row.backend: row.n for row in rows}


def listed(conn: Connection, namespace: str | None, name: str | None = None) -> list[dict[str, Any]]:
    """Pools as REST answers them, with their backends and live counts of active rollouts."""
    query = sa.select(pools).order_by(pools.c.id)
    if namespace is not None:
        query = query.where(pools.c.namespace == namespace)
    if name is not None:
        query = query.where(pools.c.name == name)
    active = active_rollouts(conn)
    by_pool: defaultdict[int, list[Any]] = defaultdict(list)
    for backend in conn.execute(sa.select(backends).order_by(backends.c.position)):
        by_pool[backend.pool_id].append(backend)
    return [_document(pool, by_pool[pool.id], active) for pool in conn.execute(query)]


def _document(pool: Any, rows: Sequence[Any], active: dict[str, int]) -> dict[str, Any]:
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
            "readyReplicas": sum(bool(b.ready) for b in rows),
            "backends": [
                {
                    "url": b.url,
                    "ready": bool(b.ready),
                    "activeRollouts": active.get(b.url, 0),
                    "policyVersion": b.policy_version,
                    "message": b.message,
                }
                for b in rows
            ],
        },
    }
