"""What a web page, a neighbour on the network or a client tries with the ProRL calls, which need no token."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.app import build
from rollyard_api.core.hosts import HostCheck
from rollyard_api.prorl import app as prorl_app
from rollyard_api.prorl.app import ProrlListener
from rollyard_api.prorl.config import ProrlConfig
from rollyard_api.service import ControlPlane
from rollyard_api.settings import Settings
from rollyard_testing.inference.scripted import VllmShaped
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="prorl")


RARELY = 3600.0
ROW = {
    "data_source": "deepscaler",
    "instance_id": "row",
    "prompt": "What is 2 + 2?",
    "reward_model": {"ground_truth": "4"},
}
CALL = {"instance": ROW, "sampling_params": {"temperature": 1.0}, "job_id": "j"}


@dataclass(slots=True)
class Door:
    """The listener, and the control plane behind it."""

    plane: ControlPlane
    port: int
    client: httpx.AsyncClient
    admin: httpx.AsyncClient

    async def raw(self, request: bytes, seconds: float = 30.0) -> bytes:
        """Send bytes, and return the beginning of the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            await writer.drain()
            return await asyncio.wait_for(reader.read(65_536), patience(seconds))
        finally:
            writer.close()

    async def counts(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/status")).json()
        return found


@asynccontextmanager
async def a_door(folder: Path, **given: Any) -> AsyncIterator[Door]:
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    config = ProrlConfig.model_validate({"tokenizer": "tiny", "model": "tiny", **given})
    times = dict.fromkeys(("sweep_seconds", "health_seconds", "circuit_seconds", "stats_seconds"), RARELY)
    app = build(Settings(state_dir=folder, **times), prorl=ProrlListener(sock, config, "127.0.0.1"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=patience(60)
        ) as client,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://test",
            headers={"Authorization": f"Bearer {app.state.plane.tokens.current('admin')}"},
        ) as admin,
    ):
        assert (await client.post("/start")).status_code == 200
        yield Door(app.state.plane, port, client, admin)


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with a_door(tmp_path) as made:
        yield made


@pytest.fixture
def server() -> Iterator[VllmShaped]:
    made = VllmShaped()
    yield made
    made.close()


async def submitted(door: Door, name: str, namespace: str) -> None:
    spec = {
        "tasks": {"inline": [{"id": "t", "prompt": "p"}]},
        "handler": "shell",
        "agent": {"type": "oracle"},
    }
    manifest = job_manifest(name, spec, namespace=namespace)
    assert (await door.admin.post("/v1/rolloutjobs", json=manifest)).status_code == 201


@pytest.mark.attack(
    "a web page calls it from a browser, or by a name that resolves to this machine (DNS rebinding)",
    surface="the listener",
    stopped_by="requests with headers of browsers, and other Host headers, are refused",
)
async def test_a_web_page_reaches_nothing_by_a_name_of_its_own_or_from_a_browser(door: Door) -> None:
    hosts = (
        "attacker.example",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "attacker.example:8006",
        "127.0.0.1@attacker.example",
        "0.0.0.0",
        "10.0.0.1",
        "[::ffff:10.0.0.1]",
        "",
    )
    for host in hosts:
        for path in ("/start", "/stop", "/process", "/clear_llm_server"):
            refused = await door.client.post(path, headers={"Host": host})
            assert refused.status_code in (400, 403), (host, path)
    for header in ("Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode", "Access-Control-Request-Method"):
        for value in ("null", f"http://127.0.0.1:{door.port}", "same-origin", "POST"):
            refused = await door.client.post("/stop", headers={header: value})
            assert refused.status_code == 403, header
            assert "access-control-allow-origin" not in refused.headers
    preflight = await door.client.options("/stop", headers={"Origin": "https://attacker.example"})
    assert preflight.status_code == 403
    # A form or a picture of a page sends no JSON, and two Host headers are one too many.
    form = await door.client.post("/process", data={"instance": "x"})
    assert form.status_code == 422
    twice = await door.raw(b"POST /stop HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: attacker.example\r\n\r\n")
    assert twice.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))
    assert (await door.counts())["running"] is True
    for host in ("localhost", "LOCALHOST:1", f"127.0.0.1:{door.port}", "[::1]:8006", "127.1.2.3"):
        assert (await door.client.get("/status", headers={"Host": host})).status_code == 200, host


