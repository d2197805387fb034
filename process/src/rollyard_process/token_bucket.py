"""A token bucket. The caller passes the time."""

from __future__ import annotations


class TokenBucket:
    """A limit of `burst` tokens at once and of `per_second` tokens per second in the long run."""

    def __init__(self, per_second: float, burst: int) -> None:
        self.per_second = per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at: float | None = None

    def tokens(self, now: float) -> float:
        """Return how many tokens are available at `now`, in seconds on a clock that never goes back."""
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self.per_second)
        self._at = now if self._at is None else max(now, self._at)
        return self._tokens

    def take(self, now: float, count: int = 1) -> None:
        """Take `count` tokens. A race may make the balance negative, which makes the next wait longer."""
        self._tokens = self.tokens(now) - count

    def give_back(self, count: int = 1) -> None:
        """Return `count` tokens that were taken but not used."""
        self._tokens = min(self._burst, self._tokens + count)
