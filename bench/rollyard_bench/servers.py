"""The exec server outside of a sandbox, as a user would start it by hand."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path

from rollyard_sandbox.client import ExecClient

START_SECONDS = 30.0
LEASE_SECONDS = 600


class ExecServerFailed(RuntimeError):
    """The exec server ended, or did not become ready in time."""

    reason = "ExecServerFailed"


@asynccontextmanager
async def exec_server() -> AsyncIterator[ExecClient]:
    """Yield a client of a running exec server, connected by a Unix socket.

    Raises:
        ExecServerFailed: The server did not become ready; the text holds its output.
    """
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        address = f"unix:{Path(name) / 'exec.sock'}"
        ready_read, ready_write = os.pipe()
        command = [sys.executable, "-I", "-m", "rollyard_sandbox.server", "--listen", address]
        command += ["--workdir", name, "--lease", str(LEASE_SECONDS), "--ready-fd", str(ready_write)]
        with FileIO(ready_read) as ready:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(ready_write,),
                    start_new_session=True,
                )
            finally:
                os.close(ready_write)
            try:
                await _wait_ready(process, ready.fileno())
                client = await ExecClient.connect(address)
                try:
                    yield client
                finally:
                    await client.close()
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.communicate()


async def _wait_ready(process: asyncio.subprocess.Process, ready: int) -> None:
    """Return when the server has written to its ready descriptor."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(ready, readable.set)
    try:
        async with asyncio.timeout(START_SECONDS):
            await readable.wait()
    except TimeoutError as error:
        raise ExecServerFailed(f"not ready within {START_SECONDS:.0f} s") from error
    finally:
        loop.remove_reader(ready)
    if not os.read(ready, 64):
        _, said = await process.communicate()
        raise ExecServerFailed(
            f"ended with code {process.returncode}: {said.decode(errors='replace')[-600:]}"
        )
