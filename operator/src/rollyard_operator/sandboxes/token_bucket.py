"""A token bucket on a clock that is given to it."""

from __future__ import annotations


class TokenBucket:
    """So many at once, and so many a second in the long run."""

    def __init__(self, per_second: float, burst: int) -> None:
        self.per_second = per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at: float | None = None

    def tokens(self, now: float) -> float:
        """How many may be taken at `now` (seconds on a clock that never goes back)."""
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self.per_second)
        self._at = now if self._at is None else max(now, self._at)
        return self._tokens

    def take(self, now: float, count: int = 1) -> None:
        """Take some; one may owe after a race, and waits the longer."""
        self._tokens = self.tokens(now) - count

    def give_back(self, count: int = 1) -> None:
        """What was taken came to nothing."""
        self._tokens = min(self._burst, self._tokens + count)
