"""A policy that attacks the gateway of its rollout, to which a port of its sandbox leads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.gateway import server as server_module
from rollyard_pipeline.gateway.calls import ModelCall
from rollyard_pipeline.gateway.interface import PendingReply
from rollyard_pipeline.gateway.server import GatewayServer
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxProvider, SandboxRequest
from rollyard_sandbox.client.results import ExecResult
from rollyard_sandbox.errors import SandboxError
from rollyard_testing.gateway import ScriptedGateway, ScriptedReply
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.rootfolder import make_image, make_sif, podman_image

pytestmark = pytest.mark.attack(boundary="network", surface="gateway")

LIMIT_SECONDS = patience(40.0)
PYTHON = "/.rollyard/venv/bin/python"
PRELUDE = """
import contextlib, json, os, socket, struct, sys, time
PORT, KEY, LIMIT = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
CHAT = "/v1/chat/completions"
def call(path=CHAT, body=None, key=KEY, method="POST", more=()):
    if body is None:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", *more]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if not any("content-length" in line.lower() or "transfer-encoding" in line.lower() for line in more):
        lines.append(f"Content-Length: {len(body)}")
    return "\\r\\n".join([*lines, "", ""]).encode() + body
def connect():
    sock = socket.create_connection(("127.0.0.1", PORT), timeout=LIMIT)
    return sock
