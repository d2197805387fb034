"""Sandboxes of the stage workers' own providers, and their cold starts beside what none can do without."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxProvider, SandboxRequest
from rollyard_sandbox.client import ExecClient

from rollyard_bench.processes import ProgramFailed, needed
from rollyard_bench.results import Baseline, Measurement
from rollyard_bench.stats import Contestant, interleave

OWNER = LeaseRef(rollout="bench", token=1)
COMMAND_SECONDS = 30.0
SERVER_SECONDS = 30.0
"""The longest start of an exec server."""
ROUNDS, WARM_UP = 5, 2

REQUEST = SandboxRequest(memory_bytes=1 << 29, disk_bytes=1 << 26)
"""The sandbox of every figure has no network and all limits."""


class WrongOutput(RuntimeError):
    """A command did not print what it must, so its time would mean nothing."""

    reason = "WrongOutput"


@asynccontextmanager
async def started(
    kind: Literal["bubblewrap", "apptainer"], run_dir: Path, **options: Any
) -> AsyncIterator[SandboxProvider]:
    """Yield a started provider, which leaves nothing behind: claimed sandboxes outlive its process."""
    provider = open_provider(kind, run_dir=run_dir, node="bench", **options)
    await provider.start()
    try:
        yield provider
    finally:
        for left in provider.claimed():
            await provider.release(left)
        await provider.aclose()


@asynccontextmanager
async def bubblewrap() -> AsyncIterator[SandboxProvider]:
    """Yield a started bubblewrap provider with a run folder of its own.

    Raises:
        Missing: There is no bubblewrap.
    """
    needed("bwrap", "bubblewrap")
    with tempfile.TemporaryDirectory(prefix="ryb-") as folder:
        async with started("bubblewrap", Path(folder)) as provider:
            yield provider


@asynccontextmanager
async def claimed(provider: SandboxProvider, request: SandboxRequest = REQUEST) -> AsyncIterator[Sandbox]:
    """Yield a sandbox, which is released at the end."""
    sandbox = await provider.acquire(request, OWNER)
    try:
        async with sandbox:
            yield sandbox
    finally:
        await provider.release(sandbox.handle)


async def _acquire(provider: SandboxProvider) -> float:
    """Return the milliseconds of one acquire. The sandbox is released after the clock has stopped."""
    begin = time.perf_counter()
    sandbox = await provider.acquire(REQUEST, OWNER)
    took = (time.perf_counter() - begin) * 1e3
    await sandbox.close()
    await provider.release(sandbox.handle)
    return took


async def _exec_server() -> float:
    """Start an exec server outside of a sandbox, as a user would by hand, and return the milliseconds until a
    client is connected by a Unix socket.

    Raises:
        ProgramFailed: The server ended, or did not become ready in time; the text holds its output.
    """
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        address = f"unix:{Path(name) / 'exec.sock'}"
        command = [sys.executable, "-I", "-m", "rollyard_sandbox.server", "--listen", address]
        command += ["--workdir", name, "--lease", "600", "--ready-fd", "1"]
        begin = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(SERVER_SECONDS):
                ready = await process.stdout.read(64)
            if not ready:
                _, errors = await process.communicate()
                words = errors.decode(errors="replace")[-600:]
                raise ProgramFailed(f"the exec server ended with code {process.returncode}: {words}")
            client = await ExecClient.connect(address)
            took = (time.perf_counter() - begin) * 1e3
            await client.close()
            return took
        except TimeoutError as error:
            raise ProgramFailed(f"the exec server was not ready in {SERVER_SECONDS:.0f} s") from error
        finally:
            if process.returncode is None:
                process.terminate()
            await process.communicate()


async def cold_start(
    figure: str, provider: SandboxProvider, bare: Callable[[], float], bare_name: str, samples: int
) -> Measurement:
    """Time acquires with an empty pool beside what none can do without: a bare start plus an exec server's.

    Args:
        bare: A function that starts the same kind of sandbox without anything of ours and returns its
            milliseconds.
        bare_name: What it does.
    """
    contestants = {
        "bare": Contestant(bare, samples, WARM_UP),
        "server": Contestant(_exec_server, samples, WARM_UP),
        "ours": Contestant(lambda: _acquire(provider), samples, WARM_UP),
    }
    times = await interleave(contestants, ROUNDS)
    how = (
        f"acquire with an empty pool until the client is connected {times['ours'].text()}; {bare_name} "
        f"{times['bare'].text()}; exec server outside of a sandbox, until a client is connected "
        f"{times['server'].text()}"
    )
    baseline = Baseline(f"{bare_name} + exec server start", times["bare"].p50 + times["server"].p50)
    return Measurement(figure, times["ours"].p50, baseline, how)
