"""The control plane as a process: tokens, ports, signals, kill -9 and events."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import random
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.sockets import listening_socket
from rollyard_testing.api.control_plane import self_signed
from rollyard_testing.api.plane import Worker, make_manifest, refused_start, start_api
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually


def _http(process: Any, role: str = "admin", **options: Any) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {process.tokens[role]}"}
    return httpx.AsyncClient(base_url=process.url, headers=headers, timeout=patience(70), **options)


async def test_tokens_and_graceful_stop_with_a_long_poll_open(tmp_path: Path) -> None:
    with start_api(tmp_path) as process:
        assert stat.S_IMODE((tmp_path / "tokens.json").stat().st_mode) == 0o600
        assert set(process.tokens) == {"admin", "worker", "driver", "metrics", "viewer"}
        assert len(set(process.tokens.values())) == 5
        async with _http(process, "worker") as http:
            waiting = asyncio.create_task(Worker(http).lease(wait=60, init=1))
            await asyncio.sleep(0.3)  # Nothing tells that another process has begun to wait.
            assert not waiting.done()
            process.popen.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(waiting, patience(10)) == []
        assert await asyncio.to_thread(process.popen.wait, patience(10)) == 0
    tokens = process.tokens
    with start_api(tmp_path) as again:
        assert again.tokens == tokens


async def test_nothing_is_leased_to_a_worker_that_is_gone(tmp_path: Path) -> None:
    with start_api(tmp_path) as process:
        async with _http(process) as http:
            waiting = asyncio.create_task(Worker(http, "dead").lease(wait=60, init=8))
            await asyncio.sleep(0.5)  # Nothing tells that another process has begun to wait.
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            alive = asyncio.create_task(Worker(http, "alive").lease(wait=10, init=8))
            await http.post("/v1/rolloutjobs", json=make_manifest())
            assert len(await alive) == 2


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(tmp_path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience(50))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr


def test_an_address_of_a_family_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ipv6(family: int, kind: int) -> socket.socket:
        assert (family, kind) == (socket.AF_INET6, socket.SOCK_STREAM)
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", without_ipv6)
    with pytest.raises(OptionInvalid, match="port 8765 on ::1 cannot be listened on: Address family not"):
        listening_socket("::1", 8765, "--port")


def test_one_control_plane_per_state_folder(tmp_path: Path) -> None:
    with start_api(tmp_path):
        said = refused_start(tmp_path)
    assert said.startswith("the control plane cannot start: another control plane uses")


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]


@pytest.mark.faults
@pytest.mark.parametrize("seed", SEEDS)
async def test_kill_9_loses_and_doubles_nothing(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(40)]}
    rewards: dict[str, float] = {}
    submitted = False
    for life in range(4):
        with start_api(tmp_path) as process:
            async with _http(process) as http:
                if not submitted:
                    answer = await http.post(
                        "/v1/rolloutjobs", json=make_manifest(tasks=tasks, samplesPerTask=2)
                    )
                    assert answer.status_code == 201
                    submitted = True
                if life < 3:
                    work = asyncio.create_task(_work(Worker(http), rewards))
                    await asyncio.sleep(rng.uniform(0.05, 0.6))
                    process.kill()
                    with pytest.raises(httpx.TransportError):
                        await work
                    continue
                await _recover(Worker(http), rewards)
                await _judge(http, tmp_path, rewards)


async def _work(worker: Any, rewards: dict[str, float]) -> None:
    """Work until the connection breaks. A reward counts only once it was answered `accepted`."""
    while True:
        leases = await worker.lease(init=3, run=3, eval=3, wait=1)
        results = [
            worker.result(one, **({"reward": float(one["sample_index"])} if one["stage"] == "eval" else {}))
            for one in leases
        ]
        if results:
            outcomes = await worker.complete(*results)
            for result, outcome in zip(results, outcomes, strict=True):
                if outcome == "accepted" and "reward" in result:
                    assert result["rollout"] not in rewards
                    rewards[result["rollout"]] = result["reward"]


async def _recover(worker: Any, rewards: dict[str, float]) -> None:
    """Cancel the rollouts whose holders died, because nobody will complete them in time."""
    while leases := await worker.lease(init=16, run=16, eval=16):
        await worker.complete(*[worker.result(one) for one in leases])
    answer = await worker.http.get("/v1/rolloutjobs/job/rollouts", params={"status": "leased"})
    for item in answer.json()["items"]:
        assert item["id"] not in rewards
        await worker.http.post("/v1/rolloutjobs/job/cancel", json={"rollout": item["id"]})


async def _judge(http: httpx.AsyncClient, folder: Path, rewards: dict[str, float]) -> None:
    answer = await http.get("/v1/rolloutjobs/job/trajectories", params={"limit": 1000})
    assert answer.headers["rollyard-finished"] == "true"
    records = {record["id"]: record for record in map(json.loads, answer.iter_lines())}
    assert len(records) == len(answer.content.splitlines()) == 80
    for rollout, reward in rewards.items():
        assert records[rollout]["reward"] == reward, "an accepted result was lost"
    end = time.monotonic() + patience(20)
    stored: list[bytes] = []
    while len(stored) < 80 and time.monotonic() < end:
        await asyncio.sleep(0.1)
        files = (folder / "trajectories").rglob("*.ndjson")
        stored = [line for file in files for line in file.read_bytes().splitlines()]
    assert sorted(stored) == sorted(answer.content.splitlines()), "the store holds each record exactly once"


@pytest.mark.faults
@pytest.mark.parametrize("seed", SEEDS[:2])
async def test_kill_9_loses_and_doubles_nothing_of_dynamic_sampling(seed: int, tmp_path: Path) -> None:
    """The counters agree with the groups at every restart, and steps that were answered are open."""
    rng = random.Random(seed)
    spec = {"tasks": {"stream": True}, "samplesPerTask": 2}
    sampling = {"targetGroups": 10, "maxInFlightGroups": 4}
    rewards: dict[str, float] = {}
    steps: list[str] = []
    for life in range(4):
        with start_api(tmp_path) as process:
            async with _http(process) as http:
                if life == 0:
                    await http.post("/v1/rolloutjobs", json=make_manifest(**spec, dynamicSampling=sampling))
                    tasks = [{"id": f"t{i}", "prompt": "p"} for i in range(200)]
                    await http.post("/v1/rolloutjobs/job/tasks", json={"tasks": tasks})
                await _check_counters(http, rewards, steps)
                if life == 3:
                    await _recover(Worker(http), rewards)
                    await http.post("/v1/rolloutjobs/job/close")
                    await _recover(Worker(http), rewards)
                    await _check_counters(http, rewards, steps)
                    continue
                work = asyncio.create_task(_work(Worker(http), rewards))
                opening = asyncio.create_task(_open_steps(http, life, steps))
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                process.kill()
                for task in (work, opening):
                    with pytest.raises(httpx.TransportError):
                        await task


async def _open_steps(http: httpx.AsyncClient, life: int, steps: list[str]) -> None:
    for number in itertools.count():
        step = f"{life}-{number}"
        answer = await http.post("/v1/rolloutjobs/job/targets", json={"id": step, "groups": 2})
        assert answer.status_code == 201
        steps.append(step)
        await asyncio.sleep(0.02)


async def _check_counters(http: httpx.AsyncClient, rewards: dict[str, float], steps: list[str]) -> None:
    for step in steps:
        again = await http.post("/v1/rolloutjobs/job/targets", json={"id": step, "groups": 2})
        assert again.status_code == 200, "a step that was answered is open"
    status = (await http.get("/v1/rolloutjobs/job")).json()["status"]
    told, counts = status["dynamicSampling"], status["counts"]
    assert told["targetGroups"] >= 2 * len(steps)
    query = {"limit": 256, "dropped": True}
    answer = await http.get("/v1/rolloutjobs/job/groups", params=query)
    groups = [json.loads(line) for line in answer.content.splitlines()]
    assert len({group["group_id"] for group in groups}) == len(groups)
    informative = [group for group in groups if group["informative"]]
    assert told["informativeGroups"] == len(informative)
    ended = sum(told[f"{kind}Groups"] for kind in ("informative", "uninformative", "dropped", "surplus"))
    assert ended == len(groups)
    assert counts["total"] == 2 * (ended + told["inFlightGroups"])
    assert ended + told["inFlightGroups"] + told["waitingGroups"] == 200
    records = {t["id"]: t["reward"] for group in informative for t in group["trajectories"]}
    for rollout, reward in records.items():
        assert rewards.get(rollout, reward) == reward


async def test_events(tmp_path: Path) -> None:
    from rollyard_client.sse import JobEvent, Parser

    with start_api(tmp_path) as process:
        async with _http(process) as http:
            await http.post("/v1/rolloutjobs", json=make_manifest())
            got: list[JobEvent] = []

            async def listen(last_id: str, enough: int | None) -> None:
                parser = Parser()
                headers = {"Last-Event-ID": last_id} if last_id else {}
                async with http.stream("GET", "/v1/rolloutjobs/job/events", headers=headers) as answer:
                    async for line in answer.aiter_lines():
                        got.extend(parser.feed(line))
                        if enough is not None and len([e for e in got if e.name == "transition"]) >= enough:
                            return

            listening = asyncio.create_task(listen("", 2))
            await eventually(lambda: got)
            worker = Worker(http)
            leases = await worker.lease(init=2)
            await asyncio.wait_for(listening, patience(20))
            first = [e for e in got if e.name == "transition"]
            assert {e.data["status"] for e in first} == {"leased"}
            assert any(e.name == "counts" and e.data["total"] == 2 for e in got)
            await worker.complete(*[worker.result(one) for one in leases])
            await worker.finish_all()
            got.clear()
            await asyncio.wait_for(listen(first[-1].id, None), patience(30))
            assert got[-1].name == "end"
            resumed = [e for e in got if e.name == "transition"]
            numbers = [int(e.id.rpartition("-")[2]) for e in [first[-1], *resumed]]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            ends = [e.data for e in resumed if e.data["status"] == "succeeded"]
            assert [e["reward"] for e in ends] == [1.0, 1.0]


async def test_kill_9_keeps_claims(tmp_path: Path) -> None:
    shape = {"cpu": 1.0, "memory_bytes": 1 << 30, "disk_bytes": 1 << 30, "processes": 64}
    bound = {"state": "Bound", "address": "tcp://10.0.0.7:7411", "secret": "s"}
    with start_api(tmp_path) as process:
        async with _http(process) as http:
            await http.post("/v1/rolloutjobs", json=make_manifest())
            leases = await Worker(http, node="kubernetes").lease(init=2)
            bodies = [{"rollout": x["rollout"], "token": x["token"], "shape": shape} for x in leases]
            kept, dropped = [(await http.post("/v1/claims", json=body)).json()["id"] for body in bodies]
            for claim in (kept, dropped):
                assert (await http.put(f"/v1/claims/{claim}/status", json=bound)).status_code == 200
        process.kill()
    with start_api(tmp_path) as process:
        async with _http(process) as http:
            for body, claim in zip(bodies, (kept, dropped), strict=True):
                again = (await http.post("/v1/claims", json=body | {"wait": 30})).json()
                assert (again["id"], again["secret"]) == (claim, "s")
            revision = (await http.get("/v1/claims")).json()["revision"]
            rollout = bodies[1]["rollout"]
            await http.post("/v1/rolloutjobs/job/cancel", json={"rollout": rollout})
            told = await http.get("/v1/claims", params={"revision": revision, "wait": 30})
            assert {c["id"]: c["state"] for c in told.json()["claims"]} == {
                kept: "Bound",
                dropped: "Released",
            }


async def test_tokens_from_a_file(tmp_path: Path) -> None:
    given = {"admin": "a-token", "worker": "w-token", "driver": "d-token"}
    mounted = tmp_path / "secret" / "tokens.json"
    mounted.parent.mkdir()
    mounted.write_text(json.dumps(given))
    mounted.chmod(0o400)
    with start_api(tmp_path, "--tokens", str(mounted)) as process:
        assert not (tmp_path / "tokens.json").exists()
        async with httpx.AsyncClient(base_url=process.url) as http:
            for role, status in (("admin", 200), ("driver", 200), ("worker", 403)):
                headers = {"Authorization": f"Bearer {given[role]}"}
                assert (await http.get("/v1/rolloutjobs", headers=headers)).status_code == status
            assert (await http.get("/healthz")).status_code == 200


def test_token_files_that_are_no_use(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("[]")
    assert "tokens.json" in refused_start(tmp_path)
    file = tmp_path / "given.json"
    assert "cannot be read: No such file" in refused_start(tmp_path, "--tokens", str(file))
    file.write_text('{"admin": "a", "worker": "w"}')
    assert "admin, worker, driver" in refused_start(tmp_path, "--tokens", str(file))
    file.write_text('{"admin": "a", "worker": "w", "driver": "w"}')
    assert "of two roles are the same" in refused_start(tmp_path, "--tokens", str(file))


@pytest.fixture
def certificate(tmp_path: Path, missing: Any) -> tuple[Path, Path]:
    """Return a self-signed certificate of 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        missing("openssl is not installed")
    return self_signed(tmp_path)


