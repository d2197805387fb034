"""How often Slurm is asked: soon after a change, seldom while nothing happens. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SOON_SECONDS = 1.0
BUSY_SECONDS = 10.0
"""Longest while there are jobs."""
IDLE_SECONDS = 60.0
"""Longest while there are none."""


@dataclass(slots=True)
class Pace:
    """When to look next: the pause doubles with each look that finds nothing new."""

    next: float = 0.0
    pause: float = SOON_SECONDS
    last: float = float("-inf")

    def due(self, now: float, changed: bool) -> bool:
        """Whether to look now; a change is looked at soon, never more often than once a second."""
        return now >= self.next or (changed and now >= self.last + SOON_SECONDS)

    def looked(self, now: float, changed: bool, idle: bool, away: bool) -> None:
        """A look has been made.

        Args:
            changed: it found something new.
            idle: there are no jobs.
            away: Slurm did not answer: it is asked less and less often, ten seconds apart at most.
        """
        longest = IDLE_SECONDS if idle and not away else BUSY_SECONDS
        self.pause = SOON_SECONDS if changed and not away else min(longest, self.pause * 2)
        self.last = now
        self.next = now + self.pause
