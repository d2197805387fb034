"""The check that this machine's clock is synchronised and agrees with the clock of the file server."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rollyard.checks.finding import Finding

FAR_SECONDS = 5.0
"""A difference that makes logs hard to read. Rollyard itself measures durations only."""
_UNSYNCHRONISED = 0x0040
_TIMEX_BYTES = 512
_STATUS_OFFSET = 40 if ctypes.sizeof(ctypes.c_long) == 8 else 20


def is_synchronised() -> bool | None:
    """Return whether the kernel's clock is synchronised (adjtimex(2)), or None if that is not known."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except AttributeError:
        return None
    if state < 0:
        return None
    status = ctypes.c_int.from_buffer(buffer, _STATUS_OFFSET).value
    return not status & _UNSYNCHRONISED


def storage_offset(folder: Path) -> float | None:
    """Return the seconds by which the file server's clock is ahead of this machine's clock.

    The result is None if nothing can be written to the folder.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rollyard-doctor-") as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            after = time.time()
            written = os.stat(file.name).st_mtime
    except OSError:
        return None
    if before <= written <= after:
        return 0.0
    return written - (after if written > after else before)


def check_clocks(
    folder: Path,
    synchronised: Callable[[], bool | None] = is_synchronised,
    offset: Callable[[Path], float | None] = storage_offset,
) -> Finding:
    """Check the clock by the kernel's state and by the time stamps of a folder's file server."""
    name = "clock"
    ahead = offset(folder)
    if ahead is not None and abs(ahead) > FAR_SECONDS:
        side = "behind" if ahead > 0 else "ahead of"
        return Finding(
            name, "missing", f"{abs(ahead):.0f} s {side} the server of {folder}",
            "ask the administrator for chrony or NTP on this node; leases go by durations and hold all the "
            "same, but time stamps of different nodes cannot be compared",
        )  # fmt: skip
    kept = synchronised()
    if kept:
        return Finding(name, "ok", "kept right by NTP or the like")
    words = "nothing keeps it right (NTP, chrony)" if kept is False else "the kernel does not say"
    return Finding(
        name, "optional", words, "time stamps of different nodes may differ; nothing else depends on them"
    )
