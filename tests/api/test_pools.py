"""BackendPools: Run leases only where a backend has room; failover; health of external servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from rollyard_api import health

MODEL = "tiny"


def pool(**engine: Any) -> dict[str, Any]:
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "BackendPool",
        "metadata": {"name": "pool"},
        "spec": {"model": MODEL, "maxActiveRollouts": 3, **({"engine": engine} if engine else {})},
    }


async def _report(served: Any, **ready: bool) -> None:
    body = {
        "backends": [
            {"url": f"http://{name}", "ready": up, "policyVersion": "v7"} for name, up in ready.items()
        ]
    }
    answer = await served.driver.put("/v1/backendpools/pool/backends", json=body)
    assert answer.status_code == 200, answer.text


@pytest.fixture
async def worker(served: Any, make_manifest: Any, worker_of: Any) -> Any:
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(4)]}
    spec = {"agent": {"type": "tools"}, "backendRef": {"name": "pool"}, "tasks": tasks, "samplesPerTask": 2}
    answer = await served.admin.post("/v1/rolloutjobs", json=make_manifest(**spec))
    assert answer.status_code == 201, answer.text
    worker = worker_of(served.worker)
    await worker.complete(*[worker.result(lease) for lease in await worker.lease(init=8)])
    return worker


async def test_no_run_without_a_ready_backend(served: Any, worker: Any) -> None:
    assert await worker.lease(run=8) == []
    assert (await served.admin.post("/v1/backendpools", json=pool())).status_code == 201
    assert (await served.admin.post("/v1/backendpools", json=pool())).status_code == 200
    assert await worker.lease(run=8) == []
    await _report(served, a=False)
    waiting = asyncio.create_task(worker.lease(wait=30, run=8))
    await asyncio.sleep(0.05)
    await _report(served, a=True)
    leases = await asyncio.wait_for(waiting, 10)
    assert len(leases) == 3, "no more than maxActiveRollouts"
    assert leases[0]["backend"] == {
        "pool": "pool",
        "url": "http://a",
        "model": MODEL,
        "tokenizer": MODEL,
        "policy_version": "v7",
    }
    assert await worker.lease(run=8) == []
    await worker.complete(worker.result(leases[0]))
    assert len(await worker.lease(run=8)) == 1, "a finished Run gives its place back"


async def test_groups_stay_together_and_load_is_even(served: Any, worker: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool())
    await _report(served, a=True, b=True)
    leases = await worker.lease(run=8)
    load = Counter(lease["backend"]["url"] for lease in leases)
    assert load == {"http://a": 3, "http://b": 3}
    told = (await served.admin.get("/v1/backendpools/pool")).json()["status"]
    assert [b["activeRollouts"] for b in told["backends"]] == [3, 3]
    assert told["readyReplicas"] == 2
    together = Counter(
        len({m["backend"]["url"] for m in leases if m["group_id"] == one["group_id"]}) for one in leases
    )
    assert together[1] >= 4


async def test_failover(served: Any, worker: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool())
    await _report(served, a=True, b=True)
    (lease,) = await worker.lease(run=1)
    mine = lease["backend"]["url"]
    ask = {"rollout": lease["rollout"], "token": lease["token"], "failed_url": mine}
    other = (await served.worker.post("/v1/leases/route", json=ask)).json()["backend"]["url"]
    assert {mine, other} == {"http://a", "http://b"}
    await _report(served, a=False, b=False)
    none = (await served.worker.post("/v1/leases/route", json=ask)).json()
    assert none["backend"] is None
    assert none["retry_after"] > 0
    stale = await served.worker.post("/v1/leases/route", json=ask | {"token": 99})
    assert (stale.status_code, stale.json()["reason"]) == (409, "LeaseLost")


async def test_other_spec_conflicts_and_delete(served: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool())
    other = pool()
    other["spec"]["replicas"] = 2
    assert (await served.admin.post("/v1/backendpools", json=other)).json()["reason"] == "AlreadyExists"
    assert (await served.admin.delete("/v1/backendpools/pool")).status_code == 200
    assert (await served.admin.get("/v1/backendpools/pool")).json()["reason"] == "PoolNotFound"
    assert (await served.admin.post("/v1/rolloutjobs", json=other)).status_code == 422


class FakeServer:
    """A vLLM-compatible server's two calls, answered from memory."""

    def __init__(self) -> None:
        self.health = 200
        self.models = [MODEL]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "down":
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/health":
            return httpx.Response(self.health)
        return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, httpx.AsyncClient]]:
    server = FakeServer()
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as client:
        yield server, client


async def test_health_of_external_servers(served: Any, worker: Any, fake: Any) -> None:
    server, client = fake
    external = pool(type="external", external={"urls": ["http://up/v1", "http://down"]})
    assert (await served.admin.post("/v1/backendpools", json=external)).status_code == 201
    assert await worker.lease(run=1) == []
    await health.check_all(served.plane.database, client)
    backends = (await served.admin.get("/v1/backendpools/pool")).json()["status"]["backends"]
    assert [b["ready"] for b in backends] == [True, False]
    assert "cannot be reached" in backends[1]["message"]
    assert len(await worker.lease(run=1)) == 1
    for change, message in (
        ({"health": 500}, "answered 500"),
        ({"health": 200, "models": ["x"]}, "does not serve"),
    ):
        for name, value in change.items():
            setattr(server, name, value)
        await health.check_all(served.plane.database, client)
        backends = (await served.admin.get("/v1/backendpools/pool")).json()["status"]["backends"]
        assert not backends[0]["ready"]
        assert message in backends[0]["message"]
    refused = await served.driver.put("/v1/backendpools/pool/backends", json={"backends": []})
    assert refused.json()["reason"] == "ExternalPool"
