"""Estimate when a rollout would end on a backend, from what completed Runs have shown alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CLEARLY = 1.5
"""A backend must be this many times slower to count as slower, since measured paces vary by chance."""
SPREAD = 1.3
"""An allowance for rollouts of different lengths: the longest one on a slow backend ends last."""
_SATURATED = 0.25
"""The share of the limit from which on more rollouts are assumed to share the same throughput."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a backend gets rollouts through Run, and under which load, as moving averages."""

    rate: float
    """The sampled tokens per second of one rollout in Run, including the time of its tools."""
    load: float
    """The active rollouts on the backend during the measurement."""
    seconds: float
    """The mean time of one rollout in Run, in seconds."""


@dataclass(frozen=True, slots=True)
class Place:
    """One backend that a rollout may go to, or wait for."""

    pace: Pace
    active: int
    limit: int
    quiet: float = 0.0
    """The seconds since a rollout last began on the backend."""

    @property
    def free(self) -> int:
        """The number of rollouts that the backend can take now."""
        return max(0, self.limit - self.active)

    def per_token(self, active: int) -> float:
        """Return the expected seconds in Run per sampled token with `active` rollouts on the backend.

        The pace was measured under one load. Beyond that load, a saturated backend shares its throughput
        among all rollouts. Below it, nothing shows that the backend is faster.
        """
        return max(1.0, active / max(self.pace.load, _SATURATED * self.limit)) / self.pace.rate

    @property
    def next(self) -> float:
        """The seconds per token for a rollout that begins now, or as soon as a place is free."""
        return self.per_token(min(self.active + 1, self.limit))


def worth_waiting(here: Place, others: Iterable[Place]) -> float:
    """Return up to how many waiting rollouts clearly faster backends are the better choice for all.

    The last of W waiting rollouts begins there once those beyond the free places have begun, at
    limit / t rollouts a second, and takes t. As long as it ends before one that begins `here` now, a
    rollout `here` would be the last to end. This is the threshold policy for two servers of different
    speeds (Lin and Kumar 1984). The result is 0 if no other backend is clearly faster, or if the faster
    ones have taken no rollout for as long as waiting could gain: no rollout waits for a hanging backend.
    """
    seconds = here.next
    faster = [other for other in others if other.next * CLEARLY <= seconds]
    if not faster:
        return 0.0
    best = min(faster, key=lambda other: other.next)
    free = sum(other.free for other in faster)
    if not free and min(other.quiet for other in faster) > best.pace.seconds * seconds / best.next:
        return 0.0
    throughput = sum(other.limit / other.per_token(other.limit) for other in faster)
    return free + (SPREAD * seconds - best.next) * throughput
