"""Removal of old logs of Slurm jobs from a home. The newest logs are kept."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

KEPT = 500
"""The number of logs that are kept."""
EVERY_SECONDS = 600.0
"""The time between two removals of old logs, in seconds."""


def prune(folder: Path, living: Collection[Path], kept: int = KEPT) -> int:
    """Remove all but the newest logs, and return the number of removed logs.

    Args:
        folder: The folder of the logs.
        living: The logs of jobs that have not ended. They are never removed.
        kept: The number of other logs that are kept.

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
