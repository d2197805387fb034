"""Pauses between tries that grow with each failure in a row."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

_MOST: Final = 64
"""Further failures do not count: the pause has reached its bound long before that."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait after failures in a row. It has no state; its callers count the failures."""

    first: float
    """Seconds after the first failure."""
    longest: float
    """The seconds that no pause exceeds."""
    jitter: float = 0.0
    """The fraction of a pause, from 0 to 1, that is drawn at random; with 0.5, at least half of it
    remains."""
    factor: float = 2.0
    """Each pause is this many times as long as the one before."""

    def pause(self, failures: int, retry_after: float | None = None) -> float:
        """Return the seconds to wait after `failures` failures in a row, which are counted from 1.

        Args:
            retry_after: seconds that the other side asks for; the pause is at least that long, up to
                `longest`.
        """
        steps = min(max(failures, 1) - 1, _MOST)
        unjittered = min(self.longest, self.first * self.factor**steps)
        minimum = 0.0 if retry_after is None else min(retry_after, self.longest)
        return max(unjittered * (1.0 - self.jitter * random.random()), minimum)
