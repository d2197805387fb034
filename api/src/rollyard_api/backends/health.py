"""Health checks of external backends: /health, the model in /v1/models, a first request, the version."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Final

from rollyard_crds.weights import UNVERIFIED
from rollyard_inference import health as inference
from rollyard_inference.errors import BackendError
from rollyard_inference.transports.interface import Transport

from rollyard_api.backends import pools
from rollyard_api.backends.pools import Seen
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Database
from rollyard_api.storage.rows import BackendRow
from rollyard_api.storage.schema import backends
from rollyard_api.storage.schema import pools as pools_table

CHECK_TIMEOUT: Final = 5.0
"""The time limit for each request except the first completion, in seconds."""
FIRST_REQUEST_SECONDS: Final = 30.0
"""The time limit for a server's first completion, in seconds.

The server may compile kernels for it. A later round tries again.
"""
MAX_AT_ONCE: Final = 32


async def check(transport: Transport, url: str, model: str, *, warm: bool) -> Seen:
    """Check whether the server is healthy, serves the model and samples, and if not, why.

    Args:
        warm: Whether the server has answered a first request before, so that it need not be repeated.
    """
    try:
        await inference.check_alive(transport, url, CHECK_TIMEOUT)
        await inference.check_model(transport, url, model, CHECK_TIMEOUT)
    except BackendError as error:
        return Seen(False, str(error)[:1000])
    if not warm:
        try:
            await inference.first_request(transport, url, model, FIRST_REQUEST_SECONDS)
        except BackendError as error:
            return Seen(False, f"its first request failed: {error}"[:1000])
    return Seen(True, "", await _label(transport, url))


async def _label(transport: Transport, url: str) -> str | None:
    try:
        label = await inference.weight_label(transport, url, CHECK_TIMEOUT)
    except BackendError:
        return None
    # A label between loading and verification concerns only the weight update.
    return None if label is None or label.startswith(UNVERIFIED) else label[:128]


async def check_all(database: Database, transport: Transport, *, ready: bool | None = None) -> None:
    """Check each external backend once and write the changes; `ready` selects those that are (not) ready."""
    where = [pools_table.c.external.is_(True)]
    if ready is not None:
        where.append(backends.c.ready.is_(ready))
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(row: BackendRow, model: str) -> None:
        before = Seen.of(row)
        async with places:
            after = await check(transport, row.url, model, warm=row.ready)
        label = row.policy_version if after.policy_version is None else after.policy_version
        if replace(after, policy_version=label) != before:
            write = partial(pools.mark, pool_id=row.pool_id, url=row.url, before=before, after=after)
            await database.write(write)

    async with asyncio.TaskGroup() as group:
        for row, pool in await database.read(lambda conn: pool_rows.with_pools(conn, *where)):
            group.create_task(one(row, pool.model))