@pytest.mark.attack(
    "it is used for REST, metrics or leases without a token",
    surface="the listener",
    stopped_by="its application has the seven calls alone",
)
async def test_no_other_call_is_behind_this_port(door: Door) -> None:
    await submitted(door, "theirs", "default")
    paths = (
        "/v1/rolloutjobs",
        "/v1/rolloutjobs/theirs",
        "/v1/backendpools",
        "/v1/leases",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/healthz",
        "//v1/rolloutjobs",
        "/process/../v1/rolloutjobs",
        "/%2e%2e/v1/rolloutjobs",
        "/status/",
    )
    for path in paths:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            line = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n"
            token = f"Authorization: Bearer {door.plane.tokens.current('admin')}\r\nConnection: close\r\n\r\n"
            answer = await door.raw((line + token).encode())
            assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405")), (method, path, answer)
    for method, path in (("GET", "/start"), ("GET", "/stop"), ("PUT", "/process"), ("POST", "/status")):
        assert (await door.client.request(method, path)).status_code == 405


@pytest.mark.attack(
    "they end rollouts of other jobs, by names of jobs, rollouts or tasks",
    surface="`/cancel`, `/stop`",
    stopped_by="only jobs and calls that it made itself are looked at",
)
async def test_jobs_of_others_are_not_reached(door: Door) -> None:
    for name, namespace in (("theirs", "default"), ("prorl-0-0", "default"), ("theirs", "elsewhere")):
        await submitted(door, name, namespace)
    job = (await door.admin.get("/v1/rolloutjobs/theirs/rollouts")).json()["items"][0]["id"]
    for name in ("theirs", "default/theirs", job, "t", "*", "%", ""):
        assert (await door.client.post("/cancel", json={"job_id": name})).status_code == 200
    for path in ("/clear_llm_server", "/stop", "/start", "/stop", "/start"):
        assert (await door.client.post(path)).status_code == 200
    assert (await door.counts())["pending_jobs"] == 0
    for name, namespace in (("theirs", "default"), ("prorl-0-0", "default"), ("theirs", "elsewhere")):
        found = await door.admin.get(f"/v1/rolloutjobs/{name}", params={"namespace": namespace})
        assert found.json()["status"]["counts"]["cancelled"] == 0


@pytest.mark.attack(
    "the control plane and workers are made to ask the metadata address or an internal host",
    surface="`/add_llm_server`",
    stopped_by="loopback, or what the setting `servers` names; names are never resolved to decide",
)
async def test_no_address_makes_the_control_plane_ask_another_host(
    tmp_path: Path, server: VllmShaped
) -> None:
    port = server.url.rpartition(":")[2]
    addresses = (
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:169.254.169.254]",
        "http://10.0.0.7:8000",
        "http://0.0.0.0:1",
        "http://2130706433:1",
        "http://0x7f000001:1",
        "http://127.1:1",
        "http://127.0.0.1@169.254.169.254",
        "http://user:pass@127.0.0.1:1",
        "http://127.0.0.1#@169.254.169.254",
        "http://127.0.0.1?x",
        "http://127.0.0.1\\@169.254.169.254",
        "http://localhost.attacker.example",
        "http://engine-0.engines.attacker.example",
        "http://engine-00.engines",
        "http://127.0.0.1:1\r\nHost: x",
        "http://127.0.0.1:99999",
        "file:///etc/passwd",
        "gopher://127.0.0.1:1",
        "unix:/run/docker.sock",
        "http://",
        "x" * 3000,
    )
    async with a_door(tmp_path, model="", servers=["engine-0.engines"], maxServers=2) as door:
        for address in addresses:
            refused = await door.client.post("/add_llm_server", json={"address": address})
            assert refused.status_code == 422, address
        assert (await door.admin.get("/v1/backendpools")).json()["items"] == []
        assert server.seen == []
        for name in ("127.0.0.1", "localhost"):
            added = await door.client.post("/add_llm_server", json={"address": f"http://{name}:{port}"})
            assert added.status_code == 200, added.text
        full = await door.client.post("/add_llm_server", json={"address": "http://127.0.0.2:1"})
        assert full.status_code == 422
        assert "no more may be" in full.json()["detail"]


