"""The interval between two polls of Slurm. This module is pure.

Slurm is polled soon after a change, and seldom while nothing happens.
"""

from __future__ import annotations

from dataclasses import dataclass

SOON_SECONDS = 1.0
"""The shortest interval, in seconds."""
BUSY_SECONDS = 10.0
"""The longest interval while there are jobs, in seconds."""
IDLE_SECONDS = 60.0
"""The longest interval while there are no jobs, in seconds."""


@dataclass(slots=True)
class PollInterval:
    """Decides when to poll next. The interval doubles with each poll that finds nothing new."""

    next: float = 0.0
    pause: float = SOON_SECONDS
    last: float = float("-inf")

    def due(self, now: float, changed: bool) -> bool:
        """Return whether to poll now. After a change, a poll is due one second after the last one."""
        return now >= self.next or (changed and now >= self.last + SOON_SECONDS)

    def polled(self, now: float, changed: bool, idle: bool, unavailable: bool) -> None:
        """Note that Slurm was polled.

        Args:
            now: The time of the poll in seconds, on the clock that `due` uses.
            changed: Whether the poll found something new.
            idle: Whether there are no jobs.
            unavailable: Whether Slurm did not answer. It is then polled less and less often, but at least
                every ten seconds.
        """
        longest = IDLE_SECONDS if idle and not unavailable else BUSY_SECONDS
        self.pause = SOON_SECONDS if changed and not unavailable else min(longest, self.pause * 2)
        self.last = now
        self.next = now + self.pause
