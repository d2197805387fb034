"""How this machine shares its cores while it measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextmanager
def shared_evenly() -> Iterator[bool]:
    """Share the cores by process instead of by session (sched(7), autogroup), where that is permitted.

    Every program here has a session of its own. On some virtual machines a session that wakes up waits
    seconds for a core beside a busy one, and both sides of a comparison would measure that. The block gets
    whether the cores are shared so.
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
