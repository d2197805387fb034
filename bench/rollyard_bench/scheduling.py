"""How this machine shares its cores while it measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextmanager
def shared_evenly() -> Iterator[bool]:
    """Cores are shared process by process, not session by session (sched(7), autogroup), where we may say so.

    Every program here has a session of its own. On some virtual machines a session that wakes up
    waits seconds for a core beside a busy one: that would be measured, on both sides of a comparison.
    Gives whether it is so.
    """
    try:
        before = _AUTOGROUP.read_text()
        _AUTOGROUP.write_text("0")
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        _AUTOGROUP.write_text(before)
