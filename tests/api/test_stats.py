"""What backends report about themselves, and how fast rollouts find them."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_api.backends import monitoring
from rollyard_api.backends.monitoring import MIN_TOKENS, WINDOW_SECONDS, Poller, Speeds, Window
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.crds.segments import reported
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.waiting import eventually


@given(
    st.lists(st.tuples(st.floats(0, 200), st.integers(0, 1000), st.floats(0, 1), st.booleans()), max_size=40)
)
def test_the_window_against_a_plain_sum(steps: list[tuple[float, int, float, bool]]) -> None:
    """The window gives the growth of the last minutes, whatever restarts lie between."""
    window, now, queries, hits = Window(), 0.0, 0, 0
    window.add(0.0, 0, 0)
    grown: list[tuple[float, int, int]] = []
    for seconds, asked, share, restarted in steps:
        now += seconds
        if restarted:
            queries = hits = 0
            window.add(now, 0, 0)
        found = int(asked * share)
        queries, hits = queries + asked, hits + found
        window.add(now, queries, hits)
        grown.append((now, asked, found))
    recent = [(asked, found) for at, asked, found in grown if at > now - WINDOW_SECONDS]
    total = sum(asked for asked, _ in recent)
    if total == 0:
        assert window.rate is None
    else:
        assert window.rate == pytest.approx(sum(found for _, found in recent) / total)


def test_a_restart_that_was_not_seen_at_zero() -> None:
    window = Window()
    window.add(0.0, 1000, 900)
    assert window.rate is None, "what was before it was looked at is not of the last minutes"
    window.add(1.0, 100, 20)
    assert window.rate == pytest.approx(0.2)


def test_only_material_changes_are_written() -> None:
    one = {"runningRequests": 1, "prefixCacheHitRate": 0.5}
    assert not monitoring.material(one, one | {"prefixCacheHitRate": 0.502})
    assert monitoring.material(one, one | {"prefixCacheHitRate": 0.51})
    assert monitoring.material(one, one | {"runningRequests": 2})
    assert monitoring.material(None, one)
    assert monitoring.material(one, None)
    assert monitoring.material(one, {"runningRequests": 1})
    assert not monitoring.material(None, None)


POOL = pool_manifest("pool", {"model": "tiny"})


async def _status(served: Any) -> dict[str, dict[str, Any]]:
    found = (await served.admin.get("/v1/backendpools/pool")).json()["status"]["backends"]
    return {one["url"]: one for one in found}


async def test_a_real_engines_metrics(
    served: Any, engine: str, scripted: Any, http: httpx.AsyncClient, transport: HttpxTransport
) -> None:
    hanging, foreign = await scripted(), await scripted()
    hanging.metrics = "x" * (9 << 20)
    foreign.metrics = "up 1\n"
    await served.admin.post("/v1/backendpools", json=POOL)
    await served.report_backends(engine, hanging.url, foreign.url, "http://[")
    poller, database = Poller(), served.plane.database
    await poller.poll(database, transport)
    prompt = random.choices(range(100, 1000), k=300)  # Other tests use the engine, too.
    for _ in range(4):
        body = {"prompt": prompt, "max_tokens": 2, "model": "tiny", "return_token_ids": True}
        answer = await http.post(f"{engine}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        prompt += [*answer.json()["choices"][0]["token_ids"], 7, 8]
    await poller.poll(database, transport)
    status = await _status(served)
    mine = status[engine]
    assert (mine["runningRequests"], mine["waitingRequests"]) == (0, 0)
    assert 0.7 <= mine["prefixCacheHitRate"] <= 0.75, "three of four prompts were in its cache"
    for other in (hanging.url, foreign.url, "http://["):
        assert "runningRequests" not in status[other]
    text = (await served.admin.get("/metrics")).text
    label = f'backend="{engine}",namespace="default",pool="pool"'
    for name, value in (
        ("ready", 1.0),
        ("active_rollouts", 0.0),
        ("max_active_rollouts", 256.0),
        ("waiting_requests", 0.0),
        ("prefix_cache_hit_ratio", mine["prefixCacheHitRate"]),
        ("circuit_closed", 1.0),
        ("weights_current", 1.0),
    ):
        assert f"rollyard_backend_{name}{{{label}}} {value}" in text, name
    assert f'rollyard_backend_waiting_requests{{backend="{foreign.url}"' not in text
    assert "trains" not in mine, "it was not asked yet"
    await poller.assess(database, transport)
    await poller.poll(database, transport)
    status = await _status(served)
    assert status[engine]["trains"] == "yes"
    lacks = "no calls for pauses and weights (VLLM_SERVER_DEV_MODE=1 in its environment)"
    assert status[foreign.url]["trains"] == f"no: {lacks}"
    assert "trains" not in status["http://["]
    writes: list[Any] = []
    real = database.write

    async def counted(op: Any, **durable: bool) -> Any:
        writes.append(op)
        return await real(op, **durable)

    database.write = counted
    for _ in range(3):
        await poller.poll(database, transport)
    assert writes == [], "nothing changed"
    await served.report_backends(engine, ready=False)
    await poller.poll(database, transport)
    gone = (await _status(served))[engine]
    assert {"runningRequests", "trains"}.isdisjoint(gone), "old numbers of a server that is gone"


async def test_a_server_is_asked_once_what_it_lacks_and_not_while_it_is_paused(
    served: Any, scripted: Any, transport: HttpxTransport
) -> None:
    server = await scripted()
    await served.admin.post("/v1/backendpools", json=POOL)
    await served.report_backends(server.url)
    poller, database = Poller(), served.plane.database
    paused = await served.admin.post("/v1/backendpools/pool/pause", params={"wait": 0})
    assert paused.status_code == 202, "this server has no pause, so waiting for it would take the whole time"
    before = server.completions
    await poller.assess(database, transport)
    assert server.completions == before, "a paused pool is not sampled from"
    assert (await served.admin.post("/v1/backendpools/pool/resume")).status_code < 300
    await poller.assess(database, transport)
    asked = server.completions
    assert asked > before
    await poller.assess(database, transport)
    assert server.completions == asked, "the answer holds for some minutes"


async def _runs(served: Any, worker: Any, **fields: Any) -> None:
    for lease in await worker.lease(run=2):
        await worker.complete(worker.result(lease, **fields))
    await served.plane.speeds.write(served.plane.database)


async def test_speed_is_measured(served: Any) -> None:
    await served.admin.post("/v1/backendpools", json=POOL)
    await served.report_backends("http://a")
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(20)]}
    spec = {"agent": {"type": "tools"}, "backendRef": {"name": "pool"}, "tasks": tasks}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(**spec))
    worker = Worker(served.worker)
    await worker.complete(*[worker.result(lease) for lease in await worker.lease(init=20)])

    async def speed() -> float | None:
        return (await _status(served))["http://a"].get("tokensPerSecond")

    await _runs(served, worker, stats={"sampled_tokens": MIN_TOKENS - 1}, times={"model_seconds": 9.0})
    await _runs(served, worker, stats={"sampled_tokens": 1000}, times={})
    assert await speed() is None, "too little to tell"
    await _runs(served, worker, stats={"sampled_tokens": 1000}, times={"model_seconds": 10.0})
    assert await speed() == 100.0
    await _runs(
        served,
        worker,
        stats={"sampled_tokens": 1000, "discarded_tokens": 1000, "requests": 4},
        times={"model_seconds": 10.0},
    )
    assert await speed() == pytest.approx(100 + 100 * (1 - 0.9**2)), "what was thrown away took its time too"
    before = await speed()
    (lease,) = await worker.lease(run=1)
    ask = {"rollout": lease["rollout"], "token": lease["token"], "failed_url": "http://a"}
    await served.report_backends("http://a", "http://b")
    moved = (await served.worker.post("/v1/leases/route", json=ask)).json()["backend"]["url"]
    assert moved == "http://b"
    slow = worker.result(lease, stats={"sampled_tokens": 100}, times={"model_seconds": 300.0})
    assert await worker.complete(slow) == ["accepted"]
    await served.plane.speeds.write(served.plane.database)
    status = await _status(served)
    assert "tokensPerSecond" not in status["http://b"], "the failed backend's time is not its own"
    assert await speed() == before
    (lease,) = await worker.lease(run=1)
    body = {"worker": "w", "results": [reported(worker.result(lease, stats={"sampled_tokens": -1}))]}
    refused = await served.worker.post("/v1/leases/complete", json=body)
    assert refused.status_code == 422
    assert refused.json()["errors"][0].startswith("results[0].stats.sampled_tokens")


def test_speeds_leave_out_what_is_no_number() -> None:
    speeds = Speeds()
    for seconds in (0.0, float("nan"), float("inf"), -1.0):
        speeds.add([("a", 100, seconds, 5.0)])
    assert speeds.take() == []
    speeds.add([("b", 100, 1.0, 3.0)], {"b": 8})
    speeds.add([("b", 300, 1.0, 5.0), ("a", 100, 2.0, 1.0)], {"b": 4})
    a, b = speeds.take()
    assert (a.url, a.speed, b.url, b.speed) == ("a", 50.0, "b", 200.0)
    assert (b.pace, b.pace_seconds, b.pace_load) == (50.0, 4.0, 6.0), "tools and all"
    assert (a.pace, a.pace_load) == (50.0, 1.0), "no Run is shorter than its model time"
    assert speeds.take() == []


CACHE = 'vllm:cache_config_info{engine="0",kv_cache_size_tokens="%d"} 1.0\n'
CARD = {"data": [{"id": "tiny", "max_model_len": 40_960}]}


async def test_places_follow_from_the_kv_cache_of_each_backend(
    served: Any, scripted: Any, transport: HttpxTransport
) -> None:
    large, small, silent = await scripted(), await scripted(), await scripted()
    for server, tokens in ((large, 750_000), (small, 122_880)):
        server.models, server.metrics = CARD, CACHE % tokens
    urls = [large.url, small.url, silent.url]
    await served.admin.post("/v1/backendpools", json=POOL)
    # The control plane asks at once, though the tests' one looks at metrics only once an hour otherwise.
    await served.report_backends(*urls)

    async def limits() -> list[int]:
        status = await _status(served)
        return [status[url]["maxActiveRollouts"] for url in urls]

    async def are(*expected: int) -> bool:
        await Poller().poll(served.plane.database, transport)
        return await limits() == [*expected]

    await eventually(lambda: are(73, 12, 256))
    status = await _status(served)
    assert (status[small.url]["contextTokens"], status[small.url]["kvCacheTokens"]) == (40_960, 122_880)
    # A server that was started again is asked again.
    small.metrics = CACHE % 204_800
    await served.report_backends(large.url, silent.url)
    await served.report_backends(*urls)
    await eventually(lambda: are(73, 20, 256))
    # One that does not answer once keeps its number.
    small.metrics = "x" * (9 << 20)
    assert await are(73, 20, 256)
    await served.admin.patch("/v1/backendpools/pool", json={"spec": {"maxActiveRollouts": 5}})
    assert await limits() == [5, 5, 5], "the pool's own comes first"


async def test_no_more_rollouts_are_leased_than_the_kv_cache_has_room_for(
    served: Any, scripted: Any, transport: HttpxTransport
) -> None:
    server = await scripted()
    server.models, server.metrics = CARD, CACHE % 122_880
    await served.admin.post("/v1/backendpools", json=POOL)
    await served.report_backends(server.url)

    async def asked() -> bool:
        await Poller().poll(served.plane.database, transport)
        return (await _status(served))[server.url]["maxActiveRollouts"] == 12

    await eventually(asked)
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(30)]}
    spec = {"agent": {"type": "tools"}, "backendRef": {"name": "pool"}, "tasks": tasks}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(**spec))
    worker = Worker(served.worker)
    await worker.complete(*[worker.result(lease) for lease in await worker.lease(init=30)])
    body = {"worker": "w", "node": "n", "capacity": {"run": 30}, "job": "job", "namespace": "default"}
    answer = (await served.worker.post("/v1/leases", json=body)).json()
    assert (len(answer["leases"]), answer["places"]) == (12, 12)
    empty = (await served.worker.post("/v1/leases", json=body)).json()
    assert (empty["leases"], empty["places"]) == ([], 12), "known while all are taken, too"


async def test_nothing_bounds_the_run_of_a_job_without_a_pool(served: Any) -> None:
    await served.submit()
    body = {"worker": "w", "node": "n", "capacity": {"run": 1}, "job": "job", "namespace": "default"}
    assert (await served.worker.post("/v1/leases", json=body)).json()["places"] == 4096
