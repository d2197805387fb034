"""Circuits: the state machine alone, and on servers that hang, lie, cut off or are too busy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from rollyard_api.backends import circuits
from rollyard_api.backends.circuits import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STUCK_SECONDS,
    THRESHOLD,
    Breaker,
)
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import backends
from rollyard_inference.errors import BackendError, BackendUnavailable, ModelNotServed
from rollyard_inference.health import first_request
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

EVENTS = st.lists(
    st.sampled_from(["fail", "complete", "probe-ok", "probe-bad", "wait", "restart"]), max_size=60
)


@given(EVENTS)
def test_the_machine(events: list[str]) -> None:
    """The machine is compared with a model: failures since the last completion, and how the last opening
    ended.
    """
    breaker, now, in_a_row = Breaker(), 0.0, 0
    probation = False
    for event in events:
        before = breaker
        if event == "wait":
            now += 1.0
        elif event == "fail":
            breaker = breaker.failed(now)
            if before.circuit == "Closed":
                in_a_row += 1
                opens = probation or in_a_row >= THRESHOLD
                assert (breaker.circuit == "Open") == opens
                if opens:
                    assert breaker.due_in(now) == breaker.pause >= FIRST_PAUSE
                    assert not probation or breaker.pause > FIRST_PAUSE, "it flaps at full speed"
            else:
                assert breaker == before, "what failed before the circuit opened changes nothing"
        elif event == "complete":
            breaker = breaker.completed()
            if before.circuit == "Closed":
                in_a_row, probation = 0, False
            else:
                assert breaker == before
        elif event == "restart":
            breaker = breaker.restarted(now)
            assert breaker.circuit == "Closed" or breaker.due_in(now) == 0
        elif (due := breaker.due_in(now)) is not None:
            now += due
            assert breaker.due_in(now) == 0
            breaker = breaker.probing(now)
            assert breaker.due_in(now) == STUCK_SECONDS
            paused = breaker.pause
            breaker = breaker.probed(event == "probe-ok", now)
            if event == "probe-ok":
                assert (breaker.circuit, breaker.due_in(now)) == ("Closed", None)
                probation = True
            else:
                assert breaker.due_in(now) == min(2 * paused, LONGEST_PAUSE)
        assert breaker.circuit != "Closed" or breaker.opened_at is None


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("ok", None),
        ("completions-only", None),
        ("sglang", None),
        ("garbage", "is not JSON"),
        ("no-logprobs", "logprobs is missing"),
        ("too-few", "1 token_ids but 0 logprobs"),
        ("nan", "expected a number"),
        ("two-tokens", "2 tokens sampled, max_tokens was 1"),
        ("empty", "no token sampled"),
        ("500", "answered 500"),
        ("429", "answered 429"),
        ("hang", "no answer within"),
        ("cut", "cannot be reached"),
        ("endless", "is longer than"),
        ("wrong-model", "/inference/v1/generate answered 404: The model `tiny` does not exist"),
    ],
)
async def test_the_probe_is_a_real_request(
    mode: str, says: str | None, scripted: Any, transport: Any
) -> None:
    server = await scripted()
    server.mode = mode
    asked = first_request(transport, server.url, "tiny", 5.0 if mode != "hang" else 0.3)
    if says is None:
        assert await asked == "default"
    else:
        with pytest.raises(BackendError) as caught:
            await asked
        assert says in str(caught.value)


async def test_a_real_engine_answers_the_probe(engine: str, transport: Any) -> None:
    assert await first_request(transport, engine, "tiny", 20.0) == "0"
    assert await first_request(transport, f"{engine}/v1/", "tiny", 20.0) == "0", "however the URL is written"
    with pytest.raises(ModelNotServed, match="other"):
        await first_request(transport, engine, "other", 20.0)
    with pytest.raises(BackendUnavailable, match="cannot be reached"):
        await first_request(transport, "http://[", "tiny", 1.0)


class Pool:
    """A pool of two scripted servers, and rollouts on it."""

    def __init__(self, served: Any, worker: Any, servers: list[Any]) -> None:
        self.served, self.worker, self.servers = served, worker, servers

    async def report(self, *servers: Any) -> None:
        await self.served.report_backends(*[one.url for one in servers])

    async def lease(self, n: int = 1) -> list[dict[str, Any]]:
        leases: list[dict[str, Any]] = await self.worker.lease(run=n)
        return leases

    async def route(self, lease: dict[str, Any], url: str, **fields: Any) -> dict[str, Any]:
        ask = {"rollout": lease["rollout"], "token": lease["token"], "failed_url": url, **fields}
        answer = await self.served.worker.post("/v1/leases/route", json=ask)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def status(self) -> dict[str, dict[str, Any]]:
        found = (await self.served.admin.get("/v1/backendpools/pool")).json()["status"]["backends"]
        return {one["url"]: one for one in found}

    async def circuits(self) -> list[str]:
        status = await self.status()
        return [status[server.url]["circuit"] for server in self.servers]

    async def later(self, seconds: float) -> None:
        """Continue as if so much time had passed since the circuits opened."""

        def op(tx: Transaction) -> None:
            tx.conn.execute(sa.update(backends).values(opened_at=backends.c.opened_at - seconds))

        await self.served.plane.database.write(op)

    async def open(self, server: Any) -> dict[str, Any]:
        """Let rollouts fail there until the circuit is open, and return one that is still there."""
        mine = await self.on(server, THRESHOLD + 1)
        for lease in mine[:THRESHOLD]:
            await self.route(lease, server.url)
        return mine[THRESHOLD]

    async def on(self, server: Any, n: int) -> list[dict[str, Any]]:
        """Lease rollouts until n are on this server, and return their leases."""
        mine: list[dict[str, Any]] = []
        while len(mine) < n:
            leases = await self.lease()
            assert leases, "no rollout waits any more"
            mine += [one for one in leases if one["backend"]["url"] == server.url]
        return mine


@pytest.fixture
async def pooled(served: Any, scripted: Any) -> Pool:
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(8)]}
    spec = {"agent": {"type": "tools"}, "backendRef": {"name": "pool"}, "tasks": tasks, "samplesPerTask": 2}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(**spec))
    worker = Worker(served.worker)
    await worker.complete(*[worker.result(lease) for lease in await worker.lease(init=16)])
    manifest = pool_manifest("pool", {"model": "tiny"})
    assert (await served.admin.post("/v1/backendpools", json=manifest)).status_code == 201
    pool = Pool(served, worker, [await scripted(), await scripted()])
    await pool.report(*pool.servers)
    return pool


async def test_failures_open_a_circuit_and_a_real_request_closes_it(pooled: Pool, transport: Any) -> None:
    database = pooled.served.plane.database
    a, b = pooled.servers
    for n, lease in enumerate(await pooled.on(a, THRESHOLD), 1):
        told = await pooled.route(lease, a.url, error="ConnectError")
        assert told["backend"]["url"] == b.url
        assert await pooled.circuits() == [("Open" if n == THRESHOLD else "Closed"), "Closed"]
    leases = await pooled.lease(6)
    assert {one["backend"]["url"] for one in leases} == {b.url}
    for mode, pause in (("garbage", FIRST_PAUSE), ("500", 2 * FIRST_PAUSE), ("cut", 4 * FIRST_PAUSE)):
        a.mode = mode
        asked = a.completions
        await pooled.later(pause - 0.5)
        await circuits.probe_all(database, transport)
        assert a.completions == asked, "the pause is doubled"
        await pooled.later(1.0)
        await circuits.probe_all(database, transport)
        assert a.completions == asked + 1
        assert await pooled.circuits() == ["Open", "Closed"], mode
    a.mode = "ok"
    await pooled.later(LONGEST_PAUSE)
    asked = a.completions
    await asyncio.gather(*[circuits.probe_all(database, transport) for _ in range(4)])
    assert a.completions == asked + 1, "of several control planes one probes"
    assert await pooled.circuits() == ["Closed", "Closed"]
    assert a.url in {one["backend"]["url"] for one in await pooled.lease(6)}


async def test_on_probation_until_a_rollout_completes(pooled: Pool, transport: Any) -> None:
    database, (a, b) = pooled.served.plane.database, pooled.servers
    lease = await pooled.open(a)
    await pooled.later(FIRST_PAUSE)
    await circuits.probe_all(database, transport)
    assert await pooled.circuits() == ["Closed", "Closed"]
    await pooled.route(lease, a.url)
    assert await pooled.circuits() == ["Open", "Closed"], "one answer and one failure: no flapping"
    await pooled.later(FIRST_PAUSE)
    await circuits.probe_all(database, transport)
    assert await pooled.circuits() == ["Open", "Closed"], "and for longer than before"
    await pooled.later(2 * FIRST_PAUSE)
    await circuits.probe_all(database, transport)
    assert await pooled.circuits() == ["Closed", "Closed"]
    mine = await pooled.on(a, THRESHOLD)
    await pooled.worker.complete(pooled.worker.result(mine[0]))
    for one in mine[1:]:
        await pooled.route(one, a.url)
    assert await pooled.circuits() == ["Closed", "Closed"], "a completed Run: failures are counted anew"
    assert b.completions == 0


async def test_what_is_no_failure(pooled: Pool) -> None:
    a, b = pooled.servers
    (lease,) = await pooled.lease()
    for _ in range(2 * THRESHOLD):
        told = await pooled.route(lease, a.url, blame=False, error="it is being updated")
        assert told["backend"]["url"] == b.url
        await pooled.route(lease, a.url, error=f"{a.url}/v1/completions answered 429: slow down")
    assert await pooled.circuits() == ["Closed", "Closed"]
    assert (await pooled.route(lease, "http://elsewhere"))["backend"] is not None


async def test_silence_while_weights_are_loaded_is_no_failure(pooled: Pool) -> None:
    """SGLang answers nothing while it loads, for longer than a request may be silent."""
    a, _ = pooled.servers
    leases = await pooled.on(a, THRESHOLD)

    def op(tx: Transaction) -> None:
        tx.conn.execute(sa.update(backends).where(backends.c.url == a.url).values(weights="Updating"))

    await pooled.served.plane.database.write(op)
    for lease in leases:
        await pooled.route(lease, a.url, error="no token for 20 s, and no sign that the server computes")
    assert await pooled.circuits() == ["Closed", "Closed"]


async def test_garbage_in_rollouts_opens_a_circuit(pooled: Pool) -> None:
    for _ in range(THRESHOLD):
        leases = await pooled.lease(4)
        bad = next(one for one in leases if one["backend"]["url"] == pooled.servers[0].url)
        await pooled.worker.fail(bad, "BackendMismatch")
    assert await pooled.circuits() == ["Open", "Closed"]


async def test_the_only_backend_fails(pooled: Pool, transport: Any) -> None:
    a, _ = pooled.servers
    await pooled.report(a)
    leases = await pooled.lease(THRESHOLD)
    told = [await pooled.route(lease, a.url) for lease in leases]
    assert [one["backend"] and one["backend"]["url"] for one in told] == [a.url, a.url, None]
    assert told[-1]["reason"] == "NoBackendReady"
    assert FIRST_PAUSE <= told[-1]["retry_after"] <= FIRST_PAUSE + 1, "once it has been probed"
    assert await pooled.lease() == []
    waiting = asyncio.create_task(pooled.worker.lease(wait=60, run=1))
    await pooled.later(FIRST_PAUSE)
    await circuits.probe_all(pooled.served.plane.database, transport)
    assert len(await asyncio.wait_for(waiting, patience(10))) == 1, "a closed circuit wakes who waits"


async def test_a_probe_whose_control_plane_died(
    pooled: Pool, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, (a, _) = pooled.served.plane.database, pooled.servers
    monkeypatch.setattr(circuits, "PROBE_SECONDS", 0.2)
    await pooled.open(a)
    a.mode = "hang"
    await pooled.later(FIRST_PAUSE)
    probe = asyncio.create_task(circuits.probe_all(database, transport))
    await eventually(lambda: a.completions != 0, patience(10))
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert await pooled.circuits() == ["HalfOpen", "Closed"]
    await circuits.probe_all(database, transport)
    assert await pooled.circuits() == ["HalfOpen", "Closed"]
    await pooled.later(STUCK_SECONDS)
    await circuits.probe_all(database, transport)
    assert await pooled.circuits() == ["Open", "Closed"], "it hangs"
    assert "rollyard_circuits_opened_total" in (await pooled.served.admin.get("/metrics")).text


async def test_a_restarted_server_is_probed_at_once(pooled: Pool, transport: Any) -> None:
    a, b = pooled.servers
    await pooled.open(a)
    body = [{"url": a.url, "ready": False, "message": "it died"}, {"url": b.url, "ready": True}]
    await pooled.served.driver.put("/v1/backendpools/pool/backends", json={"backends": body})
    assert (await pooled.status())[a.url]["message"] == "it died"
    await circuits.probe_all(pooled.served.plane.database, transport)
    assert a.completions == 0
    await pooled.report(a, b)
    await circuits.probe_all(pooled.served.plane.database, transport)
    assert await pooled.circuits() == ["Closed", "Closed"]
