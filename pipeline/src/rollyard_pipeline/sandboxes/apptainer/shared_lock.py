"""A lock for several nodes on shared storage, where flock(2) may apply to one node only.

The lock is a file that its holder touches repeatedly. A file that has not been touched for STALE_SECONDS
belongs to a dead holder, and a waiting process takes it. All times come from the storage, because the
nodes' clocks may differ. If a holder was frozen for that long, there may be a second one. The protected
work must stay correct in that case: the lock saves work, it does not guard data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

log = logging.getLogger(__name__)

TOUCH_SECONDS = 5.0
STALE_SECONDS = 45.0
_POLL_SECONDS = 0.5


@asynccontextmanager
async def shared_lock(
    path: Path, *, until: Callable[[], bool] = lambda: False, stale_seconds: float = STALE_SECONDS
) -> AsyncIterator[bool]:
    """Hold the lock file `path`, whose folder must exist. The caller bounds the wait.

    The value is False, and nothing is held, once `until` returns true because nothing is left to do.

    Raises:
        OSError: The storage refuses the file.
    """
    mine = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}\n"
    while not await asyncio.to_thread(_taken, path, mine, stale_seconds):
        if until():
            yield False
            return
        await asyncio.sleep(_POLL_SECONDS)
    touching = asyncio.create_task(_touch(path, stale_seconds), name=f"lock {path.name}")
    try:
        yield True
    finally:
        touching.cancel()
        await asyncio.gather(touching, return_exceptions=True)
        await asyncio.shield(asyncio.to_thread(_give_back, path, mine))


async def _touch(path: Path, stale_seconds: float) -> None:
    while True:
        await asyncio.sleep(min(TOUCH_SECONDS, stale_seconds / 3))
        # No times are passed, so the storage writes its own.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(os.utime, path)


def _taken(path: Path, mine: str, stale_seconds: float) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        _clear_stale(path, stale_seconds)
        return False
    try:
        os.write(fd, mine.encode())
    finally:
        os.close(fd)
    return True


def _clear_stale(path: Path, stale_seconds: float) -> None:
    """Remove the lock of a dead holder. Of several processes that try, one succeeds."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        holder, touched = path.read_text(), path.stat().st_mtime
        probe.touch()
        age = probe.stat().st_mtime - touched
    except FileNotFoundError:
        return
    finally:
        probe.unlink(missing_ok=True)
    if age < stale_seconds:
        return
    try:
        path.rename(probe)
    except FileNotFoundError:
        return
    try:
        if probe.read_text() != holder:
            # Another process was faster, and the moved lock is a new holder's. It is put back.
            with contextlib.suppress(FileExistsError):
                os.link(probe, path)
        else:
            log.warning(
                "took the lock %s of a holder that has not been seen for %.0f s: %s", path, age, holder
            )
    finally:
        probe.unlink(missing_ok=True)


def _give_back(path: Path, mine: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.read_text() == mine:
            path.unlink()
