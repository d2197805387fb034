"""A system that all test processes of a machine share: the first one starts it, the last one ends it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class NotStarted(Exception):
    """The system did not start; the text is what it printed."""


@contextmanager
def shared_lab(
    in_use: Path, runs: Callable[[], bool], start: Callable[[], object], end: Callable[[], object]
) -> Iterator[None]:
    """Hold the system for the time of the block. It is started where it does not run.

    One that ran before the first of us keeps running. Processes that it is made of must not inherit the
    lock's descriptor, so `start` has to close it (subprocess does).

    Args:
        in_use: A file of this system's, whose lock is exclusive while it is started or ended, and shared
            while it is used.

    Raises:
        NotStarted: `start` says so.
    """
    with in_use.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not runs():
            start()
            file.truncate(0)
            file.write("ours")
            file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            _end_ours(file, end)


def end_left(in_use: Path, end: Callable[[], object]) -> None:
    """End a system that an interrupted run has left. One that somebody uses, or started, keeps running."""
    if in_use.exists():
        with in_use.open("a+") as file:
            _end_ours(file, end)


def _end_ours(file: IO[str], end: Callable[[], object]) -> None:
    """End a system that one of us has started, unless others still use it: the last of them ends it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    file.seek(0)
    if file.read() == "ours":
        file.truncate(0)
        end()
