"""Counts of the calls to Slurm, which show the load that a bridge puts on the controller."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallCounts:
    """How often each command or call was made, and how long all of them took together."""

    runs: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    since: float = field(default_factory=time.monotonic)

    def count(self, name: str) -> None:
        """Counts one call."""
        self.runs[name] = self.runs.get(name, 0) + 1

    def __str__(self) -> str:
        count, minutes = sum(self.runs.values()), max(1.0, time.monotonic() - self.since) / 60.0
        each = ", ".join(f"{name} {number}" for name, number in sorted(self.runs.items()))
        return f"Slurm was asked {count} times, {count / minutes:.1f} a minute ({each or 'nothing'})"
