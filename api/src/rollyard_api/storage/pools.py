"""Every statement that writes `pools` or `backends`, and the reads that several modules share.

A change that may let a rollout be leased wakes the queues.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.core.problems import NotFound
from rollyard_api.core.wakeups import BACKENDS, QUEUE
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import BackendRow, PoolRow, read_all, read_one
from rollyard_api.storage.schema import backends, jobs, pools, weight_updates


class MeasuredRuns(NamedTuple):
    """What completed Runs show about a server, each value as their mean."""

    url: str
    weight: float
    """The weight of these Runs in the moving averages, from 0 to 1."""
    speed: float
    """The sampled tokens per second of model time."""
    pace: float
    """The sampled tokens per second of Run."""
    pace_seconds: float
    """The seconds of Run."""
    pace_load: float
    """The active rollouts on the server."""


_THIS: Final = pools.c.id == bindparam("b_pool")
_ITS: Final = backends.c.pool_id == bindparam("b_pool")
_OF_URL: Final = backends.c.url == bindparam("b_url")
_NAMED: Final = sa.select(pools).where(
    pools.c.namespace == bindparam("b_namespace"), pools.c.name == bindparam("b_name")
)
_BY_ID: Final = sa.select(pools).where(_THIS)
_BACKENDS: Final = sa.select(backends).where(_ITS).order_by(backends.c.position)
_BACKEND: Final = sa.select(backends).where(_ITS, _OF_URL)
_UPDATE: Final = sa.update(pools).where(_THIS)
_UPDATE_BACKEND: Final = sa.update(backends).where(_ITS, _OF_URL)
_REMOVE: Final = (
    sa.delete(backends).where(_ITS),
    sa.delete(weight_updates).where(weight_updates.c.pool_id == bindparam("b_pool")),
    sa.delete(pools).where(_THIS),
)
_REMOVE_BACKENDS: Final = sa.delete(backends).where(
    _ITS, backends.c.url.in_(bindparam("b_urls", expanding=True))
)
# Other pools judge the same server by their own rollouts alone.
_POOL_OF_JOB: Final = (
    sa.select(pools.c.id)
    .join_from(pools, jobs, sa.and_(jobs.c.namespace == pools.c.namespace, jobs.c.pool == pools.c.name))
    .where(jobs.c.id == bindparam("b_job", type_=sa.Integer))
)
_RESET_FAILURES: Final = (
    sa.update(backends)
    .where(
        backends.c.pool_id.in_(_POOL_OF_JOB), _OF_URL, backends.c.failures > 0, backends.c.circuit == "Closed"
    )
    .values(failures=0)
)
_OF_JOB: Final = (
    sa.select(backends, pools.c.namespace, pools.c.name)
    .join_from(backends, pools, pools.c.id == backends.c.pool_id)
    .where(_OF_URL, backends.c.pool_id.in_(_POOL_OF_JOB))
    .order_by(backends.c.pool_id)
    .with_for_update(of=backends)
)


def _averaged(name: str) -> sa.Case[float]:
    column, new = backends.c[name], bindparam(f"b_{name}", type_=sa.Double)
    weight = bindparam("b_weight", type_=sa.Double)
    return sa.case((column.is_(None), new), else_=column + weight * (new - column))


_FOLD: Final = (
    sa.update(backends)
    .where(_OF_URL)
    .values(
        measured_at=bindparam("b_now", type_=sa.Double),
        **{name: _averaged(name) for name in MeasuredRuns._fields[2:]},
    )
)


def named(conn: Connection, namespace: str, name: str, *, lock: bool = False) -> PoolRow | None:
    """Return the pool with this name, or None; `lock` locks its row until the commit."""
    query = _NAMED.with_for_update() if lock else _NAMED
    rows = conn.execute(query, {"b_namespace": namespace, "b_name": name})
    return read_one(PoolRow, rows.one_or_none())


def find(conn: Connection, namespace: str, name: str, *, lock: bool = False) -> PoolRow:
    """Return the same as `named`.

    Raises:
        NotFound: There is no such pool in this namespace.
    """
    pool = named(conn, namespace, name, lock=lock)
    if pool is None:
        raise NotFound(f"no BackendPool {name!r} in namespace {namespace!r}", reason="PoolNotFound")
    return pool


def by_id(conn: Connection, pool_id: int, *, lock: bool = False) -> PoolRow | None:
    """Return the row of a pool by its number, or None if it is gone; `lock` locks it until the commit."""
    # Backends whose rows refer to the pool's key may be added meanwhile.
    query = _BY_ID.with_for_update(key_share=True) if lock else _BY_ID
    return read_one(PoolRow, conn.execute(query, {"b_pool": pool_id}).one_or_none())


def create(tx: Transaction, values: Mapping[str, Any]) -> PoolRow:
    """Insert a pool without weights and return its row. `values` are what its manifest decides."""
    fixed = {"uid": str(uuid.uuid4()), "generation": 1, "status": b"{}", "created_at": tx.now}
    return PoolRow(*tx.conn.execute(sa.insert(pools).values(**fixed, **values).returning(pools)).one())


def change(tx: Transaction, pool_id: int, values: Mapping[str, Any]) -> None:
    """Write columns that a spec, a weight update or a pause decides."""
    tx.conn.execute(_UPDATE, {"b_pool": pool_id, **values})
    tx.wake(QUEUE)


def describe(tx: Transaction, pool_id: int, **documents: bytes) -> None:
    """Write the status that a driver reported, or the labels and annotations (`metadata`), as JSON."""
    tx.conn.execute(_UPDATE, {"b_pool": pool_id, **documents})


def remove(tx: Transaction, pool_id: int) -> None:
    """Remove a pool, its backends and the records of its weight updates."""
    for statement in _REMOVE:
        tx.conn.execute(statement, {"b_pool": pool_id})


def backends_of(conn: Connection, pool_id: int, *, lock: bool = False) -> list[BackendRow]:
    """Return the backends of a pool in their order; `lock` locks their rows until the commit."""
    query = _BACKENDS.with_for_update() if lock else _BACKENDS
    return read_all(BackendRow, conn.execute(query, {"b_pool": pool_id}))


def with_pools(conn: Connection, *where: sa.ColumnElement[bool]) -> list[tuple[BackendRow, PoolRow]]:
    """Return backends, each with its pool, that meet conditions on the rows of both."""
    query = sa.select(backends, pools).join_from(backends, pools, pools.c.id == backends.c.pool_id)
    width = len(backends.c)
    rows = conn.execute(query.where(*where)).all()
    return [(BackendRow(*row[:width]), PoolRow(*row[width:])) for row in rows]


def servers(conn: Connection, pool_id: int) -> list[str]:
    """Return the URLs of a pool's backends, in their order."""
    return [row.url for row in backends_of(conn, pool_id)]