def rest(sock):
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data
def answer(sock):
    # Read one answer that has a Content-Length.
    data = b""
    while b"\\r\\n\\r\\n" not in data:
        piece = sock.recv(1 << 16)
        if not piece:
            return data.decode("latin-1")
        data += piece
    head, _, body = data.partition(b"\\r\\n\\r\\n")
    lines = head.lower().split(b"\\r\\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
    while len(body) < length:
        piece = sock.recv(1 << 16)
        if not piece:
            break
        body += piece
    return (head + b"\\r\\n\\r\\n" + body).decode("latin-1")
def one(*args, **named):
    with connect() as sock:
        sock.sendall(call(*args, **named))
        return answer(sock)
def status(text):
    return int(text.split(" ", 2)[1]) if text.startswith("HTTP/1.") else 0
def say(value):
    print(json.dumps(value))
"""


class Tireless(ScriptedGateway):
    """A gateway that answers every call."""

    async def answer(self, call: ModelCall, protocol: str) -> PendingReply:
        self.say(ScriptedReply(f"reply {len(self.calls)}"))
        return await super().answer(call, protocol)


@dataclass(frozen=True, slots=True)
class Policy:
    """Programs of a sandbox to which the gateway of its rollout is lent."""

    sandbox: Sandbox
    gateway: Tireless
    server: GatewayServer
    port: int

    async def ran(self, code: str, port: int | None = None) -> ExecResult:
        """Run a program that knows the port and the key."""
        arguments = [str(port or self.port), self.gateway.key, str(LIMIT_SECONDS / 2)]
        argv = [PYTHON, "-c", PRELUDE + code, *arguments]
        return await self.sandbox.client.run(argv, timeout=LIMIT_SECONDS)

    async def said(self, code: str, port: int | None = None) -> Any:
        """Return what such a program says."""
        result = await self.ran(code, port)
        assert result.exit_code == 0, result.text()
        return json.loads(result.text().splitlines()[-1])

    async def still_served(self) -> None:
        """Check that an honest call is answered."""
        before = len(self.gateway.calls)
        assert await self.said("say(status(one()))") == 200
        assert len(self.gateway.calls) == before + 1


Lend = Callable[..., AbstractAsyncContextManager[Policy]]


@pytest.fixture(scope="module")
def gateway_sif(apptainer_works: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_sif(make_image(tmp_path_factory.mktemp("image") / "root")))


@pytest.fixture(scope="module")
def gateway_image(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with podman_image(make_image(tmp_path_factory.mktemp("image") / "root")) as name:
        yield name


@pytest.fixture(
    params=[
        "bubblewrap",
        pytest.param("apptainer", marks=pytest.mark.apptainer),
        pytest.param("podman", marks=(pytest.mark.podman, pytest.mark.nightly)),
    ]
)
async def provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxProvider]:
    request.getfixturevalue(f"{request.param}_works")
    names = {"apptainer": "gateway_sif", "podman": "gateway_image"}
    image = request.getfixturevalue(names[request.param]) if request.param in names else None
    found = open_provider(
        request.param,
        run_dir=tmp_path_factory.mktemp("s"),
        node="n",
        apptainer=ApptainerOptions(default_image=image),
        default_image=image,
    )
    await found.start()
    try:
        yield found
    finally:
        for sandbox in found.in_use():
            await found.release(sandbox)
        await found.aclose()


@pytest.fixture
def lend(provider: SandboxProvider) -> Lend:
    """Return a context manager with a sandbox that has a gateway."""

    @asynccontextmanager
    async def lent(name: str = "r-1") -> AsyncIterator[Policy]:
        sandbox = await provider.acquire(
            SandboxRequest(memory_bytes=384 << 20, disk_bytes=16 << 20, processes=64),
            LeaseRef(rollout=name, token=1),
        )
        gateway = Tireless(key=f"key of {name}".replace(" ", "-"))
        server = GatewayServer(gateway, name)
        async with sandbox, server.lent(sandbox.client) as url:
            yield Policy(sandbox, gateway, server, int(url.rpartition(":")[2]))

    return lent


@pytest.mark.attack(
    "another rollout's key, a part of the own one, or none",
    stopped_by="each rollout's gateway takes its own key only, and answers 401 before it reads the call",
)
async def test_no_other_key_is_taken(lend: Lend) -> None:
    async with lend("r-1") as policy, lend("r-2") as other:
        assert policy.gateway.key != other.gateway.key
        answers = await policy.said(f"""
keys = [{other.gateway.key!r}, KEY[:-1], KEY + "x", KEY.upper(), "", None]
paths = [CHAT, "/v1/responses", "/v1/messages", "/v1beta/models/m:generateContent", "/elsewhere"]
say([[status(one(path, key=key)) for key in keys] for path in paths])
""")
        assert answers == [[401] * 6] * 5
        assert (policy.gateway.calls, other.gateway.calls) == ([], [])
        await policy.still_served()


@pytest.mark.attack(
    "another rollout's gateway, with its key",
    stopped_by="the port is on the loopback of the other sandbox's own network namespace",
)
async def test_another_sandboxs_gateway_is_not_reached(lend: Lend) -> None:
    async with lend("r-1") as policy, lend("r-2") as other:
        for port in {policy.port, other.port}:
            # In the policy's sandbox there is at most its own gateway at this port.
            await policy.ran(f"KEY = {other.gateway.key!r}; say(status(one()))", port)
        await policy.ran("""
for port in range(1024, 65536):
    with socket.socket() as sock:
        if not sock.connect_ex(("127.0.0.1", port)):
            with contextlib.suppress(OSError):
                sock.settimeout(1)
                sock.sendall(call(key="key-of-r-2"))
                sock.recv(100)
""")
        assert other.gateway.calls == []
        await other.still_served()


@pytest.mark.attack(
    "the control plane, other ports of the worker or other hosts: by Host, by an absolute URL, by CONNECT",
    stopped_by="the server forwards nothing, and the sandbox has no other way out",
)
async def test_the_gateway_leads_nowhere_else(lend: Lend) -> None:
    reached: list[bytes] = []

    async def plane(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(await reader.read(100))
        writer.close()

    async with await asyncio.start_server(plane, "127.0.0.1", 0) as listener, lend() as policy:
        port = listener.sockets[0].getsockname()[1]
        target = f"127.0.0.1:{port}"
        answers = await policy.said(f"""
answers = []
for method, path, more in [
    ("GET", "http://{target}/v1/jobs", []), ("POST", "http://{target}/v1/jobs", []),
    ("CONNECT", "{target}", []), ("CONNECT", "{target}", ["Upgrade: websocket", "Connection: Upgrade"]),
    ("GET", "/v1/jobs", ["Host: {target}", "X-Forwarded-Host: {target}"]), ("GET", "//{target}/v1/jobs", []),
    ("OPTIONS", "*", []), ("TRACE", "/", []), ("GET", "/v1/jobs@{target}", []),
]:
    with connect() as sock:
        sock.sendall(call(path, b"", method=method, more=more))
        answers.append(status(answer(sock)))
say(answers)
""")
        assert set(answers) <= {400, 404}, answers
        direct = await policy.ran("say(socket.socket().connect_ex(('127.0.0.1', PORT)))", port)
        assert int(direct.text()) != 0
        assert reached == []
        await policy.still_served()


@pytest.mark.attack(
    "paths out of the API: parents, encoded slashes, other methods, files",
    stopped_by="a fixed list of paths, and nothing behind them is a file",
)
async def test_there_are_no_other_paths(lend: Lend) -> None:
    async with lend() as policy:
        answers = await policy.said("""
paths = [
    "/../../etc/passwd", "/v1/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1%2f..%2fmodels",
    "/v1/files",
    "/v1/chat/completions/../../../x", "/v1beta/models/m:evil", "/v1beta/models/..%2f..:x", "/admin",
    "/v1/chat/completions%00", "/v1/responses/compact", "/metrics", "/" + "a" * 8000,
]
say([[status(one(path, method=method)) for path in paths] for method in ("GET", "POST", "PUT", "DELETE")])
""")
        assert {each for row in answers for each in row} == {404}, answers
        assert policy.gateway.calls == []


@pytest.mark.attack(
    "100 MB of body, a length of 1 GB, chunks without end",
    stopped_by="16 MB are the most: more is refused with 413 before it is held, and the connection ends",
)
async def test_large_bodies_are_refused(lend: Lend) -> None:
    async with lend() as policy:
        answers = await policy.said("""
def sent(more, pieces):
    with connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(call(body=b"", more=more))
            for piece in pieces:
                sock.sendall(piece)
        return status(rest(sock).decode("latin-1"))
zeros = b" " * (1 << 20)
chunk = b"100000\\r\\n" + zeros + b"\\r\\n"
say([
    sent(["Content-Length: 104857600"], (zeros for _ in range(100))),
    sent(["Content-Length: 1073741824"], ()),
    sent(["Transfer-Encoding: chunked"], (chunk for _ in range(1 << 40))),
])
""")
        # A client that is still sending may lose the answer with its connection.
        assert set(answers[::2]) <= {413, 0}
        assert answers[1] == 413
        assert policy.gateway.calls == []
        assert policy.server._held == 0
        await policy.still_served()


@pytest.mark.attack(
    "small bodies that become large: gzip of zeros, nesting, millions of empty lists",
    stopped_by="nothing is decompressed, levels are bounded, and values are counted before they are parsed",
)
async def test_bodies_that_grow_are_refused(lend: Lend) -> None:
    async with lend() as policy:
        answers = await policy.said("""
import zlib
bomb, names = zlib.compress(bytes(50 << 20), 9), ("gzip", "deflate", "br", "zstd", "gzip, gzip")
say([
    *(status(one(body=bomb, more=[f"Content-Encoding: {name}"])) for name in names),
    status(one(body=bomb, more=["Content-Encoding: identity"])),
    status(one(body=b'{"a":' * 100_000)),
    status(one(body=b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}")),
    status(one(body=b'{"messages":[' + b"[]," * 5_000_000 + b"[]]}")),
    status(one(body=b'{"messages":[' + b"1," * 7_000_000 + b"1]}")),
])
""")
        assert answers == [400] * 7 + [413] * 3
        assert policy.gateway.calls == []
        await policy.still_served()


@pytest.mark.attack(
    "10,000 connections, most of them silent",
    stopped_by="each needs a tunnel, of which the worker gives 32 at once, and silent ones are cut",
)
async def test_connections_are_bounded(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.5)
    most = 0

    async def counting(policy: Policy) -> None:
        nonlocal most
        while True:
            most = max(most, len(policy.server._manager.connections))
            await asyncio.sleep(0.01)

    async with lend() as policy:
        counter = asyncio.create_task(counting(policy))
        opened = await policy.said("""
opened = 0
for _ in range(10):
    socks = []
    for number in range(1000):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", PORT))
        opened += 1
        with contextlib.suppress(OSError):
            sock.send(b"POST / HTTP/1.1" if number % 2 else b"")
        socks.append(sock)
    time.sleep(0.1)
    for sock in socks:
        sock.close()
say(opened)
""")
        assert opened == 10_000
        await policy.still_served()
        counter.cancel()
    assert most <= server_module.TUNNEL_LIMITS.connections


@pytest.mark.attack(
    "heads and bodies that come byte by byte",
    stopped_by="a head must come within 15 s and a body within 60 s, however many bytes have come",
)
async def test_slow_requests_are_cut(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(server_module, "BODY_SECONDS", 0.5)
    async with lend() as policy:
        cut = await policy.said("""
def slow(start, piece):
    with connect() as sock:
        sock.settimeout(0.05)
        sock.sendall(start)
        data, ends = b"", time.monotonic() + LIMIT
        while time.monotonic() < ends:
            try:
                sock.sendall(piece)
                got = sock.recv(4096)
                if not got:
                    break
                data += got
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            return "never"
        return status(data.decode("latin-1"))
say([
    slow(b"POST /v1/chat/completions HTTP/1.1\\r\\n", b"X-A: b\\r\\n"),
    slow(b"", b"P"),
    slow(call(body=b"{", more=["Content-Length: 1000000"]), b" "),
    slow(call(body=b"", more=["Transfer-Encoding: chunked"]), b"1\\r\\n \\r\\n"),
])
""")
        assert set(cut) <= {0, 400}
        assert policy.gateway.calls == []
        await policy.still_served()


@pytest.mark.attack(
    "requests of two readings: two lengths, a length and chunks, folded and malformed fields",
    stopped_by="aiohttp's strict parser refuses them, and the connection ends",
)
async def test_a_request_has_one_reading(lend: Lend) -> None:
    async with lend() as policy:
        answers = await policy.said("""
def sent(*fields, body=b""):
    with connect() as sock:
        lines = [f"POST {CHAT} HTTP/1.1", "Host: g", f"Authorization: Bearer {KEY}", *fields, "", ""]
        sock.sendall("\\r\\n".join(lines).encode() + body + call())
        sock.settimeout(3)
        data = b""
        with contextlib.suppress(OSError):
            while piece := sock.recv(65536):
                data += piece
        return data.decode("latin-1").count("HTTP/1.1 200"), status(data.decode("latin-1"))
say([
    sent("Content-Length: 0", "Content-Length: 40"),
    sent("Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\\r\\n\\r\\n"),
    sent("Transfer-Encoding: chunked, identity", body=b"0\\r\\n\\r\\n"),
    sent("Transfer-Encoding: xchunked", body=b"0\\r\\n\\r\\n"),
    sent("Content-Length: +0"),
    sent("Content-Length: 0x4", body=b"null"),
    sent("Content-Length : 0"),
    sent("X: a", " Content-Length: 40"),
    sent("Transfer-Encoding: chunked", body=b"-1\\r\\n\\r\\n0\\r\\n\\r\\n"),
    sent("Bad\\x00Name: a"),
    sent("Content-Length: 99999999999999999999999999"),
])
""")
        assert all(status in (400, 413) for _, status in answers), answers
        assert all(count == 0 for count, _ in answers), answers
        assert policy.gateway.calls == []
        await policy.still_served()


@pytest.mark.attack(
    "heads that are huge in a line, in a field, or in their number",
    stopped_by="8,190 bytes of a line or field, and 100 fields, are the most",
)
async def test_large_heads_are_refused(lend: Lend, caplog: pytest.LogCaptureFixture) -> None:
    async with lend() as policy:
        answers = await policy.said("""
def sent(data):
    with connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        return status(rest(sock).decode("latin-1"))
say([
    sent(call("/" + "a" * 100_000)),
    sent(call(more=["X: " + "a" * 100_000])),
    sent(call(more=["X" * 100_000 + ": a"])),
    sent(call(more=[f"X-{number}: a" for number in range(10_000)])),
    sent(b"\\x16\\x03\\x01" + os.urandom(10_000)),
    sent(b"forged\\nline HTTP/1.1\\r\\n\\r\\n"),
])
""")
        assert set(answers) <= {400, 0}, answers
        assert policy.gateway.calls == []
        await policy.still_served()
    assert caplog.text == "", "programs of the sandbox write nothing into the worker's log"


@pytest.mark.attack(
    "hundreds of requests at once on one connection",
    stopped_by="one is answered after the other, and of those that wait the parser holds 32",
)
async def test_pipelined_requests_are_answered_in_order(lend: Lend) -> None:
    async with lend() as policy:
        said = await policy.said("""
import re, threading
with connect() as sock:
    sent = call() * 199 + call(more=["Connection: close"])
    threading.Thread(target=sock.sendall, args=(sent,), daemon=True).start()
    time.sleep(0.5)
    text = rest(sock).decode("latin-1")
say([int(number) for number in re.findall(r"reply ([0-9]+)", text)])
""")
        assert said == list(range(200))


@pytest.mark.attack(
    "requests without number keep the worker busy",
    stopped_by="a pace for each rollout: 500 at once, and then 100 in each second",
)
async def test_requests_are_paced(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_REQUESTS_PER_SECOND", 0.001)
    monkeypatch.setattr(server_module, "_BURST", 5)
    async with lend() as policy:
        answered = await policy.said("""
answered = 0
with connect() as sock:
    sock.settimeout(2)
    with contextlib.suppress(TimeoutError):
        for _ in range(20):
            sock.sendall(call())
            answered += status(answer(sock)) == 200
say(answered)
""")
        assert answered == len(policy.gateway.calls) <= 6


@pytest.mark.attack(
    "an answer is asked for and never read",
    stopped_by="at most 64 KiB wait for a client, which is cut after a minute",
)
async def test_a_client_that_does_not_read_is_cut(lend: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.5)
    async with lend() as policy:
        long = ScriptedReply("x" * 20_000_000, piece=20_000)
        monkeypatch.setattr(policy.gateway, "say", lambda reply: policy.gateway.script.append(long))
        whole = await policy.said("""
body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
with connect() as sock:
    sock.sendall(call(body=body))
    time.sleep(3)
    say(rest(sock).endswith(b"0\\r\\n\\r\\n"))
""")
        assert whole is False
        monkeypatch.undo()
        await policy.still_served()


@pytest.mark.attack(
    "a WebSocket, and what follows it",
    stopped_by="426; the connection ends with the answer",
)
async def test_there_is_no_websocket(lend: Lend) -> None:
    async with lend() as policy:
        said = await policy.said("""
more = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
answers = []
for method, path in (("GET", "/v1/responses"), ("GET", "/v1/chat/completions"), ("POST", CHAT)):
    with connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(call(path, b"", method=method, more=more) + b"\\x81\\x85mask" * 100_000)
        answers.append(status(rest(sock).decode("latin-1")))
say(answers)
""")
        assert said[0] in (426, 0)
        assert set(said) <= {426, 404, 400, 0}
        assert policy.gateway.calls == []
        await policy.still_served()


LATER = """
sock = connect()
sock.sendall(call())
print(status(answer(sock)), flush=True)
sys.stdin.readline()
def after(function):
    try:
        return status(function())
    except OSError:
        return 0
def again():
    sock.sendall(call())
    return answer(sock)
say([after(again), after(one)])
"""


@pytest.mark.attack(
    "calls after the harness has ended, on a connection from before or on a new one",
    stopped_by="with the harness, the worker closes all tunnels, and the exec server connects nobody",
)
async def test_calls_after_the_end_reach_nobody(provider: SandboxProvider) -> None:
    gateway = Tireless()
    async with await provider.acquire(SandboxRequest(), LeaseRef(rollout="r-1", token=1)) as sandbox:
        client = sandbox.client
        await client.write_file("later.py", (PRELUDE + LATER).encode())
        async with GatewayServer(gateway, "r-1").lent(client) as url:
            port = url.rpartition(":")[2]
            command = f"{PYTHON} later.py {port} {gateway.key} {LIMIT_SECONDS}"
            daemon = await client.start(command, timeout=LIMIT_SECONDS)
            await daemon.wait_for_output(b"200", timeout=LIMIT_SECONDS)
        await daemon.send_input(b"\n")
        result = await daemon.result()
        assert json.loads(result.text().splitlines()[-1]) == [0, 0], result.text()
        assert len(gateway.calls) == 1


@pytest.mark.attack(
    "a daemon keeps its connection open until the tests run, or makes a new one then",
    surface="Eval",
    stopped_by="the evaluation begins with everything killed, and closes the gateway's port for good",
)
@pytest.mark.parametrize("network", [False, True])
async def test_nothing_is_sampled_in_an_evaluation(lend: Lend, network: bool) -> None:
    async with lend() as policy:
        client = policy.sandbox.client
        await client.write_file("later.py", (PRELUDE + LATER).encode())
        command = f"{PYTHON} later.py {policy.port} {policy.gateway.key} {LIMIT_SECONDS}"
        daemon = await client.start(command, timeout=LIMIT_SECONDS)
        await daemon.wait_for_output(b"200", timeout=LIMIT_SECONDS)
        await client.begin_eval(network=network)
        assert (await daemon.result()).killed
        said = await policy.said("""
with socket.socket() as sock:
    say(sock.connect_ex(("127.0.0.1", PORT)))
""")
        assert said != 0
        with pytest.raises(SandboxError) as refused:
            await client.tunnel("gateway")
        assert refused.value.reason == "TunnelRefused"
        assert len(policy.gateway.calls) == 1