async def test_https(tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from rollyard_client import Client, ContextError, DriverClient, Retry, ServerUnavailable

    options = ["--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1])]
    with start_api(tmp_path, *options) as process:
        url = process.url.replace("http://", "https://")
        trusting = ssl.create_default_context(cafile=str(certificate[0]))
        headers = {"Authorization": f"Bearer {process.tokens['driver']}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, verify=trusting) as http:
            assert (await http.get("/v1/rolloutjobs")).json()["items"] == []
            assert (await http.get("/readyz")).text == "ok"
        async with httpx.AsyncClient(base_url=url, verify=True, trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await stranger.get("/healthz")
        async with httpx.AsyncClient(base_url=process.url) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/healthz")
        token = process.tokens["driver"]
        async with DriverClient(url, token, retry=Retry(attempts=1)) as driver:
            with pytest.raises(ServerUnavailable, match="certificate"):
                await driver.jobs()
        monkeypatch.setenv("ROLLYARD_CA_FILE", str(certificate[0]))
        async with DriverClient(url, token) as driver:
            assert await driver.unfinished_jobs() == []
        with Client(url, token) as client:
            client.ready()
        monkeypatch.setenv("ROLLYARD_CA_FILE", str(tmp_path / "nowhere"))
        with pytest.raises(ContextError, match="ROLLYARD_CA_FILE"):
            DriverClient(url, token)


def test_certificates_that_are_no_use(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    chain, key = (str(path) for path in certificate)
    assert "belong together" in refused_start(tmp_path, "--tls-cert", chain)
    told = refused_start(tmp_path, "--tls-cert", chain, "--tls-key", str(tmp_path / "nowhere"))
    assert told.startswith("--tls-key")
    assert "cannot be read: No such file" in told
    assert "no PEM certificate and key" in refused_start(tmp_path, "--tls-cert", key, "--tls-key", chain)


async def test_a_unix_socket_of_this_user_alone(tmp_path: Path) -> None:
    from rollyard_client import Client, DriverClient, Retry, ServerUnavailable
    from rollyard_client.unixsocket import socket_url

    path = tmp_path / "a folder" / "api.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:  # A killed control plane leaves the socket like this.
        left.bind(str(path))
    url = socket_url(str(path))
    with start_api(tmp_path, "--host", str(path)) as process:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert process.url.endswith(":0"), "no port"
        async with DriverClient(url, process.tokens["driver"]) as driver:
            assert await driver.unfinished_jobs() == []
        with Client(url, process.tokens["admin"]) as client:
            client.ready()
        other = tmp_path / "other"
        assert "in use" in refused_start(other, "--host", str(path))
    async with DriverClient(url, process.tokens["driver"], retry=Retry(attempts=1)) as driver:
        with pytest.raises(ServerUnavailable, match="http\\+unix"):
            await driver.jobs()
