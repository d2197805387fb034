"""Tunnels from a worker to the loopback port of an exec server, over a Unix socket and over TCP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from rollyard_pipeline.gateway.server import GatewayServer
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.client.wire import SandboxTunnel
from rollyard_sandbox.errors import ConnectionLost, SandboxError, SandboxSabotaged
from rollyard_sandbox.frames import encode
from rollyard_sandbox.server.tunnels import MAX_TUNNELS
from rollyard_testing.gateway import KEY, MODEL, ScriptedGateway
from rollyard_testing.pace import patience


@pytest.fixture(params=["unix", "tcp"])
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ExecClient]:
    """Return a client of a server that is started as on a node, or as in a pod after its first client."""
    token = secrets.token_hex(16) if request.param == "tcp" else None
    listen = ["--listen", f"unix:{tmp_path}/s"]
    if token is not None:
        digest = hashlib.sha256(token.encode()).hexdigest()
        listen = ["--listen", "tcp://127.0.0.1:0", "--token-sha256", digest, "--allow-loopback"]
    ready, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-m", "rollyard_sandbox.server", "--workdir", str(tmp_path), *listen,
        "--ready-fd", str(write), pass_fds=(write,),
    )  # fmt: skip
    os.close(write)
    with os.fdopen(ready) as lines:
        address = json.loads(await asyncio.to_thread(lines.readline))["listen"][0]
    try:
        first = await ExecClient.connect(address, token=token)
        if token is None:
            yield first
        else:
            async with await ExecClient.connect(address, token=first.proven_token) as later:
                yield later
        await first.close()
    finally:
        process.kill()
        await process.wait()


async def _program(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def test_bytes_go_both_ways_and_each_end_closes_alone(client: ExecClient) -> None:
    tunnel = await client.tunnel()
    reader, writer = await _program(tunnel.port)
    assert await tunnel.used()
    sent, back = os.urandom(3_000_000), os.urandom(2_000_000)

    async def inside() -> bytes:
        writer.write(sent)
        writer.write_eof()
        return await reader.read(-1)

    async def outside() -> bytes:
        got = await tunnel.reader.read(-1)
        tunnel.writer.write(back)
        tunnel.writer.write_eof()
        return got

    async with asyncio.timeout(patience(30)):
        received, got = await asyncio.gather(inside(), outside())
    assert (got == sent, received == back) == (True, True)
    writer.close()
    tunnel.close()
    assert await client.info()


async def test_programs_wait_for_tunnels_while_a_worker_lends(client: ExecClient) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(patience(30)):
        first = await client.tunnel()
        programs = [await _program(first.port) for _ in range(5)]
        for _, writer in programs:
            stack.callback(writer.close)
        tunnels = [first]
        for number, (reader, writer) in enumerate(programs):
            assert await tunnels[-1].used()
            writer.write(b"%d" % number)
            tunnels[-1].writer.write(await tunnels[-1].reader.readexactly(1) + b"!")
            assert await reader.readexactly(2) == b"%d!" % number
            tunnels.append(await client.tunnel())
            assert tunnels[-1].port == first.port
        for tunnel in tunnels:
            tunnel.close()
        for reader, _ in programs:
            assert await reader.read() == b"", "the worker's end is the end of all its connections"
        reader, writer = await _program(first.port)
        stack.callback(writer.close)
        assert await reader.read() == b"", "no worker lends a network"


async def test_an_evaluation_ends_tunnels_and_port(client: ExecClient) -> None:
    waiting, used = await client.tunnel(), await client.tunnel()
    reader, writer = await _program(used.port)
    await client.begin_eval()
    async with asyncio.timeout(patience(10)):
        assert await reader.read() == b""
        assert not await waiting.used() or not await used.used()
    writer.close()
    with pytest.raises(OSError, match=r"(?i)refused|connect"):
        await _program(used.port)
    with pytest.raises(SandboxError) as refused:
        await client.tunnel()
    assert refused.value.reason == "TunnelRefused"
    waiting.close()
    used.close()


@pytest.mark.attack(
    "connections and tunnels from before serve the tests",
    boundary="network",
    surface="Eval with a network",
    stopped_by="the evaluation begins with all of them closed",
)
async def test_an_evaluation_with_a_network_begins_without_the_tunnels_of_before(client: ExecClient) -> None:
    before = await client.tunnel()
    reader, writer = await _program(before.port)
    await client.begin_eval(network=True)
    async with asyncio.timeout(patience(10)):
        try:
            left = await reader.read()
        except ConnectionResetError:
            left = b""  # The system says so if the connection was closed with bytes that nobody read.
    assert left == b""
    writer.close()
    before.close()
    tunnel = await client.tunnel()
    reader, writer = await _program(tunnel.port)
    async with asyncio.timeout(patience(10)):
        assert await tunnel.used()
        tunnel.writer.write(b"!")
        assert await reader.readexactly(1) == b"!"
    writer.close()
    tunnel.close()
    await client.begin_eval()
    with pytest.raises(SandboxError) as refused:
        await client.tunnel()
    assert refused.value.reason == "TunnelRefused"


async def test_each_purpose_has_a_port_of_its_own(client: ExecClient) -> None:
    network, gateway = await client.tunnel(), await client.tunnel("gateway")
    further = await client.tunnel("gateway")
    assert network.port != gateway.port == further.port
    further.close()
    async with asyncio.timeout(patience(10)):
        for tunnel, words in ((gateway, b"gateway"), (network, b"network")):
            reader, writer = await _program(tunnel.port)
            assert await tunnel.used()
            tunnel.writer.write(words)
            assert await reader.readexactly(len(words)) == words
            writer.close()
            tunnel.close()
    with pytest.raises(SandboxError, match="neither network nor gateway"):
        await client.tunnel("elsewhere")  # type: ignore[arg-type]


@pytest.mark.attack(
    "a connection to the gateway from before, or a further one, samples while the tests run",
    boundary="network",
    surface="Eval with a network",
    stopped_by="an evaluation closes the gateway's port and tunnels for good, whatever the network is",
)
@pytest.mark.parametrize("network", [True, False])
async def test_an_evaluation_ends_the_gateways_tunnels_for_good(client: ExecClient, network: bool) -> None:
    used, waiting = await client.tunnel("gateway"), await client.tunnel("gateway")
    reader, writer = await _program(used.port)
    await client.begin_eval(network=network)
    async with asyncio.timeout(patience(10)):
        assert await reader.read() == b""
    writer.close()
    with pytest.raises(OSError, match=r"(?i)refused|connect"):
        await _program(used.port)
    with pytest.raises(SandboxError) as refused:
        await client.tunnel("gateway")
    assert refused.value.reason == "TunnelRefused"
    if network:
        (await client.tunnel()).close()
    waiting.close()
    used.close()


async def test_a_gateway_is_lent_until_its_end(client: ExecClient, caplog: pytest.LogCaptureFixture) -> None:
    gateway = ScriptedGateway()
    async with GatewayServer(gateway, "r-1").lent(client) as url, httpx.AsyncClient() as program:
        ask = partial(program.get, f"{url}/v1/models", headers={"x-api-key": KEY}, timeout=patience(20))
        assert (await ask()).json()["data"][0]["id"] == MODEL
    async with httpx.AsyncClient() as program:
        with pytest.raises(httpx.TransportError):
            await program.get(url, timeout=patience(20))
    # It can be lent again, as for each step of a task, and a server that ends makes no noise.
    async with GatewayServer(gateway, "r-1").lent(client) as again, httpx.AsyncClient() as program:
        assert again == url
        assert (await program.get(url)).status_code == 200
        await client.shutdown()
        with pytest.raises(httpx.TransportError):
            await program.get(url, timeout=patience(20))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.attack(
    "tunnels without number hold its descriptors",
    boundary="network",
    surface="exec server",
    stopped_by="it holds 128 of each purpose, and closes those that nobody uses",
)
async def test_tunnels_are_bounded_and_given_back(client: ExecClient) -> None:
    tunnels: list[SandboxTunnel] = []
    for _ in range(MAX_TUNNELS):
        tunnels.append(await client.tunnel())
    with pytest.raises(SandboxError, match="too many tunnels"):
        await client.tunnel()
    (await client.tunnel("gateway")).close()
    for tunnel in tunnels:
        tunnel.close()
    async with asyncio.timeout(patience(20)):
        while True:
            try:
                (await client.tunnel()).close()
                break
            except SandboxError:
                await asyncio.sleep(0.05)  # The server learns of the closed ones one after the other.


async def test_a_worker_that_talks_too_early_loses_its_tunnel(client: ExecClient) -> None:
    tunnel = await client.tunnel()
    tunnel.writer.write(b"GET / HTTP/1.1\r\n")
    async with asyncio.timeout(patience(10)):
        assert not await tunnel.used()
    tunnel.close()
    assert await client.info()


@pytest.mark.attack(
    "a program in its place takes the worker's tunnels",
    boundary="network",
    surface="exec server",
    stopped_by="each is a new connection, on which the server proves that it knows the secret",
)
async def test_a_program_in_the_servers_place_gets_no_tunnel(client: ExecClient, tmp_path: Path) -> None:
    """Each tunnel is a new connection, whose server must prove that it knows the secret."""

    ended = asyncio.Event()

    async def lies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(encode({"id": 1, "version": 1, "pid": 1, "proof": "0" * 128}))
        await reader.read()  # The client leaves at once.
        writer.close()
        ended.set()

    path = tmp_path / "taken"
    async with await asyncio.start_unix_server(lies, str(path)):
        client._again = lambda: ExecClient.connect(f"unix:{path}", secret=b"k" * 32)
        with pytest.raises(SandboxSabotaged):
            await client.tunnel()
        async with asyncio.timeout(patience(10)):
            await ended.wait()
    client._again = None
    with pytest.raises(ConnectionLost):
        await client.tunnel()
