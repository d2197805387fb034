"""Text and bodies from outside: forged log lines, billion laughs, bottomless nesting, packed bombs."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import re
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import msgpack
import orjson
import pytest
from rich.table import Table
from rich.text import Text
from rollyard import terminal
from rollyard_api.access.permissions import SMALL
from rollyard_inference.errors import BackendMismatch
from rollyard_inference.transports.with_aiohttp import AiohttpTransport
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_testing.adversary.restplane import Yard, control_plane, result
from rollyard_testing.api.control_plane import a_control_plane
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="control plane")


FORGED = "2030-01-01 00:00:00,000 INFO rollyard.api: all is well"
HOSTILE = f"x\n{FORGED}\r\n\x1b[2K\x1b]0;title\x07\x9b31m"
MARKUP = "[/blue] :smile: [bold]x[/bold], [file_text]"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S+: |  \| ")


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with control_plane(tmp_path) as made:
        yield made


# Log lines and terminals.


@contextmanager
def server(folder: Path) -> Iterator[tuple[httpx.Client, Path]]:
    """Yield a control plane process whose log is a file, and a client with the admin's token."""
    with a_control_plane(folder, ready_seconds=90, end_seconds=60) as started:
        headers = {"Authorization": f"Bearer {started.tokens['admin']}"}
        with httpx.Client(
            base_url=started.url, headers=headers, trust_env=False, timeout=patience(60)
        ) as http:
            yield http, started.log


def _lease(http: httpx.Client, stage: str) -> list[dict[str, Any]]:
    ask = {"worker": "w", "node": "n", "capacity": {stage: 8}}
    leases: list[dict[str, Any]] = http.post("/v1/leases", json=ask).json()["leases"]
    return leases


@pytest.mark.attack(
    "a message, URL or name with a newline forges a log line, or an escape sequence hides one",
    surface="logs of control plane, operator, workers and engine",
    stopped_by="one formatter escapes control characters; lines of a traceback are marked; with "
    "`--log-format json` each record is one line of ASCII",
)
def test_no_text_of_a_request_begins_a_line_of_the_log(tmp_path: Path) -> None:
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(4)]}
    spec = {"tasks": tasks, "handler": "shell", "agent": {"type": "tools"}, "backendRef": {"name": "pool"}}
    base = {"apiVersion": "rollyard.dev/v1alpha1"}
    pool = base | {"kind": "BackendPool", "metadata": {"name": "pool"}, "spec": {"model": "tiny"}}
    job = base | {"kind": "RolloutJob", "metadata": {"name": "job"}, "spec": spec}
    with server(tmp_path) as (http, log):
        assert http.post("/v1/backendpools", json=pool).status_code == 201
        url = "http://127.0.0.1:9"
        report = {"backends": [{"url": url, "ready": True}]}
        assert http.put("/v1/backendpools/pool/backends", json=report).status_code == 200
        assert http.post("/v1/rolloutjobs", json=job).status_code == 201
        done = [result(lease) for lease in _lease(http, "init")]
        assert http.post("/v1/leases/complete", json={"worker": "w", "results": done}).status_code == 200
        for lease in _lease(http, "run"):
            ask = {"rollout": lease["rollout"], "token": lease["token"], "failed_url": url, "error": HOSTILE}
            assert http.post("/v1/leases/route", json=ask).status_code == 200
        http.get(f"/v1/rolloutjobs/{'%0A'.join(FORGED.split())}", headers={"User-Agent": FORGED})
        said = log.read_text()
    assert "its circuit opens; last error: x" in said, "the attack reached the log"
    assert "\\n2030" in said
    assert [line for line in said.split("\n") if line and not LINE.match(line)] == []
    assert not set(said) & set("\r\x1b\x07\x9b")


@pytest.mark.attack(
    "text of a rollout or a server moves the cursor, sets the title or forges a line",
    surface="`rollyard view`, `describe`, `get`, `watch`",
    stopped_by="it is escaped before it is printed",
)
def test_no_text_of_a_server_moves_the_cursor_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    screen = terminal.console(file=out, width=200, color_system=None, force_terminal=True)
    table = Table("name")
    table.add_row(HOSTILE)
    table.add_row(MARKUP)
    screen.print(table)
    screen.print(MARKUP)
    screen.print(Text(f"a turn: {HOSTILE}"), soft_wrap=True)
    terminal.echo(HOSTILE)
    terminal.echo_line(HOSTILE)
    assert out.getvalue().count(MARKUP) == 2, "what looks like markup is neither a style nor an error"
    told = capsys.readouterr().out
    for text in (out.getvalue(), told):
        assert not set(text) & set("\r\x1b\x07\x9b")
        assert "\\x1b[2K" in text
    assert told.split("\n")[-2].startswith("x\\n2030"), "what is one line stays one"


