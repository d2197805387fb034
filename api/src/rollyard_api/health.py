"""Health checks of external backends: /health, then the model in /v1/models."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api import pools
from rollyard_api.database import Database
from rollyard_api.schema import backends
from rollyard_api.schema import pools as pools_table

CHECK_TIMEOUT = 5.0
"""Seconds for each of the two requests."""
MAX_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Target:
    """One external backend and what is known of it."""

    pool_id: int
    url: str
    model: str
    ready: bool
    message: str


def _targets(conn: Connection) -> list[Target]:
    rows = conn.execute(
        sa.select(
            backends.c.pool_id, backends.c.url, backends.c.ready, backends.c.message, pools_table.c.model
        )
        .join_from(backends, pools_table, pools_table.c.id == backends.c.pool_id)
        .where(pools_table.c.external.is_(True))
    )
    return [Target(r.pool_id, r.url, r.model, bool(r.ready), r.message) for r in rows]


async def check(client: httpx.AsyncClient, url: str, model: str) -> tuple[bool, str]:
    """Whether the server is healthy and serves the model; and if not, why."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        answer = await client.get(f"{base}/health")
        if answer.status_code != httpx.codes.OK:
            return False, f"GET {base}/health answered {answer.status_code}"
        answer = await client.get(f"{base}/v1/models")
        if answer.status_code != httpx.codes.OK:
            return False, f"GET {base}/v1/models answered {answer.status_code}"
        served = [item["id"] for item in answer.json()["data"]]
    except httpx.HTTPError as error:
        return False, f"{base} cannot be reached: {error or type(error).__name__}"[:1000]
    except (ValueError, KeyError, TypeError):
        return False, f"GET {base}/v1/models answered no list of models"
    if model not in served:
        return False, f"the server does not serve {model!r}; it serves: {', '.join(map(str, served))}"[:1000]
    return True, ""


async def check_all(database: Database, client: httpx.AsyncClient) -> None:
    """Check every external backend once; what changed is written."""
    targets = await database.read(_targets)
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(target: Target) -> None:
        async with places:
            ready, message = await check(client, target.url, target.model)
        if (ready, message) != (target.ready, target.message):
            await database.write(
                lambda tx: pools.mark(tx, target.pool_id, target.url, ready=ready, message=message)
            )

    async with asyncio.TaskGroup() as group:
        for target in targets:
            group.create_task(one(target))
