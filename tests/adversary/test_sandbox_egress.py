"""A policy with a network: it reaches the hosts of its job's list, and never another one or the inside."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.egress.limits import MAX_NOTES, EgressLimits
from rollyard_pipeline.sandboxes.errors import SandboxImpossible
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxProvider, SandboxRequest
from rollyard_sandbox.errors import SandboxError
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.outside import (
    HOST,
    PLANE,
    PUBLIC,
    TALK,
    Outside,
    client_hello,
    with_extension,
)
from rollyard_testing.sandboxes.rootfolder import make_image, make_sif

pytestmark = pytest.mark.attack(boundary="network")


LIMIT_SECONDS = patience(20.0)


@pytest.fixture
async def outside(tmp_path: Path) -> AsyncIterator[Outside]:
    async with Outside().serving(tmp_path) as world:
        yield world


@pytest.fixture(params=["bubblewrap", pytest.param("apptainer", marks=pytest.mark.apptainer)])
async def provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxProvider]:
    request.getfixturevalue(f"{request.param}_works")
    folder = tmp_path_factory.mktemp("s")
    image = str(make_sif(make_image(folder / "root"))) if request.param == "apptainer" else None
    found = open_provider(
        request.param, run_dir=folder / "run", node="n", apptainer=ApptainerOptions(default_image=image)
    )
    await found.start()
    try:
        yield found
    finally:
        for sandbox in found.in_use():
            await found.release(sandbox)
        await found.aclose()


@dataclass(frozen=True, slots=True)
class Program:
    """Programs of a sandbox, to which a network is lent."""

    sandbox: Sandbox

    async def talk(self, sent: bytes, script: str = TALK) -> bytes:
        """Return what the proxy answers to these bytes."""
        result = await self.sandbox.client.run(["bash", "-c", script], stdin=sent, timeout=LIMIT_SECONDS)
        assert not result.timed_out, result.text()
        return result.output

    async def get(self, host: str, port: int, *fields: str) -> str:
        head = [f"GET http://{host}:{port}/ HTTP/1.1", *fields, "", ""]
        return (await self.talk("\r\n".join(head).encode())).decode(errors="replace")

    async def connect(self, host: str, port: int, then: bytes) -> bytes:
        return await self.talk(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".encode() + then)


Lend = Callable[..., AbstractAsyncContextManager[Program]]


@pytest.fixture
def lend(provider: SandboxProvider, outside: Outside) -> Lend:
    """Return a context manager with a sandbox that has a network."""

    @asynccontextmanager
    async def lent(egress: Egress | None = None, spec: SandboxSpec | None = None) -> AsyncIterator[Program]:
        lender = egress or outside.egress()
        sandbox = await provider.acquire(
            SandboxRequest(memory_bytes=192 << 20, disk_bytes=16 << 20, processes=64),
            LeaseRef(rollout="r-1", token=1),
        )
        try:
            async with sandbox, lender.lent(sandbox, spec or outside.spec(), "r-1", {}):
                yield Program(sandbox)
        finally:
            lender.close()

    return lent


HONEST_TRAFFIC = pytest.mark.attack(
    "what is allowed is refused, or TLS is changed on its way",
    surface="judgement",
    stopped_by="both are reached, and the certificate is the server's own",
)


@HONEST_TRAFFIC
async def test_what_is_allowed_is_reached(lend: Lend, outside: Outside) -> None:
    outside.body = b"x" * 1_000_000
    async with lend() as program:
        answer = await program.get(HOST, outside.port)
        assert answer.startswith("HTTP/1.1 200 OK")
        assert answer.endswith("x" * 1_000_000)
        fields = "Host: other.example.org\r\nContent-Length: 300000\r\n\r\n"
        posted = f"POST http://{HOST}:{outside.port}/ HTTP/1.1\r\n{fields}".encode()
        assert b" 200 OK" in await program.talk(posted + b"y" * 300_000)
        assert outside.received[-1].endswith(b"y" * 300_000)
        assert f"Host: {HOST}:{outside.port}\r\n".encode() in outside.received[-1]
        assert b"other.example.org" not in outside.received[-1]
        assert outside.resolved == [HOST, HOST], "each connection resolves its name once"


@HONEST_TRAFFIC
async def test_tls_goes_through_unchanged(lend: Lend, outside: Outside, provider: SandboxProvider) -> None:
    async with lend() as program:
        # The server waits for more after its first messages.
        hello = f"CONNECT {HOST}:{outside.tls_port} HTTP/1.1\r\n\r\n".encode() + client_hello(HOST)
        answer = await program.talk(hello, TALK.replace("cat <&3", "head -c 60 <&3"))
        assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n\r\n\x16\x03"), answer
        if provider.name != "bubblewrap":
            return  # The image has no client that speaks TLS.
        certificate = (outside.folder / "tls.crt").read_bytes()
        await program.sandbox.client.write_file("ca.crt", certificate)
        result = await program.sandbox.client.run(
            ["curl", "-sS", "--cacert", "ca.crt", f"https://{HOST}:{outside.tls_port}/"],
            timeout=LIMIT_SECONDS,
        )
        assert (result.exit_code, result.text()) == (0, "reached"), result.text()


NOT_ALLOWED = (
    "other.example.org", f"evil{HOST}", f"{HOST}.evil.net", "example.org", PUBLIC, "127.0.0.1", "2130706434",
    "0x7f000002", "127.2", "[::1]", "[::ffff:127.0.0.2]", "localhost", "pkgs", f"{HOST}%2eevil.net",
)  # fmt: skip


@pytest.mark.attack(
    "other hosts and ports, names that look alike, addresses in any spelling",
    surface="proxy",
    stopped_by="names are compared as a whole, and addresses are refused before anything is resolved",
)
async def test_other_hosts_and_ports_and_addresses_are_not_reached(lend: Lend, outside: Outside) -> None:
    async with lend() as program:
        for host in NOT_ALLOWED:
            answer = await program.get(host, outside.port)
            assert answer.startswith(("HTTP/1.1 403", "HTTP/1.1 400")), (host, answer)
            shown = await program.connect(host, outside.tls_port, client_hello(HOST))
            assert shown.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")), (host, shown)
        for port in (22, 80, 443, outside.port + 1):
            assert (await program.get(HOST, port)).startswith("HTTP/1.1 403")
    assert outside.received == []
    assert outside.resolved == [], "what is not on the list is not even resolved"


INNER = (
    "127.0.0.1", "10.0.0.5", "172.17.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254", "168.63.129.16",
    "0.0.0.0",
    "224.0.0.1", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "::ffff:127.0.0.2", "::127.0.0.2",
    "64:ff9b::7f00:2", "2002:7f00:2::1",
)  # fmt: skip


@pytest.mark.attack(
    "an allowed name leads to loopback, an inner network or metadata, also as an IPv4 address in IPv6",
    surface="proxy",
    stopped_by="every address of the name must be public; the answer does not show it",
)
async def test_names_that_lead_inside_are_refused(
    lend: Lend, outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = {f"h{number}.example.net": address for number, address in enumerate(INNER)}
    outside.names |= {host: [[PUBLIC, address]] for host, address in hosts.items()}
    spec = outside.spec(f"*.example.net:{outside.port}")
    async with lend(spec=spec) as program:
        for host, address in hosts.items():
            answer = await program.get(host, outside.port)
            assert answer.startswith("HTTP/1.1 403"), (address, answer)
            assert "has an address that is not public" in answer
            assert address not in answer, "the policy must not learn what a name means inside"
    assert outside.received == []
    assert f"h1.example.net:{outside.port} has the address 10.0.0.5, which is private" in caplog.text


@pytest.mark.attack(
    "a name changes its address after it was allowed (DNS rebinding)",
    surface="proxy",
    stopped_by="one resolution for each connection, and what was checked is connected to",
)
async def test_a_name_that_turns_inside_after_it_was_allowed_is_refused(lend: Lend, outside: Outside) -> None:
    outside.names[HOST] = [[PUBLIC], ["127.0.0.1"]]
    async with lend() as program:
        assert " 200 OK" in await program.get(HOST, outside.port)
        answer = await program.get(HOST, outside.port)
        assert answer.startswith("HTTP/1.1 403")
        assert "has an address that is not public" in answer
    assert outside.resolved == [HOST, HOST], (
        "there is no other resolution between the check and the connection"
    )


@pytest.mark.attack(
    "the control plane or a backend at a public address, under whatever name",
    surface="proxy",
    stopped_by="their names and addresses are refused",
)
async def test_the_installation_is_not_reached_even_at_public_addresses(
    lend: Lend, outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    outside.names |= {"plane.example.net": [[PLANE]], "alias.example.net": [[PLANE]]}
    egress = outside.egress(f"https://plane.example.net:{outside.port}")
    async with lend(
        egress, outside.spec(f"*.example.net:{outside.port}", f"{HOST}:{outside.port}")
    ) as program:
        for host in ("plane.example.net", "alias.example.net"):
            assert (await program.get(host, outside.port)).startswith("HTTP/1.1 403")
        assert " 200 OK" in await program.get(HOST, outside.port)
        egress.infrastructure.add(f"http://{PUBLIC}:8000")  # A backend that a lease names.
        assert (await program.get(HOST, outside.port)).startswith("HTTP/1.1 403")
    assert len(outside.received) == 1
    assert "is the control plane or a backend" in caplog.text


@pytest.mark.attack(
    "a tunnel to another site of the same server, or of another protocol",
    surface="`CONNECT`",
    stopped_by="TLS must follow, and its server name must be that of CONNECT, in the clear; what a "
    "request inside of TLS names is not seen",
)
async def test_connect_is_no_way_to_another_name(lend: Lend, outside: Outside) -> None:
    hello = client_hello(HOST)
    tries = {
        "another name": client_hello("other.example.org"),
        "a longer name": client_hello(f"{HOST}.evil.net"),
        "no name": client_hello(None),
        "two names": with_extension(hello, 0, b"\0\x08\0\0\x05a.org"),
        "a hidden name": with_extension(hello, 0xFE0D, b"\0" * 16),
        "plain HTTP": f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode(),
        "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
        "random bytes": b"\x16\x03\x01\x00\x05aaaaa",
    }
    async with lend() as program:
        for name, sent in tries.items():
            for port in (outside.port, outside.tls_port):
                answer = await program.connect(HOST, port, sent)
                assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n", (name, answer)
        # What had left before would have arrived before this.
        assert " 200 OK" in await program.get(HOST, outside.port)
        assert len(outside.received) == 1, "no byte of it has left"


@pytest.mark.attack(
    "a second request, another `Host`, or a body of two readings reaches another site",
    surface="plain HTTP",
    stopped_by="one request for each connection, which the proxy writes again",
)
async def test_one_request_is_no_way_to_a_second_one(lend: Lend, outside: Outside) -> None:
    outside.pause = 0.3  # The second request is there before the first one is answered.
    first = f"GET http://{HOST}:{outside.port}/a HTTP/1.1\r\n"
    second = b"GET http://other.example.org/ HTTP/1.1\r\nHost: other.example.org\r\n\r\n"
    async with lend() as program:
        await program.talk(first.encode() + b"\r\n" + second)
        await program.talk(first.encode() + b"Content-Length: 2\r\n\r\nok" + second)
        for fields in (
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"Content-Length: 0\r\nContent-Length: 70\r\n\r\n",
            b"X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ):
            answer = await program.talk(first.encode() + fields + second)
            assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 411")), answer
        await program.get(
            HOST, outside.port, "Connection: Upgrade", "Upgrade: h2c", "Host: other.example.org"
        )
    assert len(outside.received) == 3
    assert not any(b"other.example.org" in each or b"h2c" in each for each in outside.received)


@pytest.mark.attack(
    "a test, or what Run left, reaches a host during the evaluation",
    surface="Eval",
    stopped_by="the exec server closes port and connections before it begins, and takes no other ones",
)
async def test_an_evaluation_closes_the_network_for_good(lend: Lend, outside: Outside) -> None:
    outside.pause = 30.0
    async with lend() as program:
        client = program.sandbox.client
        open_connection = asyncio.create_task(
            program.talk(f"GET http://{HOST}:{outside.port}/ HTTP/1.1\r\n\r\n".encode())
        )
        async with asyncio.timeout(LIMIT_SECONDS):
            await outside.arrived.wait()
        port = (await client.run(["bash", "-c", 'echo "${http_proxy##*:}"'])).text().strip()
        await client.begin_eval()
        assert b" 200 " not in await open_connection
        tried = await client.run(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo WON"])
        assert "WON" not in tried.text()
        with pytest.raises(SandboxError) as refused:
            await client.tunnel()  # Another worker, or one whose lease has ended, cannot lend one again.
        assert refused.value.reason == "TunnelRefused"


@pytest.mark.attack(
    "what runs on after a stage uses the network",
    surface="sandbox between stages",
    stopped_by="it is there only while a worker lends it",
)
async def test_nothing_is_reached_when_no_worker_lends(
    lend: Lend, outside: Outside, provider: SandboxProvider
) -> None:
    async with lend() as program:
        handle = program.sandbox.handle
        assert " 200 OK" in await program.get(HOST, outside.port)
    async with await provider.attach(handle) as again:
        assert "HTTP" not in await Program(again).get(HOST, outside.port)
    assert len(outside.received) == 1


CONNECTIONS = pytest.mark.attack(
    "connections without number or end, silent ones, bytes without end",
    surface="worker",
    stopped_by="bounds for each sandbox and for the worker",
)


@CONNECTIONS
async def test_connections_are_bounded(lend: Lend, outside: Outside) -> None:
    outside.pause = 0.1
    limits = EgressLimits(connections=3, waiting=2, per_second=100.0, head_seconds=2.5)
    async with lend(outside.egress(limits=limits)) as program:
        # Silent connections give their places back, and those that wait are served.
        silent = [asyncio.create_task(program.talk(b"GET ")) for _ in range(3)]
        answers = await asyncio.gather(*(program.get(HOST, outside.port) for _ in range(8)))
        assert all(" 200 OK" in answer for answer in answers)
        assert all(b"200" not in answer for answer in await asyncio.gather(*silent))
    assert outside.most_at_once <= 3


@pytest.mark.attack(
    "a few sandboxes hold all connections that the worker serves",
    surface="worker",
    stopped_by="each sandbox has 8 that others cannot take",
)
async def test_connections_held_by_one_sandbox_leave_others_theirs(lend: Lend, outside: Outside) -> None:
    """One sandbox has all connections that the worker serves, and another one still has its own."""
    limits = EgressLimits(connections=4, waiting=2, per_second=100.0, reserved=1, worker_connections=4)
    egress = outside.egress(limits=limits)
    outside.pause = 1e4
    async with lend(egress) as hostile, lend(egress) as other:
        held = []
        for _ in range(4):
            outside.arrived.clear()
            held.append(asyncio.create_task(hostile.get(HOST, outside.port)))
            async with asyncio.timeout(LIMIT_SECONDS):
                await outside.arrived.wait()
        outside.pause = 0.0
        assert " 200 OK" in await other.get(HOST, outside.port)
        assert (outside.at_once, outside.most_at_once) == (4, 5), "the held ones are still there"
        for each in held:
            each.cancel()


@dataclass(frozen=True, slots=True)
class SlowNames:
    """Name servers that do not answer for names below `slow.org` until they are let go."""

    asked: asyncio.Queue[str]
    go: threading.Event


@pytest.fixture
async def slow_names(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlowNames]:
    names = SlowNames(asyncio.Queue(), threading.Event())
    real, loop = socket.getaddrinfo, asyncio.get_running_loop()

    def looked_up(host: str, *args: Any, **named: Any) -> Any:
        if host.endswith(".slow.org"):
            loop.call_soon_threadsafe(names.asked.put_nowait, host)
            names.go.wait(LIMIT_SECONDS)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(PUBLIC if host == HOST else host, *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    yield names
    names.go.set()


@pytest.mark.attack(
    "names whose servers do not answer keep other sandboxes' names from being resolved",
    surface="worker",
    stopped_by="the threads that resolve names are each sandbox's own, two at most",
)
async def test_slow_names_of_one_sandbox_do_not_stop_others(
    lend: Lend, outside: Outside, slow_names: SlowNames
) -> None:
    """An allowed wildcard is enough for names that no server answers; their look-ups cannot be cancelled."""
    egress = Egress(check=lambda address: "")
    spec = outside.spec(f"{HOST}:{outside.port}", f"*.slow.org:{outside.port}")
    async with lend(egress, spec) as hostile, lend(egress, spec) as other:
        asking = [asyncio.create_task(hostile.get(f"a{n}.slow.org", outside.port)) for n in range(16)]
        async with asyncio.timeout(LIMIT_SECONDS):
            found = {await slow_names.asked.get() for _ in range(2)}
        assert len(found) == 2
        assert " 200 OK" in await other.get(HOST, outside.port)
        slow_names.go.set()
        assert all(" 502 " in answer for answer in await asyncio.gather(*asking))


@pytest.mark.attack(
    "the control plane's name cannot be resolved, so that its address passes for any other",
    surface="proxy",
    stopped_by="nothing is reached until it has been resolved once, or has no address for certain",
)
async def test_an_installation_whose_address_is_unknown_is_not_reached(
    lend: Lend, outside: Outside, slow_names: SlowNames
) -> None:
    """While the control plane's name cannot be resolved, an alias of it could be any public address."""
    slow_names.go.set()
    egress = Egress([f"https://plane.slow.org:{outside.port}"], check=lambda address: "")
    async with lend(egress) as program:
        answer = await program.get(HOST, outside.port)
        assert answer.startswith("HTTP/1.1 502"), answer
        assert "cannot be checked at present" in answer
        # A backend's author could otherwise keep all sandboxes from the network.
        egress = Egress(check=lambda address: "")
        egress.infrastructure.add("http://backend.slow.org:8000")
    async with lend(egress) as program:
        assert " 200 OK" in await program.get(HOST, outside.port)
    assert len(outside.received) == 1


