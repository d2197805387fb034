"""A real exec server per test, over a Unix socket or TCP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rollyard_sandbox import folders
from rollyard_sandbox.client import ExecClient
from rollyard_testing.pace import patience

TOKEN = "correct horse"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server process, its addresses and its folders."""

    process: subprocess.Popen[bytes]
    addresses: list[str]
    work: Path

    async def connect(self, index: int = 0, token: str | None = TOKEN) -> ExecClient:
        return await ExecClient.connect(self.addresses[index], token=token)

    async def exit_status(self, limit: float = 10.0) -> int:
        async with asyncio.timeout(patience(limit)):
            return await asyncio.to_thread(self.process.wait, limit)


@pytest.fixture
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """Yield a function that starts servers with further arguments. They are ended with all they started.

    Their working folders are removed, too: pytest cannot remove folders that are nested a thousand deep.
    """
    started: list[RunningServer] = []

    def start(*arguments: str, transports: tuple[str, ...] = ("unix",), token: bool = False) -> RunningServer:
        folder = tmp_path_factory.mktemp("sbx")
        work = folder / "work"
        work.mkdir()
        listen = {"unix": f"unix:{folder}/sock", "tcp": "tcp://127.0.0.1:0"}
        command = [sys.executable, "-I", "-m", "rollyard_sandbox.server", "--workdir", str(work), *arguments]
        for transport in transports:
            command += ["--listen", listen[transport]]
        if token or "tcp" in transports:
            (folder / "token").write_text(TOKEN + "\n")
            command += ["--token-file", str(folder / "token")]
        ready_read, ready_write = os.pipe()
        process = subprocess.Popen([*command, "--ready-fd", str(ready_write)], pass_fds=(ready_write,))
        os.close(ready_write)
        with os.fdopen(ready_read) as ready:
            line = ready.readline()
        assert line, "the server ended before it was ready"
        server = RunningServer(process, json.loads(line)["listen"], work)
        started.append(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.terminate()
        server.process.wait(patience(10))
        folders.remove(str(server.work))


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server()


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[ExecClient]:
    async with await server.connect() as connected:
        yield connected


@pytest.fixture(params=["unix", "tcp"])
async def any_client(
    request: pytest.FixtureRequest, start_server: Callable[..., RunningServer]
) -> AsyncIterator[ExecClient]:
    """Yield the same client over each transport."""
    async with await start_server(transports=(request.param,)).connect() as connected:
        yield connected