@pytest.mark.attack(
    "too long, too deep, compressed, endless, or announced and never sent",
    surface="bodies",
    stopped_by="bounds on size, time and all bodies together",
)
async def test_bodies_are_bounded_in_size_depth_and_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    length = f"POST /process HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {17 << 20}\r\n\r\n"
    assert (await door.raw(length.encode())).startswith(b"HTTP/1.1 413")
    small = await door.client.post("/cancel", json={"job_id": "x" * (65 << 10)})
    assert small.status_code == 413

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    try:
        chunked = await door.client.post("/process", content=endless())
        assert chunked.status_code == 413
    except httpx.HTTPError:
        pass  # The connection was closed while the rest was being sent.
    deep = b'{"instance": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    for content in (
        deep,
        b'{"instance": {"a": NaN}}',
        b'{"instance": {"a": 1e999}}',
        b"\xff\xfe",
        b"[]",
        b"null",
    ):
        answer = await door.client.post(
            "/process", content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 422, content[:40]
    zipped = await door.client.post("/process", content=b"x", headers={"Content-Encoding": "gzip"})
    assert zipped.status_code == 415
    for length in ("-1", "1e9", "9" * 30):
        line = f"POST /process HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n"
        refusal = await door.raw(line.encode())
        assert not refusal or refusal.startswith(b"HTTP/1.1 4"), length
    monkeypatch.setattr(prorl_app, "BODY_SECONDS", 0.3)
    line = b"POST /process HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
    assert (await door.raw(line)).startswith(b"HTTP/1.1 408")
    # Bodies that are announced and never come take no room from those that do.
    monkeypatch.setattr(prorl_app, "MAX_HELD_BYTES", 4096)
    announced = b"POST /process HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4000\r\n\r\n{"
    slow = [asyncio.create_task(door.raw(announced)) for _ in range(5)]
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in await asyncio.gather(*slow))
    assert (await door.client.post("/cancel", json={"job_id": "x"})).status_code == 200
    assert (await door.counts())["pending_jobs"] == 0


@pytest.mark.attack(
    "a length is written in digits of another script",
    surface="bodies",
    stopped_by="it counts as too large: 413",
)
async def test_a_length_of_other_digits_is_too_large_whatever_parses_the_request() -> None:
    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    async def unused(*_arguments: Any) -> Any:
        raise AssertionError("neither the body nor a call is needed")

    headers = [(b"host", b"localhost"), (b"content-length", "\u00b2".encode("latin-1"))]
    scope = {"type": "http", "method": "POST", "path": "/start", "headers": headers}
    await prorl_app.BodyGate(unused, HostCheck("127.0.0.1", ()))(scope, unused, send)
    assert answers[0]["status"] == 413


@pytest.mark.attack(
    "calls without end, or the same one many times at once",
    surface="`/process`",
    stopped_by="a bound on open calls; one rollout for a job_id",
)
async def test_open_calls_are_bounded_and_repeats_start_nothing(tmp_path: Path) -> None:
    async with a_door(tmp_path, maxCalls=20) as door:
        calls = [asyncio.create_task(door.client.post("/process", json=CALL)) for _ in range(25)]
        refused = []
        for call in asyncio.as_completed(calls, timeout=patience(60)):
            refused.append(await call)
            if len(refused) == 5:
                break
        assert {answer.status_code for answer in refused} == {503}
        assert {"may have no more" in answer.json()["detail"] for answer in refused} == {True}
        async with asyncio.timeout(patience(60)):
            while (counts := await door.counts())["jobs"] < 1:  # noqa: ASYNC110 (it is another server)
                await asyncio.sleep(0.02)
        assert (counts["jobs"], counts["pending_jobs"]) == (1, 1)
        # Calls that are only now read find the cancelled rollout, and start no other.
        assert (await door.client.post("/cancel", json={"job_id": CALL["job_id"]})).status_code == 200
        answers = await asyncio.gather(*calls)
        assert sorted(answer.status_code for answer in answers) == [200] * 20 + [503] * 5
        assert len({answer.json()["rollout"] for answer in answers if answer.status_code == 200}) == 1


@pytest.mark.attack(
    "shell code, paths, control characters", surface="`job_id`", stopped_by="it is hashed before it is used"
)
async def test_odd_names_are_data(door: Door) -> None:
    for name in ("'; DROP TABLE jobs; --", "../../etc", "a\nb", "\x00", "é" * 100, "{{x}}", "%s"):
        call = asyncio.create_task(door.client.post("/process", json=CALL | {"job_id": name}))
        async with asyncio.timeout(patience(60)):
            while (await door.counts())["pending_jobs"] < 1:
                assert not call.done(), (await call).text
                await asyncio.sleep(0.02)
        assert (await door.client.post("/cancel", json={"job_id": name})).status_code == 200
        assert (await call).json()["error"].startswith("Cancelled")
    long = await door.client.post("/process", json=CALL | {"job_id": "x" * 1000})
    assert long.status_code == 422
    surrogate = json.dumps(CALL | {"job_id": "\ud800"}).encode()
    odd = await door.client.post("/process", content=surrogate, headers={"Content-Type": "application/json"})
    assert odd.status_code == 422