@CONNECTIONS
async def test_bytes_are_bounded(lend: Lend, outside: Outside, caplog: pytest.LogCaptureFixture) -> None:
    outside.body = b"x" * 1_000_000
    async with lend(outside.egress(limits=EgressLimits(total_bytes=400_000))) as program:
        assert len(await program.get(HOST, outside.port)) < 500_000
        assert "as many bytes as it may" in await program.get(HOST, outside.port)
    assert "the limit of 400000 bytes is reached" in caplog.text


@pytest.mark.attack(
    "refusals flood it, or forge lines",
    surface="worker's log",
    stopped_by="20 lines of bounded length for each sandbox, once for each host",
)
async def test_refusals_do_not_flood_or_forge_the_log(
    lend: Lend, outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with lend() as program:
            for number in range(MAX_NOTES + 10):
                await program.get(f"h{number}.evil.net", 80)
            await program.talk(b"GET http://a.evil.net/\nforged HTTP/1.1\r\n\r\n")
    lines = [line for line in caplog.messages if "network of" in line]
    assert len(lines) == MAX_NOTES
    assert not any("\n" in line for line in lines)


@pytest.mark.attack(
    "a list of hosts is taken for a limit where there is none",
    surface="`--sandbox process`",
    stopped_by="such rollouts fail",
)
async def test_bare_processes_get_no_list_of_hosts(
    tmp_path_factory: pytest.TempPathFactory, outside: Outside
) -> None:
    provider = open_provider("process", run_dir=tmp_path_factory.mktemp("s"), node="n")
    await provider.start()
    egress = outside.egress()
    try:
        async with await provider.acquire(SandboxRequest(), LeaseRef(rollout="r", token=1)) as sandbox:
            with pytest.raises(SandboxImpossible, match="bubblewrap") as caught:
                async with egress.lent(sandbox, outside.spec(), "r", {}):
                    raise AssertionError("it was lent")
            assert (caught.value.reason, caught.value.retryable) == ("NetworkImpossible", False)
            await provider.release(sandbox.handle)
    finally:
        egress.close()
        await provider.aclose()