# Bodies.


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)
)


@pytest.mark.attack(
    "aliases that stand for billions of values, depth, numbers to the base 60",
    surface="manifests in YAML",
    stopped_by="refused before anything is built; at most 4 MiB, in a thread",
)
@pytest.mark.parametrize(
    ("text", "why"),
    [(LAUGHS, "the alias"), ("[" * 100_000, "nested"), ("a: " + "1:" * 500_000, "a number has more")],
    ids=["aliases", "depth", "base 60"],
)
async def test_yaml_that_grows_is_refused_at_once(yard: Yard, text: str, why: str) -> None:
    headers = {"Content-Type": "application/yaml"}
    for path in ("/v1/rolloutjobs", "/v1/backendpools"):
        answer = await asyncio.wait_for(yard.admin.post(path, content=text, headers=headers), patience(30))
        assert answer.status_code == 400, answer.text
        assert why in answer.json()["detail"]
    long = await yard.admin.post("/v1/rolloutjobs", content=" " * (5 << 20), headers=headers)
    assert long.status_code == 413


def _manifest(nested: str) -> bytes:
    task = f'{{"id": "t", "prompt": "p", "metadata": {{"a": {nested}}}}}'
    return (
        '{"apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "deep"}, '
        f'"spec": {{"tasks": {{"inline": [{task}]}}, "handler": "shell", "agent": {{"type": "oracle"}}}}}}'
    ).encode()


@pytest.mark.attack(
    "a job that nests so deep that it cannot be written again breaks the list of all jobs",
    surface="bodies in JSON",
    stopped_by="128 levels at most, else 400",
)
@pytest.mark.parametrize("depth", [90, 200, 245, 300, 900, 5_000, 1_000_000])
async def test_what_nests_too_deep_is_refused_and_the_rest_can_be_listed(yard: Yard, depth: int) -> None:
    await yard.submit("other")
    answer = await yard.admin.post("/v1/rolloutjobs", content=_manifest("[" * depth + "]" * depth))
    assert answer.status_code == (201 if depth == 90 else 400), answer.text
    if depth > 90:
        assert answer.json()["reason"] == "MalformedBody"
    assert (await yard.admin.get("/v1/rolloutjobs")).status_code == 200
    leases = await yard.lease(yard.worker, "deep" if depth == 90 else "other", init=1)
    assert len(leases) == 1


@pytest.mark.attack(
    "a task that nests so deep that no trajectory of it can be written",
    surface="tasks",
    stopped_by="100 levels at most, refused by line",
)
@pytest.mark.parametrize("depth", [90, 200, 300, 900, 5_000, 1_000_000])
async def test_a_pushed_task_that_nests_too_deep_is_refused_by_line(yard: Yard, depth: int) -> None:
    manifest = orjson.loads(_manifest("1"))
    manifest["spec"]["tasks"] = {"stream": True}
    assert (await yard.admin.post("/v1/rolloutjobs", json=manifest)).status_code == 201
    line = f'{{"id": "t", "prompt": "p", "metadata": {{"a": {"[" * depth}{"]" * depth}}}}}\n'
    headers = {"Content-Type": "application/x-ndjson"}
    answer = await yard.admin.post("/v1/rolloutjobs/deep/tasks", content=line, headers=headers)
    assert answer.status_code == (200 if depth == 90 else 422), answer.text
    if depth > 90:
        assert answer.json()["detail"].startswith("line 1: ")


HALF = "holds half of a character"


@pytest.mark.attack(
    'a text with half of a character (`"\\ud800"`) cannot be written again, so that the call or every '
    "reader of the job fails",
    surface="bodies in JSON, tasks",
    stopped_by="refused by line and field, wherever tasks enter",
)
async def test_half_a_character_is_refused_by_field(yard: Yard) -> None:
    """It could be stored nowhere, and a job with it could not be written again."""
    half = '["\\ud800"]'
    answer = await yard.admin.post("/v1/rolloutjobs", content=_manifest(half))
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(f"spec.tasks.inline[0].metadata.a[0]: {HALF}")
    manifest = orjson.loads(_manifest("1"))
    manifest["spec"]["tasks"] = {"stream": True}
    assert (await yard.admin.post("/v1/rolloutjobs", json=manifest)).status_code == 201
    task = f'{{"id": "t", "prompt": "p", "metadata": {{"a": {half}}}}}'
    for text, kind, status, where in (
        (f"\n{task}\n", "application/x-ndjson", 422, "line 2: metadata.a[0]"),
        (f'{{"tasks": [{task}]}}', "application/json", 400, "tasks[0].metadata.a[0]"),
    ):
        headers = {"Content-Type": kind}
        answer = await yard.admin.post("/v1/rolloutjobs/deep/tasks", content=text, headers=headers)
        assert answer.status_code == status
        assert answer.json()["detail"].startswith(f"{where}: {HALF}")


