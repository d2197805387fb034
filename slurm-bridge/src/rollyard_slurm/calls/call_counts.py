"""Counts of the calls to Slurm. They show the load that a bridge puts on the controller."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallCounts:
    """The number of times that each command or call was made, and the time that all of them took together."""

    runs: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    """The time that all calls took together, in seconds."""
    since: float = field(default_factory=time.monotonic)
    """The monotonic time at which counting began."""

    def count(self, name: str) -> None:
        """Add one call of a command, or of an operation of slurmrestd, to the counts."""
        self.runs[name] = self.runs.get(name, 0) + 1

    def __str__(self) -> str:
        """Return a readable line with the counts and their rate per minute."""
        count, minutes = sum(self.runs.values()), max(1.0, time.monotonic() - self.since) / 60.0
        each = ", ".join(f"{name} {number}" for name, number in sorted(self.runs.items()))
        return f"Slurm was asked {count} times, {count / minutes:.1f} a minute ({each or 'nothing'})"
