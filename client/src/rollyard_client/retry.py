"""How often a call is repeated, and after which pauses."""

from __future__ import annotations

from dataclasses import dataclass

from rollyard_crds.backoff import Backoff

from rollyard_client.errors import RollyardError, ServerUnavailable, TooMany


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call is sent, and how long the pauses between its attempts are.

    The pause after attempt n is base × 2ⁿ seconds and at most `longest` seconds. Half of it is jitter.
    """

    attempts: int = 5
    base: float = 0.1
    longest: float = 2.0

    def pause(self, attempt: int, error: RollyardError) -> float | None:
        """Return the seconds before the next attempt, or None if `error` is to be raised instead."""
        if attempt + 1 >= self.attempts:
            return None
        if not isinstance(error, ServerUnavailable | TooMany):
            return None
        if error.retry_after is not None and error.retry_after > self.longest:
            return None
        return Backoff(self.base, self.longest, jitter=0.5).pause(attempt + 1, error.retry_after)
