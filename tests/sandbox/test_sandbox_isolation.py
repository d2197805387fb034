"""Tokens known by hash only, and a server that listens only once its network is closed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rollyard_sandbox import errors
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.isolation import network
from rollyard_testing.pace import patience

SECRET = "a secret of one sandbox"
HASH = hashlib.sha256(SECRET.encode()).hexdigest()
COMMAND = (sys.executable, "-I", "-m", "rollyard_sandbox.server")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def target(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("token", [None, "wrong", "ünicode", HASH, ""])
async def test_only_the_token_of_the_hash_opens(start_server: Callable[..., Any], token: str | None) -> None:
    server = start_server("--token-sha256", HASH.upper())
    with pytest.raises(errors.SandboxError, check=lambda error: error.reason == "Unauthorized"):
        await server.connect(0, token)
    async with await server.connect(0, SECRET) as client:
        assert (await client.bash("echo ok")).text() == "ok\n"
        # Neither the command line nor what programs inherit says more than the hash.
        assert (await client.bash(f"cat /proc/{server.process.pid}/cmdline; env")).text().count(SECRET) == 0


async def test_tcp_on_every_address_needs_no_token_file(start_server: Callable[..., Any]) -> None:
    server = start_server("--token-sha256", HASH, "--listen", "tcp://*:0", "--allow-loopback")
    port = server.addresses[0].rpartition(":")[2]
    async with await ExecClient.connect(f"tcp://127.0.0.1:{port}", token=SECRET) as client:
        assert (await client.run(["true"])).exit_code == 0


async def test_it_listens_once_the_network_is_closed(
    start_server: Callable[..., Any], listener: socket.socket
) -> None:
    checked = target(listener)
    reached = asyncio.create_task(asyncio.to_thread(listener.accept))
    starting = asyncio.create_task(
        asyncio.to_thread(
            start_server, "--token-sha256", HASH, "--isolation-check", checked, "--isolation-seconds", "30"
        )
    )
    connection, _ = await reached  # The policy is not in force yet.
    assert not starting.done()
    connection.close()
    listener.close()
    server = await starting
    async with await server.connect(0, SECRET) as client:
        assert (await client.bash("echo ok")).text() == "ok\n"


def test_an_open_network_is_refused(listener: socket.socket) -> None:
    checks = ["--isolation-check", "127.0.0.1:1", "--isolation-check", target(listener)]
    done = subprocess.run(
        [*COMMAND, "--listen", "tcp://127.0.0.1:0", "--token-sha256", HASH, *checks,
         "--isolation-seconds", "0.3"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == network.NOT_ISOLATED == 78
    assert done.stderr.startswith("NotIsolated: after 0.3 s")
    assert target(listener) in done.stderr
    assert "127.0.0.1:1," not in done.stderr


def test_silence_must_be_met_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([(["open"], True), ([], True), (["open"], False), ([], True), ([], True), ([], False)])
    calls: list[int] = []

    def tried(targets: object) -> Any:
        calls.append(1)
        return next(rounds)

    monkeypatch.setattr(network, "_try_all", tried)
    assert network.wait_isolated([network.ForbiddenAddress("127.0.0.1:1")], 30) is None
    assert len(calls) == 5


def test_a_full_backlog_is_silence_not_a_connection() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        address = busy.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(address)
        reached, silent = network._try_all([network.ForbiddenAddress(f"127.0.0.1:{address[1]}")])
        for sock in waiting:
            sock.close()
    assert (reached, silent) == ([], True)


def test_sigterm_ends_the_wait(listener: socket.socket) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--listen", "tcp://127.0.0.1:0", "--token-sha256", HASH,
         "--isolation-check", target(listener), "--isolation-seconds", "600"],
    )  # fmt: skip
    connection, _ = listener.accept()
    with connection:
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience(20)) == 0


async def test_no_one_may_read_a_server(start_server: Callable[..., Any]) -> None:
    guarded, plain = start_server("--token-sha256", HASH), start_server()
    # The kernel gives the files of an undumpable process to root (proc(5)); as root they are ours anyway.
    owners = [os.stat(f"/proc/{server.process.pid}/environ").st_uid for server in (guarded, plain)]
    assert owners == [0, 0]
    async with await guarded.connect(0, SECRET) as client:
        # What it starts is an ordinary process, with a terminal, a kernel and an adjustable OOM score.
        assert (await client.bash("readlink /proc/self/exe && ls /proc/$$/fd > /dev/null")).exit_code == 0
        assert (await client.ipython("6 * 7")).result == "42"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--token-sha256", "abc"], "--token-sha256: must be 64 hexadecimal digits"),
        (["--token-sha256", "g" * 64], "--token-sha256: must be 64 hexadecimal digits"),
        (["--isolation-check", "kubernetes.default:443"], "--isolation-check: 'kubernetes.default:443'"),
        (["--isolation-check", "10.0.0.1"], "--isolation-check: '10.0.0.1'"),
        (["--isolation-check", "10.0.0.1:0"], "--isolation-check: '10.0.0.1:0'"),
        (["--isolation-check", "fd00::1"], "--isolation-check: 'fd00::1'"),
        (["--isolation-seconds", "-1"], "--isolation-seconds"),
        (["--isolation-seconds", "nan"], "--isolation-seconds"),
    ],
)
def test_bad_options_are_explained(arguments: list[str], named: str) -> None:
    done = subprocess.run([*COMMAND, "--listen", "unix:/tmp/x", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert named in done.stderr
