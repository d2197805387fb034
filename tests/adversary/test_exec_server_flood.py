"""Commands open connections to their exec server in order to lock the worker out of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import ConnectionLost
from rollyard_sandbox.frames import encode
from rollyard_sandbox.server import exec_server
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="exec server", surface="connections")


TOKEN = "a token of one sandbox"
# A command of the sandbox runs this, with the address as its argument. It keeps what it opens.
FLOOD = """
import socket, sys, time
kind, address = sys.argv[1:3]
held, refused = [], 0
for _ in range(500):
    sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    try:
        sock.connect(address if kind == "unix" else ("127.0.0.1", int(address)))
        held.append(sock)
    except OSError:
        refused += 1
print("flooded", flush=True)
time.sleep(120)
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    with ExitStack() as stack:

        def start(*arguments: str) -> str:
            (tmp_path / "token").write_text(TOKEN)
            ready_read, ready_write = os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-I", "-m", "rollyard_sandbox.server", "--workdir", str(tmp_path),
                 "--token-file", str(tmp_path / "token"), "--ready-fd", str(ready_write), *arguments],
                pass_fds=(ready_write,),
            )  # fmt: skip
            stack.callback(process.wait, patience(10))
            stack.callback(process.terminate)
            os.close(ready_write)
            with os.fdopen(ready_read) as ready:
                addresses: list[str] = json.loads(ready.readline())["listen"]
            return addresses[0]

        yield start


SILENT_CONNECTIONS = pytest.mark.attack(
    "500 connections that never greet", stopped_by="those that do not greet in time are dropped"
)


@SILENT_CONNECTIONS
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_five_hundred_connections_lock_nobody_out(
    serve: Callable[..., str], tmp_path: Path, kind: str
) -> None:
    listen = f"unix:{tmp_path}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    address = serve("--listen", listen)
    async with await ExecClient.connect(address, token=TOKEN) as client:
        target = address.rpartition(":")[2]
        running = await client.start(
            f"exec {sys.executable} -c '{FLOOD}' {kind} {target}", timeout=patience(60)
        )
        await running.wait_for_output(b"flooded")
        started = time.monotonic()
        for _ in range(3):
            async with await ExecClient.connect(address, token=TOKEN) as other:
                assert (await other.bash("echo works", session="other")).text() == "works\n"
        assert time.monotonic() - started < patience(20)
        await running.interrupt()


@SILENT_CONNECTIONS
async def test_one_that_never_greets_is_dropped(serve: Callable[..., str]) -> None:
    address = serve("--listen", "tcp://127.0.0.1:0")
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.settimeout(patience(30))
        silent.sendall(encode({"op": "hello"})[:6])
        assert silent.recv(1) == b""


OWN_ADDRESSES = pytest.mark.attack(
    "from the sandbox's own addresses", stopped_by="own and loopback peers are refused in pods"
)


@OWN_ADDRESSES
async def test_the_sandboxs_own_network_leads_to_nothing(serve: Callable[..., str]) -> None:
    """The server listens on every address, as in a pod, and its commands reach all of them."""
    port = serve("--listen", "tcp://*:0").rpartition(":")[2]
    for host in ("127.0.0.1", "127.0.0.2", *_own_addresses()):
        with pytest.raises(ConnectionLost):
            await ExecClient.connect(f"tcp://{host}:{port}", token=TOKEN, timeout=patience(5))


@OWN_ADDRESSES
async def test_loopback_is_let_in_where_it_was_asked_for(serve: Callable[..., str]) -> None:
    port = serve("--listen", "tcp://*:0", "--allow-loopback").rpartition(":")[2]
    async with await ExecClient.connect(f"tcp://127.0.0.1:{port}", token=TOKEN) as client:
        assert (await client.run(["true"])).exit_code == 0


@OWN_ADDRESSES
@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("127.9.8.7", True), ("::1", True), ("::ffff:127.0.0.1", True),
     ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fd00::1", False), ("1.127.0.0", False)],
)  # fmt: skip
def test_loopback_addresses(address: str, loopback: bool) -> None:
    assert exec_server._is_loopback(address) is loopback


@OWN_ADDRESSES
def test_a_peer_elsewhere_is_no_own_address() -> None:
    class Far:
        family = socket.AF_INET

        def getpeername(self) -> tuple[str, int]:
            return ("192.0.2.7", 4000)  # The address is of a documentation network, which no machine has.

    assert not exec_server._comes_from_here(Far())  # type: ignore[arg-type]


def _own_addresses() -> list[str]:
    """Return this machine's address of the route outside, where it has one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [probe.getsockname()[0]]
