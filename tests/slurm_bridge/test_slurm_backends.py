"""Backends as Slurm jobs are found by the file of their node, watched, and replaced without a gap."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_crds import BackendPool
from rollyard_slurm.calls.command_line import environment
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_testing.hub import COMMIT, TOKEN, Hub, HubModel, hub_server, use_hub
from rollyard_testing.inference.in_memory import completion
from rollyard_testing.pace import patience
from rollyard_testing.slurm_bridge.bench import Bench

TINY = Path(__file__).parents[2] / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"


class Servers:
    """Backends that answer by URL."""

    def __init__(self) -> None:
        self.up: set[str] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if f"{request.url.scheme}://{request.url.netloc.decode()}" not in self.up:
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/weight_info":
            return httpx.Response(404)
        return completion(request, logprob=-0.5) if request.method == "POST" else httpx.Response(200, json={})


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[Bench, Servers]]:
    servers = Servers()
    async with httpx.AsyncClient(transport=httpx.MockTransport(servers)) as http:
        bench = Bench(tmp_path / "h", http)
        spec = {"model": "m", "engine": {"type": "embedded"}}
        meta = {"name": "p", "uid": "87654321-bbbb"}
        bench.store.pool_list.append(BackendPool.model_validate({"metadata": meta, "spec": spec}))
        (tmp_path / "h" / "pids").mkdir()
        yield bench, servers
        await bench.fleet.close()


def announce(bench: Bench, number: int, url: str) -> None:
    """Write what the node writes when the job begins there."""
    who = SlurmJobIdentity.parse(bench.slurm.queued[number].comment)
    assert who is not None
    bench.site.endpoint_file(who.launch).write_text(json.dumps({"url": url, "job": str(number)}))


async def settled(bench: Bench, wanted: Any) -> None:
    """Run passes until these ready backends were reported to the store."""
    for _ in range(100):
        await bench.turns(1, seconds=0.1)
        ready = {one.url for one in bench.store.backends.get("p", []) if one.ready and not one.draining}
        if ready == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{bench.store.backends} and not {wanted}")


async def test_a_backend_is_ready_once_it_answers(world: tuple[Bench, Servers]) -> None:
    bench, servers = world
    await bench.turns()
    assert list(bench.slurm.queued) == [101]
    bench.slurm.run(101)
    await bench.turns(3)
    assert bench.store.backends.get("p", []) == [], "nobody knows yet where it is"
    announce(bench, 101, "http://cn1:1")
    servers.up.add("http://cn1:1")
    await settled(bench, {"http://cn1:1"})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as server:
        use_hub(monkeypatch, server, tmp_path / "cache", TOKEN)
        server.models["tiny/onnx"] = HubModel(TINY, gated=True)
        yield server


async def until(bench: Bench, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(patience(40)):
        while not condition():
            await bench.turns(1)
            await asyncio.sleep(0.05)


def said_of_the_pool(bench: Bench, kind: str) -> str:
    conditions = bench.store.pool_list[0].status.conditions
    return next((one.message for one in conditions if one.type == kind), "")


@pytest.mark.attack(
    "others read the token of the Hugging Face Hub in a batch script",
    boundary="slurm",
    surface="models of the hub",
    stopped_by="the bridge downloads; the job of a backend gets the folder, and no job the token",
)
async def test_a_model_of_the_hub_is_there_before_the_job_is_submitted(
    world: tuple[Bench, Servers], hub: Hub, tmp_path: Path
) -> None:
    bench, _ = world
    bench.store.pool_list[0].spec.model = "tiny/onnx"
    await bench.turns(1)
    await until(bench, lambda: "downloading tiny/onnx" in said_of_the_pool(bench, "Progressing"))
    assert not bench.slurm.queued, "no node waits for a download"
    await until(bench, lambda: bench.slurm.queued)
    (text,) = bench.slurm.scripts.values()
    folder = tmp_path / "cache" / "hub" / "models--tiny--onnx" / "snapshots" / COMMIT
    assert f"--model {folder} " in text
    assert "--served-model-name tiny/onnx" in text
    assert TOKEN not in text
    assert "HF_" not in text
    assert TOKEN not in " ".join(environment(os.environ).values())


async def test_why_a_model_of_the_hub_is_not_there(
    world: tuple[Bench, Servers], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, _ = world
    monkeypatch.delenv("HF_TOKEN")
    bench.store.pool_list[0].spec.model = "tiny/onnx"
    await until(bench, lambda: "tiny/onnx is gated: accept" in said_of_the_pool(bench, "Ready"))
    assert not bench.slurm.queued


async def test_a_backend_that_slurm_starts_anew_elsewhere(world: tuple[Bench, Servers]) -> None:
    bench, servers = world
    await bench.turns()
    bench.slurm.run(101)
    announce(bench, 101, "http://cn1:1")
    servers.up.add("http://cn1:1")
    await settled(bench, {"http://cn1:1"})
    bench.slurm.change(101, state="PENDING", reason="BeginTime")
    await settled(bench, set())
    bench.slurm.run(101)
    await bench.turns(2)
    (owner,) = bench.fleet.owners()
    assert [one.url for one in bench.fleet.observed(owner)] == [""], "what the last node announced is gone"
    announce(bench, 101, "http://cn2:2")
    servers.up = {"http://cn2:2"}
    await settled(bench, {"http://cn2:2"})
    assert bench.slurm.submissions == 1


async def test_a_successor_takes_over_when_it_is_ready(world: tuple[Bench, Servers]) -> None:
    bench, servers = world
    await bench.turns()
    bench.slurm.run(101)
    announce(bench, 101, "http://cn1:1")
    servers.up.add("http://cn1:1")
    await settled(bench, {"http://cn1:1"})
    bench.slurm.run(101, left=300.0)
    await bench.turns(2)
    assert list(bench.slurm.queued) == [101, 102]
    bench.slurm.run(102)
    announce(bench, 102, "http://cn2:2")
    await settled(bench, {"http://cn1:1"})
    servers.up.add("http://cn2:2")
    await settled(bench, {"http://cn2:2"})
    told = {one.url: one.draining for one in bench.store.backends["p"]}
    assert told == {"http://cn1:1": True, "http://cn2:2": False}, "the old one takes no new rollouts"
    await bench.turns(60)
    assert (101, "USR1") in bench.slurm.signals
    assert (102, "USR1") not in bench.slurm.signals
    assert 101 in bench.slurm.cancelled


async def test_a_new_bridge_does_not_forget_that_a_backend_serves(world: tuple[Bench, Servers]) -> None:
    bench, servers = world
    await bench.turns()
    bench.slurm.run(101)
    announce(bench, 101, "http://cn1:1")
    servers.up.add("http://cn1:1")
    await settled(bench, {"http://cn1:1"})
    await bench.fleet.close()
    bench.begin()
    bench.store.backends.clear()
    await bench.turns(1)
    assert [(one.url, one.ready) for one in bench.store.backends["p"]] == [("http://cn1:1", True)]
