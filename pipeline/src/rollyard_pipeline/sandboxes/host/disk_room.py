"""Tests of whether the disk of a run folder has room for another sandbox."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rollyard_process.backoff import Backoff

from rollyard_pipeline.sandboxes.errors import NodeDiskFull

ROOM_BYTES: Final = 4 << 20
"""The room in bytes that the test takes. It is more than a sandbox's records, logs and socket need."""
LOOK_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 120.0
_PAUSES: Final = Backoff(first=2.0, longest=LONGEST_PAUSE_SECONDS)


class DiskRefuses(NodeDiskFull):
    """The disk test found no room.

    No start was attempted, and the state ends when the disk has room again.
    """


def is_full(error: BaseException) -> bool:
    """Return whether an OSError reports that a disk, or this user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class DiskRoom:
    """Tests the disk by taking some room and giving it back, which also covers quotas and inodes.

    If a start finds no room although the test succeeded, a growing pause keeps a node whose starts fail at
    once from taking one rollout after the other. The methods that test the disk block briefly. Threads may
    share an instance.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._looked = float("-inf")
        self._full = ""
        self._asking = threading.Lock()
        self._failures = 0
        self._paused_until = float("-inf")
        self._why = ""

    def trouble(self) -> str:
        """Return why no sandbox should be started now, or "" if no reason is known."""
        # The test's own text comes first, because it stays the same while the disk is full.
        return self.look() or (self._why if self._clock() < self._paused_until else "")

    def look(self) -> str:
        """Return the result of the last test, which is at most LOOK_SECONDS old, or "" if there was room."""
        with self._asking:
            if self._clock() >= self._looked + LOOK_SECONDS:
                self._ask()
            return self._full

    def full(self) -> str:
        """Test the disk now and return the problem, or "" if there is room."""
        with self._asking:
            self._ask()
            return self._full

    def _ask(self) -> None:
        # Callers hold the lock, so an older result never replaces a later one.
        self._looked = self._clock()
        self._full = self._take_room()

    def _take_room(self) -> str:
        path = self._folder / f".room-{secrets.token_hex(4)}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.unlink(path)  # Nothing is left if the process is killed now.
                os.posix_fallocate(fd, 0, ROOM_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            if is_full(error):
                return f"no room left on the disk of run dir {self._folder.parent}: {error.strerror}"
            with contextlib.suppress(OSError):
                os.unlink(path)
        return ""

    def failed(self, why: str) -> None:
        """Record that a sandbox found no room.

        There is no pause if the test fails as well, because then the test's result applies as long as the
        disk is full.
        """
        with self._asking:
            self._ask()
            now = self._clock()
            if not self._full and now >= self._paused_until:  # Starts that fail together count once.
                self._failures += 1
                self._paused_until, self._why = now + _PAUSES.pause(self._failures), why

    def worked(self) -> None:
        """Record that a sandbox has started, which ends any pause."""
        self._failures = 0
        self._paused_until = float("-inf")
