"""BackendPools: Run leases only where a backend has room; failover; drain; PATCH; external servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from rollyard_api.backends import monitoring
from rollyard_api.service import ControlPlane
from rollyard_api.storage.schema import backends, pools, rollouts
from rollyard_api.weights.coordinator import Coordinator
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience

MODEL = "tiny"


def pool(**engine: Any) -> dict[str, Any]:
    return pool_manifest(
        "pool", {"model": MODEL, "maxActiveRollouts": 3, **({"engine": engine} if engine else {})}
    )


async def _report(served: Any, **ready: bool) -> None:
    body = {
        "backends": [
            {"url": f"http://{name}", "ready": up, "policyVersion": "v7"} for name, up in ready.items()
        ]
    }
    answer = await served.driver.put("/v1/backendpools/pool/backends", json=body)
    assert answer.status_code == 200, answer.text


@pytest.fixture
async def worker(served: Any) -> Any:
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(4)]}
    spec = {"agent": {"type": "tools"}, "backendRef": {"name": "pool"}, "tasks": tasks, "samplesPerTask": 2}
    await served.submit(**spec)
    worker = Worker(served.worker)
    await worker.complete(*[worker.result(lease) for lease in await worker.lease(init=8)])
    return worker


async def test_no_run_without_a_ready_backend(served: Any, worker: Any) -> None:
    assert await worker.lease(run=8) == []
    assert (await served.admin.post("/v1/backendpools", json=pool())).status_code == 201
    assert (await served.admin.post("/v1/backendpools", json=pool())).status_code == 200
    assert await worker.lease(run=8) == []
    await _report(served, a=False)
    waiting = asyncio.create_task(worker.lease(wait=60, run=8))
    await served.until_waiting()
    await _report(served, a=True)
    leases = await asyncio.wait_for(waiting, patience(10))
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
    assert (told["readyReplicas"], told["readyText"]) == (2, "2/1"), "one is wanted, and two are reported"
    together = Counter(
        len({m["backend"]["url"] for m in leases if m["group_id"] == one["group_id"]}) for one in leases
    )
    assert together[1] >= 4


async def test_the_last_rollouts_wait_for_a_much_faster_backend(served: Any, worker: Any) -> None:
    """The measured speeds hold a slow backend back near the end, and keep nothing from the fast one."""
    await served.admin.post("/v1/backendpools", json=pool())
    for name, seconds in (("fast", 0.2), ("slow", 60.0)):
        await _report(served, **{other: other == name for other in ("fast", "slow")})
        (one,) = await worker.lease(run=1)
        assert one["backend"]["url"] == f"http://{name}"
        stats, times = {"sampled_tokens": 400}, {"model_seconds": seconds, "active_seconds": seconds}
        assert await worker.complete(worker.result(one, stats=stats, times=times)) == ["accepted"]
    await _report(served, fast=True, slow=True)

    await served.plane.speeds.write(served.plane.database)
    leases = await worker.lease(run=8)
    assert [one["backend"]["url"] for one in leases] == ["http://fast"] * 3
    assert await worker.lease(run=8) == [], "3 more are waiting, and the slow one is idle"
    assert await worker.complete(*map(worker.result, leases)) == ["accepted"] * 3
    assert [one["backend"]["url"] for one in await worker.lease(run=8)] == ["http://fast"] * 3


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
    """Two calls of a vLLM-compatible server, answered from memory."""

    def __init__(self) -> None:
        self.health = 200
        self.models = [MODEL]
        self.label = "default"
        self.logprob: float | None = -0.5
        self.completions = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "down":
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/health":
            return httpx.Response(self.health)
        if request.url.path == "/weight_info":
            return httpx.Response(200, json={"weight_version": self.label})
        if request.method == "POST":
            if request.url.path == "/inference/v1/abort_requests":  # The probe of generate.
                return httpx.Response(200)
            self.completions += 1
            entry = {"token_id": 7, "logprob": self.logprob}
            choice = {"token_ids": [7], "finish_reason": "length", "logprobs": {"content": [entry]}}
            choice |= {"prompt_token_ids": [1]}
            return httpx.Response(200, json={"choices": [choice]})
        return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, HttpxTransport]]:
    server = FakeServer()
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as client:
        yield server, HttpxTransport(client)


async def test_health_of_external_servers(served: Any, worker: Any, fake: Any) -> None:
    server, transport = fake
    external = pool(type="external", external={"urls": ["http://up/v1", "http://down"]})
    assert (await served.admin.post("/v1/backendpools", json=external)).status_code == 201
    assert await worker.lease(run=1) == []
    await monitoring.check_all(served.plane.database, transport)
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
        await monitoring.check_all(served.plane.database, transport)
        backends = (await served.admin.get("/v1/backendpools/pool")).json()["status"]["backends"]
        assert not backends[0]["ready"]
        assert message in backends[0]["message"]
    refused = await served.driver.put("/v1/backendpools/pool/backends", json={"backends": []})
    assert refused.json()["reason"] == "ExternalPool"


async def _rows(served: Any) -> dict[str, Any]:
    def read(conn: Any) -> dict[str, Any]:
        return {row.url: row for row in conn.execute(sa.select(backends))}

    rows: dict[str, Any] = await served.plane.database.read(read)
    return rows


async def _set(served: Any, table: sa.Table, **values: Any) -> None:
    await served.plane.database.write(lambda tx: tx.conn.execute(sa.update(table).values(**values)))


async def _status(served: Any) -> dict[str, dict[str, Any]]:
    found = (await served.admin.get("/v1/backendpools/pool")).json()["status"]["backends"]
    return {one["url"]: one for one in found}


async def _route(served: Any, lease: dict[str, Any], **fields: Any) -> dict[str, Any]:
    ask = {"rollout": lease["rollout"], "token": lease["token"], "failed_url": lease["backend"]["url"]}
    answer = await served.worker.post("/v1/leases/route", json=ask | fields)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_a_report_keeps_what_is_known(served: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool())
    await _report(served, a=True, b=True)
    await _set(served, backends, speed=123.4, circuit="Open", failures=5, opened_at=1e12, policy_index=3)
    await _report(served, b=True, c=True, a=True)
    rows = await _rows(served)
    kept = {url: (row.position, row.speed, row.circuit, row.policy_index) for url, row in rows.items()}
    assert kept == {
        "http://b": (0, 123.4, "Open", 3),
        "http://c": (1, None, "Closed", 0),
        "http://a": (2, 123.4, "Open", 3),
    }
    await _report(served, c=True)
    assert (await _rows(served)).keys() == {"http://c"}
    await _report(served, a=True)
    assert (await _rows(served))["http://a"].circuit == "Closed", "it came anew"


async def test_a_server_that_begins_is_behind_an_updated_pool(served: Any, worker: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool())
    await _report(served, a=True)
    await _set(served, pools, policy_version="v9", policy_index=2)
    await _set(served, backends, policy_version="v9", policy_index=2, restart_requested=True)
    await _report(served, a=True)
    status = await _status(served)
    assert (status["http://a"]["weights"], status["http://a"]["policyVersion"]) == ("Current", "v9")
    (lease,) = await worker.lease(run=1)
    assert lease["backend"]["policy_version"] == "v9"
    index = await served.plane.database.read(
        lambda conn: conn.scalar(sa.select(rollouts.c.policy_index).where(rollouts.c.id == lease["rollout"]))
    )
    assert index == 2
    for up in (False, True):
        await _report(served, a=up, new=True)
    status = await _status(served)
    assert {one["weights"] for one in status.values()} == {"Stale"}
    assert "pool is at 'v9'" in status["http://a"]["message"]
    assert not status["http://a"]["restartRequested"], "it was restarted"
    assert await worker.lease(run=1) == []
    await _set(served, backends, weights="Updating")
    assert (await _route(served, lease, blame=False))["reason"] == "WeightsUpdating"
    # Only the update itself may set a label between loading and verification.
    body = {"backends": [{"url": "http://x", "ready": True, "policyVersion": "unverified:v9"}]}
    await served.driver.put("/v1/backendpools/pool/backends", json=body)
    assert (await _status(served))["http://x"]["policyVersion"] == ""


async def test_paused_pool_and_adapter_name(served: Any, worker: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool())
    await _report(served, a=True, b=True)
    await _set(served, pools, served_model="adapter")
    (lease,) = await worker.lease(run=1)
    assert lease["backend"]["model"] == "adapter"
    await _set(served, pools, paused=True)
    assert await worker.lease(run=1) == []
    told = await _route(served, lease, blame=False)
    assert (told["backend"], told["reason"]) == (None, "PoolPaused")
    assert (await served.admin.get("/v1/backendpools/pool")).json()["status"]["paused"] is True


async def test_a_draining_backend_gets_no_rollouts_and_keeps_its_own(served: Any, worker: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool())
    await _report(served, a=True, b=True)
    before = await worker.lease(run=2)
    (gone,) = {lease["backend"]["url"] for lease in before}
    (other,) = {"http://a", "http://b"} - {gone}
    body = [{"url": url, "ready": True, "draining": url == gone} for url in (gone, other)]
    await served.driver.put("/v1/backendpools/pool/backends", json={"backends": body})
    status = await _status(served)
    assert (status[gone]["draining"], status[gone]["activeRollouts"]) == (True, 2)
    leases = await worker.lease(run=8)
    assert {lease["backend"]["url"] for lease in leases} == {other}
    assert len(leases) == 3
    told = await _route(served, before[0], blame=False)
    assert (told["backend"], told["reason"]) == (None, "BackendsFull"), "it may go on where it is"
    assert 0 < told["retry_after"] <= 5
    assert await worker.complete(worker.result(before[1])) == ["accepted"], "what runs there ends there"
    await worker.complete(worker.result(leases[0]))
    assert (await _route(served, before[0], blame=False))["backend"]["url"] == other


async def test_nothing_is_lost_when_the_pool_scales_down(served: Any) -> None:
    """Three backends have 60 rollouts; two vanish, and the third has room for one at a time."""
    manifest = pool()
    manifest["spec"]["maxActiveRollouts"] = 20
    await served.admin.post("/v1/backendpools", json=manifest)
    await _report(served, a=True, b=True, c=True)
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(10)]}
    spec = {"agent": {"type": "tools"}, "backendRef": {"name": "pool"}, "tasks": tasks, "samplesPerTask": 8}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(**spec))
    worker = Worker(served.worker)
    for _ in range(2):
        await worker.complete(*[worker.result(lease) for lease in await worker.lease(init=64)])
    held = {lease["rollout"]: lease for lease in await worker.lease(run=64)}
    assert Counter(lease["backend"]["url"] for lease in held.values()) == {
        f"http://{name}": 20 for name in "abc"
    }
    await _report(served, c=True)

    async def load() -> int:
        active: int = (await _status(served))["http://c"]["activeRollouts"]
        assert active <= 20, "over the limit"
        return active

    displaced = [lease for lease in held.values() if lease["backend"]["url"] != "http://c"]
    homes = [lease for lease in held.values() if lease["backend"]["url"] == "http://c"]
    told = await asyncio.gather(*[_route(served, lease) for lease in displaced])
    assert {(one["backend"], one["reason"]) for one in told} == {(None, "BackendsFull")}
    ended = 0
    while displaced or homes:
        assert await load() == 20 or not displaced
        lease = homes.pop()
        assert await worker.complete(worker.result(lease)) == ["accepted"]
        ended += 1
        if displaced:
            assert await worker.lease(run=8) == [], "a place went to the queue before a displaced rollout"
            moving = displaced.pop()
            told_now = await _route(served, moving)
            assert told_now["backend"]["url"] == "http://c"
            repeated = await _route(served, moving)
            assert repeated["backend"]["url"] == "http://c", "the answer was lost: asked again"
            homes.append(moving)
            assert (await _route(served, displaced[-1]))["backend"] is None if displaced else True
    assert ended == 60
    await worker.finish_all()
    counts = (await served.admin.get("/v1/rolloutjobs/job")).json()["status"]["counts"]
    assert (counts["succeeded"], counts["total"]) == (80, 80)


async def test_a_group_moves_together_and_a_failed_attempt_goes_elsewhere(served: Any, worker: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool())
    await served.admin.patch("/v1/backendpools/pool", json={"spec": {"maxActiveRollouts": 50}})
    await _report(served, a=True, b=True, c=True)
    first = await worker.lease(run=2)
    (home,) = {lease["backend"]["url"] for lease in first}
    moved = [(await _route(served, lease))["backend"]["url"] for lease in first]
    assert len(set(moved)) == 1
    assert moved[0] != home
    leases = {lease["rollout"]: lease for lease in await worker.lease(run=6)}
    broken, handed = list(leases.values())[-2:]
    await worker.fail(broken, "ToolError")
    await worker.fail(handed, "WorkerDrained", counts=False)
    again = {lease["rollout"]: lease["backend"]["url"] for lease in await worker.lease(run=8)}
    assert again.keys() == {broken["rollout"], handed["rollout"]}
    assert again[broken["rollout"]] != broken["backend"]["url"], "sent back to where it failed"
    assert again[handed["rollout"]] == handed["backend"]["url"], "its cache is there"


async def test_patch(served: Any) -> None:
    await served.admin.post("/v1/backendpools", json=pool(type="embedded", args=["--seed", "1"]))
    url = "/v1/backendpools/pool"
    changes = {"replicas": 3, "maxActiveRollouts": 7, "engine": {"env": {"A": "1"}, "args": None}}
    answer = await served.driver.patch(url, json={"spec": changes})
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert document["metadata"]["generation"] == 2
    assert document["spec"]["replicas"] == 3
    assert document["spec"]["maxActiveRollouts"] == 7
    assert document["spec"]["engine"]["env"] == {"A": "1"}
    assert not document["spec"]["engine"].get("args")
    again = await served.admin.patch(url, json={"spec": changes})
    assert again.json()["metadata"]["generation"] == 2, "nothing changed"
    for wrong, name in (
        ({"model": "other"}, "spec.model"),
        ({"tokenizer": "/elsewhere"}, "spec.tokenizer"),
        ({"engine": {"type": "vllm"}}, "spec.engine.type"),
        ({"placement": "slurm"}, "spec.placement"),
        ({"replicas": -1}, "spec.replicas"),
        ({"replicaz": 1}, "spec.replicaz"),
        ({"engine": {"external": {"urls": ["http://a"]}}}, "spec.engine"),
        ({"model": None}, "spec.model"),
    ):
        refused = await served.admin.patch(url, json={"spec": wrong})
        assert refused.status_code == 422, wrong
        assert refused.json()["errors"][0].startswith(name), refused.text
    assert (await served.admin.patch(url, json={"metadata": {}})).status_code == 422
    assert (await served.admin.patch("/v1/backendpools/no", json={"spec": {}})).status_code == 404
    assert (await served.worker.patch(url, json={"spec": {}})).status_code == 403
    assert (await served.admin.get(url)).json()["spec"] == document["spec"], "a refusal changes nothing"


async def test_patch_of_external_urls(
    served: Any, worker: Any, engine: str, scripted: Any, transport: Any
) -> None:
    other = await scripted()
    external = pool(type="external", external={"urls": [engine]})
    await served.admin.post("/v1/backendpools", json=external)
    await monitoring.check_all(served.plane.database, transport)
    await _set(served, backends, speed=50.0)
    leases = await worker.lease(run=2)
    assert {lease["backend"]["url"] for lease in leases} == {engine}

    async def put(*urls: str) -> Any:
        spec = {"engine": {"external": {"urls": list(urls)}}}
        return await served.admin.patch("/v1/backendpools/pool", json={"spec": spec})

    assert (await put()).status_code == 422
    assert (await put(other.url, engine)).status_code == 200
    status = await _status(served)
    assert [(one["ready"], one.get("tokensPerSecond")) for one in status.values()] == [
        (False, None),
        (True, 50.0),
    ]
    scaled = await served.admin.patch("/v1/backendpools/pool", json={"spec": {"replicas": 5}})
    assert "engine.external.urls" in scaled.json()["detail"]
    await monitoring.check_all(served.plane.database, transport)
    await put(other.url)
    assert (await _route(served, leases[0]))["backend"]["url"] == other.url


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"health": 503}, "/health answered 503"),
        ({"models": {"data": [{"id": "other-model"}]}}, "does not serve 'tiny'; it serves: other-model"),
        ({"models": {"data": "x"}}, "no list of models"),
        ({"mode": "garbage"}, "its first request failed"),
        ({"mode": "no-logprobs"}, "its first request failed"),
        ({"mode": "429"}, "answered 429"),
        ({"mode": "cut"}, "cannot be reached"),
    ],
)
async def test_first_check_of_an_external_server(
    change: dict[str, Any], says: str, scripted: Any, transport: Any
) -> None:
    server = await scripted()
    for name, value in change.items():
        setattr(server, name, value)
    found = await monitoring.check(transport, server.url, MODEL, warm=False)
    assert not found.ready
    assert says in found.message


@pytest.fixture
def no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the control plane neither check servers nor bring weights to them by itself.

    A check may write what it saw before a change of the test, and the coordinator may act between two changes
    that belong together.
    """

    async def idle(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(ControlPlane, "check_health", idle)
    monkeypatch.setattr(Coordinator, "round", idle)


@pytest.mark.usefixtures("no_rounds")
async def test_an_external_servers_label(
    served: Any, worker: Any, scripted: Any, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart is noticed by the label, without any check that failed."""
    # A machine that stands still for seconds makes no check of this test fail.
    monkeypatch.setattr(monitoring, "CHECK_TIMEOUT", 30.0)
    server = await scripted()
    await served.admin.post(
        "/v1/backendpools", json=pool(type="external", external={"urls": [server.url, "http://["]})
    )

    async def check() -> dict[str, Any]:
        await monitoring.check_all(served.plane.database, transport)
        return (await _status(served))[server.url]

    first = await check()
    assert (first["ready"], first["policyVersion"], first["weights"]) == (True, "default", "Current")
    assert server.completions == 1, "ready only after a first request"
    server.label = "unverified:v2"
    await _set(served, pools, policy_version="v1", policy_index=1)
    await _set(served, backends, policy_version="v1", policy_index=1)
    other = await check()
    assert (other["ready"], other["policyVersion"]) == (True, "v1"), other["message"]
    server.label = "v1"
    assert (await check())["weights"] == "Current"
    server.label = "default"
    again = await check()
    assert (again["ready"], again["policyVersion"], again["weights"]) == (True, "default", "Stale")
    assert await worker.lease(run=1) == []
    assert server.completions == 1
    server.label = None
    await _set(served, backends, weights="Current", policy_version="v1", policy_index=1)
    assert (await check())["weights"] == "Current", "it has no label any more, and never stopped"
    server.health = 500
    assert not (await check())["ready"]
    server.health = 200
    assert (await check())["weights"] == "Stale", "nobody can say whether it began anew"
    assert not (await _status(served))["http://["]["ready"]
