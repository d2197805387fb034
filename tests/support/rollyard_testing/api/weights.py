"""Pools whose weights are updated in the tables alone, and sources of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import sqlalchemy as sa
from rollyard_api.storage.rows import WeightUpdateRow
from rollyard_api.storage.schema import backends, weight_updates
from rollyard_api.storage.schema import pools as pools_table
from rollyard_api.weights import records
from rollyard_api.weights.steps import BackendTarget
from sqlalchemy.engine import Connection

from rollyard_testing.manifests import pool_manifest
from rollyard_testing.waiting import eventually

FULL, NEXT = {"checkpoint": {"path": "/full"}}, {"checkpoint": {"path": "/next"}}
ONE, TWO = ({"lora": {"name": name, "path": f"/{name}"}} for name in ("one", "two"))
PUSHED = {"pushed": True}
"""Sources of weights."""


async def backends_of(admin: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Return the backends of the pool `p`."""
    backends: list[dict[str, Any]] = (await admin.get("/v1/backendpools/p")).json()["status"]["backends"]
    return backends


async def until_backends(admin: httpx.AsyncClient, condition: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Wait until a condition holds for the backends of the pool `p`."""

    async def holds() -> bool:
        return bool(condition(await backends_of(admin)))

    await eventually(holds)


def _row(conn: Connection, number: int) -> WeightUpdateRow:
    return WeightUpdateRow(
        *conn.execute(sa.select(weight_updates).where(weight_updates.c.id == number)).one()
    )


class Pools:
    """Two pools, `p` and `q`, of the same five servers."""

    def __init__(self, served: Any) -> None:
        self.served, self.urls = served, [f"http://s{number}" for number in range(1, 6)]

    async def make(self) -> None:
        for name in "pq":
            manifest = pool_manifest(name, {"model": "m", "engine": {"type": "vllm"}})
            assert (await self.served.admin.post("/v1/backendpools", json=manifest)).status_code == 201
            body = {"backends": [{"url": url, "ready": True} for url in self.urls]}
            answer = await self.served.driver.put(f"/v1/backendpools/{name}/backends", json=body)
            assert answer.status_code == 200, answer.text

    async def post(self, version: str, source: dict[str, Any], pool: str = "p", **fields: Any) -> Any:
        body = {"policyVersion": version, "source": source, "inFlight": "restart", **fields}
        return await self.served.admin.post(f"/v1/backendpools/{pool}/weights", json=body)

    async def begin(self, version: str, source: dict[str, Any], pool: str = "p") -> int:
        answer = await self.post(version, source, pool)
        assert answer.status_code == 202, answer.text
        number: int = answer.json()["id"]
        return number

    async def update(self, number: int, pool: str = "p") -> dict[str, Any]:
        found: dict[str, Any] = (
            await self.served.admin.get(f"/v1/backendpools/{pool}/weights/{number}")
        ).json()
        return found

    async def status(self, pool: str = "p") -> dict[str, Any]:
        found: dict[str, Any] = (await self.served.admin.get(f"/v1/backendpools/{pool}")).json()["status"]
        return found

    async def index(self, number: int) -> int:
        query = sa.select(weight_updates.c.policy_index).where(weight_updates.c.id == number)
        found: int = await self.served.plane.database.read(lambda conn: conn.scalar(query))
        return found

    async def set(self, pool: str, url: str, **values: Any) -> None:
        """Set columns of a backend."""
        ids = sa.select(pools_table.c.id).where(pools_table.c.name == pool).scalar_subquery()
        change = sa.update(backends).where(backends.c.pool_id == ids, backends.c.url == url).values(**values)
        await self.served.plane.database.write(lambda tx: tx.conn.execute(change) and None)

    async def step(self, number: int, url: str, **values: Any) -> None:
        """Set a backend's part of an update."""

        def change(tx: Any) -> None:
            records.note(tx, _row(tx.conn, number), url, **values)

        await self.write(change)

    async def target(self, url: str) -> BackendTarget:
        """Return what the coordinator reads of a backend of `p`."""
        targets: list[BackendTarget]
        targets, _ = await self.served.plane.database.read(records.targets)
        return next(one for one in targets if one.key == (1, url))

    async def record(self, operation: Callable[..., None], target: BackendTarget, **values: Any) -> None:
        """Record something of a backend, as the owner of its update does."""
        await self.write(records.as_owner, name="me", target=target, operation=operation, **values)

    async def write(self, op: Callable[..., Any], **values: Any) -> None:
        await self.served.plane.database.write(partial(op, **values))

    async def settle(self, pool: int = 1) -> None:
        await self.write(records.settle, pool_id=pool)

    async def succeed(self, number: int) -> None:
        """Let every backend have the weights."""
        index = await self.index(number)
        version = (await self.update(number))["policyVersion"]
        for url in self.urls:
            await self.set("p", url, policy_index=index, policy_version=version, weights="Current")
            await self.step(number, url, step="Done", verified=True)
        await self.settle()
        assert (await self.update(number))["state"] == "Succeeded"

    async def refuse(self, number: int, url: str = "", **values: Any) -> None:
        """Refuse the weights of the update that is wanted."""
        target = await self.target(url or self.urls[0])
        assert target.update is not None
        assert target.update.id == number
        await self.record(records.refuse, target, message="wrong", **values)
