"""The servers that clients add and clear: the backends of a pool that the ProRL calls make themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from rollyard_crds.backendpool import BackendPool
from rollyard_inference.capabilities import served_models
from rollyard_inference.errors import BackendError
from sqlalchemy.engine import Connection

from rollyard_api.backends import pools
from rollyard_api.core.hosts import address_of
from rollyard_api.core.problems import ApiError, Conflict, Invalid
from rollyard_api.prorl import calls
from rollyard_api.prorl.config import ProrlConfig, ServerRule
from rollyard_api.service import ControlPlane
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import PoolRow

MAX_ADDRESS: Final = 2048
"""The largest number of characters of a server's address."""
PROBE_SECONDS: Final = 10.0


def server_url(address: str, rules: Sequence[ServerRule]) -> str:
    """Return the base URL of a server that a client adds; `HOST:PORT` stands for `http://HOST:PORT`.

    Args:
        address: What the client gives.
        rules: The networks and names that are allowed beside loopback.

    Raises:
        Invalid: This is no address of a server, or one that the installer does not allow.
    """
    text = address.strip()
    if len(text) > MAX_ADDRESS:
        raise _refused(f"must have at most {MAX_ADDRESS} characters")
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _refused("must be a URL such as http://10.0.0.7:8000") from None
    plain = not (parts.query or parts.fragment or parts.username or parts.password is not None)
    if parts.scheme not in ("http", "https") or not host or not plain or re.search(r"[\s\\\x00-\x20]", text):
        raise _refused("must be a URL such as http://10.0.0.7:8000, without a user, a query or a fragment")
    if not _allowed(host, rules):
        raise _refused(
            f"the host {host!r} is neither a loopback address nor allowed by this server's setting 'servers'"
        )
    shown = f"[{host}]" if ":" in host else host
    base = f"{parts.scheme}://{shown}" + ("" if port is None else f":{port}")
    return base + parts.path.rstrip("/").removesuffix("/v1")


def _refused(problem: str) -> Invalid:
    return Invalid.of(f"address: {problem}")


def _allowed(host: str, rules: Sequence[ServerRule]) -> bool:
    address = address_of(host)
    if address is None:
        return host.lower() in {"localhost", *rules}
    return address.is_loopback or any(address in rule for rule in rules if not isinstance(rule, str))


async def add(plane: ControlPlane, config: ProrlConfig, address: str) -> str:
    """Add a server to the pool, which is made with the first one, and return its base URL.

    Raises:
        Invalid: The address is refused, or there are as many servers as may be.
        ApiError: The model is not known, and the server does not say it.
        Conflict: Somebody else made a pool of this name.
    """
    url = server_url(address, config.servers)
    known = await plane.database.read(partial(_pool, config=config))
    model = "" if known is not None else config.model or await _model(plane, config, url)
    await plane.database.write(partial(_add, config=config, url=url, model=model))
    return url


async def clear(plane: ControlPlane, config: ProrlConfig) -> None:
    """Remove all servers from the pool. Rollouts wait until there are others."""

    def change(tx: Transaction) -> None:
        calls.locked(tx, config.namespace)
        pool = _pool(tx.conn, config)
        if pool is not None:
            pools.put_servers(tx, pool, [])

    await plane.database.write(change)


def _pool(conn: Connection, config: ProrlConfig) -> PoolRow | None:
    pool = pool_rows.named(conn, config.namespace, config.pool)
    if pool is not None and pool.uid != calls.batch(conn, config.namespace).pool_uid:
        raise Conflict(
            f"BackendPool {config.pool!r} in namespace {config.namespace!r} was not made by these calls; "
            "choose another name with the setting 'pool'",
            reason="AlreadyExists",
        )
    return pool


async def _model(plane: ControlPlane, config: ProrlConfig, url: str) -> str:
    try:
        models = await served_models(plane.transport, url, PROBE_SECONDS)
    except BackendError as error:
        raise ApiError(f"{url} does not say which model it serves: {error}") from error
    if models is None:
        return str(config.tokenizer)
    if len(models) > 1:
        raise ApiError(f"{url} serves {', '.join(sorted(models)[:8])}; choose one with the setting 'model'")
    return next(iter(models))


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
        created = pool_rows.find(tx.conn, config.namespace, config.pool)
        calls.put(tx, config.namespace, pool_uid=created.uid)
        return
    urls = pool_rows.servers(tx.conn, pool.id)
    if url in urls:
        return
    if len(urls) >= config.max_servers:
        raise _refused(f"there are {len(urls)} servers, and no more may be")
    pools.put_servers(tx, pool, [*urls, url])
