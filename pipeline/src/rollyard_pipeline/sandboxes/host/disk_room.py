"""Whether the disk of a run folder takes another sandbox."""

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

from rollyard_crds.backoff import Backoff

from rollyard_pipeline.sandboxes.errors import NodeDiskFull

ROOM_BYTES: Final = 4 << 20
"""More than a sandbox's records, logs and socket take."""
LOOK_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 120.0
_PAUSES: Final = Backoff(first=2.0, longest=LONGEST_PAUSE_SECONDS)


class DiskRefuses(NodeDiskFull):
    """The disk said itself that it has no room: nothing was tried, and nothing outlasts its being full."""


def is_full(error: BaseException) -> bool:
    """Whether an OSError says that a disk, or what this user may have of it, is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class DiskRoom:
    """Asks the disk itself, by taking some room and giving it back: so that quotas and inodes count too.

    Where a start finds no room all the same, a growing pause keeps a node that fails at once from
    taking one rollout after the other. Methods that ask the disk block, shortly; threads may share it.
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
        """Why no sandbox should be started now; empty: nothing is known against it."""
        # The disk's own word first: it stays the same while the disk is full.
        return self.look() or (self._why if self._clock() < self._paused_until else "")

    def look(self) -> str:
        """What the disk said last, at most LOOK_SECONDS ago; empty: there was room."""
        with self._asking:
            if self._clock() >= self._looked + LOOK_SECONDS:
                self._ask()
            return self._full

    def full(self) -> str:
        """What the disk says now; empty: there is room."""
        with self._asking:
            self._ask()
            return self._full

    def _ask(self) -> None:
        # One at a time: an older answer never replaces a later one.
        self._looked = self._clock()
        self._full = self._take_room()

    def _take_room(self) -> str:
        path = self._folder / f".room-{secrets.token_hex(4)}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.unlink(path)  # whoever is killed now leaves nothing
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
        """A sandbox found no room. No pause where the disk says so too: that holds as long as it is so."""
        with self._asking:
            self._ask()
            now = self._clock()
            if not self._full and now >= self._paused_until:  # starts that fail together count once
                self._failures += 1
                self._paused_until, self._why = now + _PAUSES.pause(self._failures), why

    def worked(self) -> None:
        """A sandbox has started: there is no more reason for a pause."""
        self._failures = 0
        self._paused_until = float("-inf")
