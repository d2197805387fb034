"""The logs of Slurm jobs in a home, of which the newest are kept."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

KEPT = 500
"""The number of logs that are kept."""
EVERY_SECONDS = 600.0
"""The time between two removals of old logs."""


def prune(folder: Path, living: Collection[Path], kept: int = KEPT) -> int:
    """Removes all but the newest logs, and returns how many it removed.

    Args:
        living: The logs of jobs that run; they are never removed.

    Raises:
        OSError: The folder cannot be read.
    """
    found = []
    for path in folder.glob("*-*.log"):
        number = path.stem.rpartition("-")[2]
        if number.isdecimal() and path not in living:
            found.append((int(number), path))
    old = [path for _, path in sorted(found, key=lambda one: one[0], reverse=True)[kept:]]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)
