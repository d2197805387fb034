"""Running programs of this machine for a limited time, after which everything that they started ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_OUTPUT_BYTES: Final = 256 << 10


async def run_program(
    argv: Sequence[str], *, seconds: float, env: Mapping[str, str], cwd: Path = Path("/")
) -> tuple[int, str]:
    """Run a program for at most `seconds`, and return its exit status and its output.

    The output contains both streams. The program runs in its own session. On timeout (status 124) and on
    cancellation, that session's whole group is killed.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=dict(env),
            cwd=cwd,
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # A cancelled start kills the program alone, and then waits for those that it has started.
        with contextlib.suppress(OSError):
            await _end(await starting)
        raise
    assert process.stdout is not None
    tail = b""
    try:
        async with asyncio.timeout(seconds):
            while chunk := await process.stdout.read(1 << 16):
                tail = (tail + chunk)[-_OUTPUT_BYTES:]
            return await process.wait(), tail.decode(errors="replace")
    except TimeoutError:
        return 124, tail.decode(errors="replace") + f"\nno end within {seconds:g} s"
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program that still runs, and all of its group, within four seconds."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    # asyncio sees the end of a process only after the end of its output, so the rest of that is read.
    try:
        async with asyncio.timeout(2):
            await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that left the group may hold the output open, and nothing waits for that one.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await process.communicate()