@pytest.mark.attack(
    "values that JSON does not have are an error of the server, which workers ask again for ever",
    surface="results of a worker",
    stopped_by="they are refused with 400",
)
async def test_no_result_of_a_worker_is_an_error_of_the_server(yard: Yard) -> None:
    """A worker would repeat an answer of 500 for ever, as if the control plane were away."""
    await yard.submit("mine")
    http = yard.client(yard.job_token("mine"))
    (lease,) = await yard.lease(http, "mine", init=1)
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    packed = {"Content-Type": "application/msgpack"}
    for value in (deep, b"bytes", msgpack.Timestamp(1), msgpack.ExtType(5, b"x")):
        body = {"worker": "w", "results": [result(lease, carry={"a": value})]}
        answer = await http.post("/v1/leases/complete", content=msgpack.packb(body), headers=packed)
        assert answer.status_code == 400, (value, answer.text)
    keys = msgpack.packb({"worker": "w", "results": [result(lease, carry={"a": {b"k": 1}})]})
    assert (await http.post("/v1/leases/complete", content=keys, headers=packed)).status_code == 400
    fine = await http.post("/v1/leases/complete", json={"worker": "w", "results": [result(lease)]})
    assert fine.json()["outcomes"][0]["outcome"] == "accepted"


@pytest.mark.attack(
    "a body of brackets takes thirty times its size in memory",
    surface="calls of a worker",
    stopped_by="small calls take small bodies, counted as they come",
)
async def test_bodies_of_small_calls_are_small(yard: Yard) -> None:
    """A megabyte of brackets takes thirty when it is decoded."""
    await yard.submit("mine")
    http = yard.client(yard.job_token("mine"))
    body = b'{"capacity": [' + b"[]," * (SMALL // 3) + b"[]]}"
    for path in ("/v1/leases", "/v1/leases/route", "/v1/claims"):
        assert (await http.post(path, content=body)).status_code == 413

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 100_000):
                yield body[at : at + 100_000]

        assert (await http.post(path, content=chunks())).status_code == 413


@pytest.mark.attack(
    "a pool's author names a server whose packed answer fills the memory",
    surface="answers of backends",
    stopped_by="nothing packed is asked for or unpacked",
)
@pytest.mark.parametrize("client", ["httpx", "aiohttp"])
async def test_a_packed_answer_of_a_backend_is_not_unpacked(client: str) -> None:
    """An author names the servers of a pool. Half a megabyte would become half a gigabyte."""
    bomb = gzip.compress(bytes(256 << 20), 9)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + bomb)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/metrics"
    tracemalloc.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as http, AiohttpTransport(5.0) as aiohttp:
            transport = HttpxTransport(http) if client == "httpx" else aiohttp
            with pytest.raises(BackendMismatch, match="compressed"):
                await transport.request("GET", url, seconds=patience(60), limit=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        listening.close()
    assert peak < 16 << 20, "bytes; the answer would have 256 MiB"


@pytest.mark.attack(
    "an event that never ends, or comments without end, fill a worker's memory",
    surface="answers of backends",
    stopped_by="an event has at most 64 MiB, and nothing is kept of a line that is no event; a stream "
    "without tokens ends as a hang",
)
@pytest.mark.parametrize("piece", [b"data: " + b"x" * 65_530, b": " + b"x" * 65_533 + b"\n"])
async def test_a_stream_of_a_backend_fills_no_memory(piece: bytes) -> None:
    """An author names the servers of a pool."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1024):
                writer.write(piece)
                await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/generate"
    events: list[bytes | bytearray] = []
    refused = pytest.raises(BackendMismatch, match="longer than") if b"\n" not in piece else nullcontext()
    tracemalloc.start()
    try:
        async with AiohttpTransport(5.0) as transport, asyncio.timeout(patience(60)):
            with refused:
                await transport.stream(url, {}, events.append, limit=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        listening.close()
    assert events == []
    assert peak < 16 << 20, "bytes; 64 MiB were sent"
