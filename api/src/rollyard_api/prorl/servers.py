"""The servers that clients add and clear: the backends of a pool that the ProRL calls make themselves."""

from __future__ import annotations

from functools import partial
from typing import Final

from rollyard_crds.backendpool import BackendPool
from rollyard_inference.capabilities import served_models
from rollyard_inference.errors import BackendError
from sqlalchemy.engine import Connection

from rollyard_api.backends import pools
from rollyard_api.core.problems import ApiError, Conflict, Invalid, NotFound
from rollyard_api.prorl import calls
from rollyard_api.prorl.addresses import server_url
from rollyard_api.prorl.config import ProrlConfig
from rollyard_api.service import ControlPlane
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import PoolRow

PROBE_SECONDS: Final = 10.0


class ServerUnusable(ApiError):
    """A server does not say which model it serves."""

    status = 500
    reason = "ServerUnusable"


async def add(plane: ControlPlane, config: ProrlConfig, address: str) -> str:
    """Add a server to the pool, which is made with the first one, and return its base URL.

    Raises:
        Invalid: The address is refused, or there are as many servers as may be.
        ServerUnusable: The model is not known, and the server does not say it.
        Conflict: Somebody else made a pool of this name.
    """
    url = server_url(address, config.servers)
    known = await plane.database.read(partial(_pool, config=config))
    model = "" if known is not None else config.model or await _model(plane, config, url)
    await plane.database.write(partial(_add, config=config, url=url, model=model))
    return url


async def clear(plane: ControlPlane, config: ProrlConfig) -> None:
    """Remove all servers from the pool. Rollouts wait until there are others."""
    await plane.database.write(partial(_clear, config=config))


def _pool(conn: Connection, config: ProrlConfig) -> PoolRow | None:
    try:
        found = pool_rows.find(conn, config.namespace, config.pool)
    except NotFound:
        return None
    if found.uid != calls.batch(conn, config.namespace).pool_uid:
        raise Conflict(
            f"BackendPool {config.pool!r} in namespace {config.namespace!r} was not made by these calls; "
            "choose another name with the setting 'pool'",
            reason="AlreadyExists",
        )
    return found


async def _model(plane: ControlPlane, config: ProrlConfig, url: str) -> str:
    try:
        found = await served_models(plane.transport, url, PROBE_SECONDS)
    except BackendError as error:
        raise ServerUnusable(f"{url} does not say which model it serves: {error}") from error
    if found is None:
        return str(config.tokenizer)
    if len(found) > 1:
        raise ServerUnusable(
            f"{url} serves {', '.join(sorted(found)[:8])}; choose one with the setting 'model'"
        )
    return next(iter(found))


def _add(tx: Transaction, config: ProrlConfig, url: str, model: str) -> None:
    calls.locked(tx, config.namespace)
    pool = _pool(tx.conn, config)
    if pool is None:
        if not model:
            raise Conflict("the pool was removed at the same time; ask again")
        spec = {
            "model": model,
            "tokenizer": config.tokenizer,
            "engine": {"type": "external", "external": {"urls": [url]}},
            "maxActiveRollouts": config.max_active_rollouts,
        }
        metadata = {"name": config.pool, "namespace": config.namespace}
        pools.create(tx, BackendPool.model_validate({"metadata": metadata, "spec": spec}))
        calls.put_pool(tx, config.namespace, pool_rows.find(tx.conn, config.namespace, config.pool).uid)
        return
    urls = pool_rows.servers(tx.conn, pool.id)
    if url in urls:
        return
    if len(urls) >= config.max_servers:
        text = f"address: there are {len(urls)} servers, and no more may be"
        raise Invalid(text, errors=[text])
    pools.put_servers(tx, pool, [*urls, url])


def _clear(tx: Transaction, config: ProrlConfig) -> None:
    calls.locked(tx, config.namespace)
    pool = _pool(tx.conn, config)
    if pool is not None:
        pools.put_servers(tx, pool, [])