def locked_backend(tx: Transaction, pool_id: int, url: str) -> BackendRow | None:
    """Return a backend of a pool, whose row is locked until the commit, or None."""
    rows = tx.conn.execute(_BACKEND.with_for_update(), {"b_pool": pool_id, "b_url": url})
    return read_one(BackendRow, rows.one_or_none())


def backends_of_job(tx: Transaction, job_id: int, url: str) -> list[tuple[BackendRow, str, str]]:
    """Return the locked row of this backend of the job's pool, with the pool's namespace and name, if any."""
    rows = tx.conn.execute(_OF_JOB, {"b_job": job_id, "b_url": url}).all()
    return [(BackendRow(*row[:-2]), row.namespace, row.name) for row in rows]


def add_backends(tx: Transaction, pool_id: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert backends of a pool, all with the same columns. Their circuits are closed."""
    if rows:
        tx.conn.execute(sa.insert(backends), [{"pool_id": pool_id, **row} for row in rows])
        tx.wake(QUEUE, BACKENDS)


def change_backend(tx: Transaction, pool_id: int, url: str, values: Mapping[str, Any]) -> None:
    """Write what was found out about a backend. Without columns nothing is done."""
    if values:
        tx.conn.execute(_UPDATE_BACKEND, {"b_pool": pool_id, "b_url": url, **values})
        tx.wake(QUEUE, *([BACKENDS] if values.get("ready") else []))


def remove_backends(tx: Transaction, pool_id: int, urls: Iterable[str]) -> None:
    """Remove these backends of a pool."""
    ordered = sorted(urls)
    if ordered:
        tx.conn.execute(_REMOVE_BACKENDS, {"b_pool": pool_id, "b_urls": ordered})
        tx.wake(QUEUE)


def reset_failures(tx: Transaction, job_id: int, url: str) -> None:
    """Forget the failures of a backend of the job's pool, unless its circuit has opened."""
    tx.conn.execute(_RESET_FAILURES, {"b_job": job_id, "b_url": url})


class ReportedStats(NamedTuple):
    """What a backend of a pool reports about itself."""

    pool_id: int
    url: str
    stats: bytes | None
    """The values of the server's own metrics as JSON."""
    places: int | None


def put_stats(tx: Transaction, reported: Sequence[ReportedStats], *, places: bool) -> None:
    """Write what backends report about themselves.

    Args:
        places: Whether the places of some have changed, so that more rollouts may be leased.
    """
    rows = [
        {"b_pool": row.pool_id, "b_url": row.url, "stats": row.stats, "places": row.places}
        for row in reported
    ]
    tx.conn.execute(_UPDATE_BACKEND, rows)
    if places:
        tx.wake(QUEUE)


def fold_averages(tx: Transaction, measured: Iterable[MeasuredRuns]) -> None:
    """Fold measurements into the moving averages of the servers, whichever pools they are in."""
    rows = [{"b_now": tx.now, **{f"b_{k}": v for k, v in runs._asdict().items()}} for runs in measured]
    tx.conn.execute(_FOLD, rows)
