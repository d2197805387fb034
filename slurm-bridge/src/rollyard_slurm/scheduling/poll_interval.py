"""How often Slurm is asked: soon after a change, and seldom while nothing happens. This module is pure."""

from __future__ import annotations

from dataclasses import dataclass

SOON_SECONDS = 1.0
"""The shortest interval."""
BUSY_SECONDS = 10.0
"""The longest interval while there are jobs."""
IDLE_SECONDS = 60.0
"""The longest interval while there are no jobs."""


@dataclass(slots=True)
class PollInterval:
    """When to poll next: the interval doubles with each poll that finds nothing new."""

    next: float = 0.0
    pause: float = SOON_SECONDS
    last: float = float("-inf")

    def due(self, now: float, changed: bool) -> bool:
        """Returns whether to poll now; a change is looked at soon, but at most once a second."""
        return now >= self.next or (changed and now >= self.last + SOON_SECONDS)

    def polled(self, now: float, changed: bool, idle: bool, unavailable: bool) -> None:
        """Notes that Slurm was polled.

        Args:
            changed: The poll found something new.
            idle: There are no jobs.
            unavailable: Slurm did not answer: it is asked less and less often, at least every ten seconds.
        """
        longest = IDLE_SECONDS if idle and not unavailable else BUSY_SECONDS
        self.pause = SOON_SECONDS if changed and not unavailable else min(longest, self.pause * 2)
        self.last = now
        self.next = now + self.pause
