"""The lock of a run's folder: one trainer at a time works on a run.

A cluster may start a trainer again before it has ended the one before: a pod that was deleted by force runs
until its process is killed, and so does one on a node that nobody reaches. Two trainers on one run would use
the same rollouts twice.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tinygrpo.errors import RunTaken

_NAME: Final = "lock"
_LOOK_SECONDS: Final = 0.2


@contextmanager
def run_lock(folder: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a run's folder. The kernel releases it with the process, however that one ends.

    Args:
        folder: The folder of the run; it is made if there is none.
        seconds: How long to wait for a trainer that is about to end.

    Raises:
        RunTaken: Another trainer still holds the lock, or the file system has no locks.
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(handle, folder, time.monotonic() + seconds)
        yield
    finally:
        os.close(handle)


def _take(handle: int, folder: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise RunTaken(
                    f"another trainer works in {folder}; end it, or choose another --out and --run"
                ) from error
        except OSError as error:
            raise RunTaken(
                f"{folder} cannot be locked ({error.strerror}), so nothing keeps a second trainer away; "
                "choose a file system with locks"
            ) from error
        time.sleep(_LOOK_SECONDS)
