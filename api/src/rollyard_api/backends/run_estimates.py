"""When a rollout would end on a backend: pure, from what completed Runs have shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CLEARLY = 1.5
"""Less than this many times slower is not slower: measured paces differ by chance, too."""
SPREAD = 1.3
"""Rollouts differ in length, and the longest one that a slow backend was given ends last."""
_SATURATED = 0.25
"""A share of the limit: from this load on, more rollouts are taken to share the same throughput."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a backend gets rollouts through Run, and under which load: moving averages."""

    rate: float
    """Sampled tokens per second of one rollout in Run, the time of its tools included."""
    load: float
    """Active rollouts on the backend while that was measured."""
    seconds: float
    """The mean time of one rollout in Run."""


@dataclass(frozen=True, slots=True)
class Place:
    """One backend that a rollout may go to, or wait for."""

    pace: Pace
    active: int
    limit: int
    quiet: float = 0.0
    """Seconds since a rollout last began there."""

    @property
    def free(self) -> int:
        """How many rollouts it takes now."""
        return max(0, self.limit - self.active)

    def per_token(self, active: int) -> float:
        """Expected seconds in Run per sampled token with `active` rollouts there.

        It was measured under one load: beyond that, a saturated backend shares its throughput
        among all; below, nothing says that it is faster.
        """
        return max(1.0, active / max(self.pace.load, _SATURATED * self.limit)) / self.pace.rate

    @property
    def next(self) -> float:
        """The same for a rollout that begins now, or as soon as a place is free."""
        return self.per_token(min(self.active + 1, self.limit))


def worth_waiting(here: Place, others: Iterable[Place]) -> float:
    """Up to how many waiting rollouts clearly faster backends are the better choice for all of them.

    The last of W waiting rollouts begins there once those beyond the free places have had theirs,
    at limit / t rollouts a second, and takes t: as long as that ends before one that begins `here`
    now, `here` would be the last to end. The threshold policy for two servers of different speeds
    (Lin and Kumar 1984). 0 where no other is clearly faster, and where those have not taken any
    for as long as waiting could gain: no rollout waits for a backend that hangs.
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
