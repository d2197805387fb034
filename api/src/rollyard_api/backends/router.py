"""Choose a backend for a rollout, from counts of active rollouts and measured speeds alone.

The router keeps a min-heap keyed by (active + 1) / relative speed, which is the shortest expected
delay, so backends of different speeds fill in proportion to them. A rollout stays on its backend
(prefix cache), and the samples of a group share one, while the load there stays within a bound, as in
consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018). Without a bound, a backend
could be overloaded. The last rollouts of the queue wait for a place on a faster backend if they end
sooner that way.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

BOUND: Final = 1.25
"""A group's samples stay together while their backend has at most this multiple of its fair share."""
OWN_BOUND: Final = 2.0
"""The same multiple for a rollout on its own backend, whose cache holds more than the group's prompt."""
UNKNOWN_PLACES: Final = 256
"""The most rollouts in Run on a backend that does not report the size of its KV cache."""
FEWEST_PLACES: Final = 8
"""The least of what is derived from the size of a KV cache, and the limit until that size was asked for."""
MOST_PLACES: Final = 1024
MIN_RELATIVE_SPEED: Final = 1 / 16
"""The floor of relative speeds, so that a backend once measured as slow still gets rollouts to measure."""
_EVEN: Final = 0.5
"""Backends of at least this speed relative to the fastest take a whole group beyond their fair share."""
CLEARLY: Final = 1.5
"""A backend must be this many times slower to count as slower, since measured paces vary by chance."""
SPREAD: Final = 1.3
"""An allowance for rollouts of different lengths: the longest one on a slow backend ends last."""
_SATURATED: Final = 0.25
"""The share of the limit from which more rollouts are assumed to share the same throughput."""


def places_of(cache: int | None, context: int | None) -> int:
    """Return the number of rollouts in Run that a server has room for.

    A rollout grows, so over its life it holds half of its final length, and final lengths average at most
    half of the context: each takes a quarter of it.

    Args:
        cache: The tokens that the server's KV cache holds, or None if the server does not say.
        context: The context of its model in tokens, or None if the server does not say.
    """
    if not cache or not context:
        return UNKNOWN_PLACES
    return min(max(4 * cache // context, FEWEST_PLACES), MOST_PLACES)


def limit_of(own: int | None, places: int | None) -> int:
    """Return the most rollouts in Run on a backend.

    Args:
        own: The pool's `maxActiveRollouts`, if it has one.
        places: The number that the backend has room for, or None until it was asked.
    """
    return own or places or FEWEST_PLACES


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
class Backend:
    """One eligible server and the number of rollouts that it holds now."""

    url: str
    policy_version: str = ""
    active: int = 0
    speed: float | None = None
    """The sampled tokens per second of a rollout's model time, or None if not measured yet."""
    policy_index: int = 0
    pace: Pace | None = None
    """What recently completed Runs have shown, or None if nothing is known."""
    quiet: float = 0.0
    """The seconds since a rollout last began on the backend."""
    max_active: int = UNKNOWN_PLACES
    """The most rollouts that it holds at once."""


def relative_speeds(backends: Iterable[Backend]) -> dict[str, float]:
    """Return each backend's speed relative to the fastest, in (0, 1]; unmeasured ones get the mean."""
    speeds = {backend.url: backend.speed for backend in backends}
    known = [speed for speed in speeds.values() if speed is not None and speed > 0]
    if not known:
        return dict.fromkeys(speeds, 1.0)
    mean, fastest = sum(known) / len(known), max(known)
    return {url: max((speed or mean) / fastest, MIN_RELATIVE_SPEED) for url, speed in speeds.items()}


@dataclass(slots=True)
class Router:
    """A pool's eligible backends while a batch of leases is being granted."""

    backends: dict[str, Backend]
    reserved: int = 0
    """The places kept for rollouts whose backend is gone, because those already hold a sandbox and tokens."""
    waiting: int | None = None
    """The rollouts still to come, including those before Run, or None if there are many or not counted."""
    active: dict[str, int] = field(init=False)
    _speeds: dict[str, float] = field(init=False)
    _speed_sum: float = field(init=False)
    _total: int = field(init=False)
    _heap: list[tuple[float, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.active = {url: backend.active for url, backend in self.backends.items()}
        self._speeds = relative_speeds(self.backends.values())
        self._speed_sum = sum(self._speeds.values())
        self._total = sum(self.active.values())
        self._heap = [(self._key(url), url) for url in self.active]
        heapq.heapify(self._heap)

    @classmethod
    def of(cls, backends: Iterable[Backend], reserved: int = 0, waiting: int | None = None) -> Router:
        """Return a router over these backends."""
        return cls({backend.url: backend for backend in backends}, reserved, waiting)

    def copy(self) -> Router:
        """Return another router in the state that this one had before its first choice."""
        return replace(self)

    @property
    def free(self) -> int:
        """The number of further rollouts that the pool takes from the queue."""
        places = sum(max(0, self.limit(url) - count) for url, count in self.active.items())
        return max(0, places - self.reserved)

    def limit(self, url: str) -> int:
        """Return the most rollouts on a backend."""
        return self.backends[url].max_active

    def bound(self, url: str, together: int, factor: float = BOUND) -> float:
        """Return the load up to which a sticky choice may fill the backend, including the rollout to place.

        It is `factor` times the backend's fair share by speed, or the fair share plus as much as a pool with
        even loads needs to take `together` rollouts of one group on one backend, whichever is larger:
        n = share·T + k grows beyond its share of T + k by k·(1 - share).
        """
        share = self._speeds[url] / self._speed_sum
        fair = (self._total + 1) * share
        slack = together * (1 - share) * min(1.0, self._speeds[url] / _EVEN)
        return max(factor * fair, fair + slack)

    def choose(
        self, own: str | None, group: str | None, *, together: int = 1, avoid: str | None = None
    ) -> Backend | None:
        """Choose the backend for one more rollout and count it from now on.

        Return None if all are full or, with `waiting`, if the rollout ends sooner when it waits for a faster
        backend. A rollout that has had a backend before is never made to wait.

        Args:
            own: The rollout's previous backend, which is kept while the load there stays within its bound.
            group: The backend of the group's other samples, which is kept in the same way.
            together: The number of unfinished rollouts of the group.
            avoid: The backend where the last attempt failed. It is chosen only if no other has room.
        """
        fresh = own is None and avoid is None
        for url, factor in ((own, OWN_BOUND), (group, BOUND)):
            if url is None or url == avoid or not self._fits(url, together, factor):
                continue
            if not (fresh and self._late(url)):
                return self._take(url)
        return self._least(avoid, fresh)

    def horizon(self, batch: int) -> int:
        """Return how many waiting rollouts may matter to the next `batch` choices; 0 means that none do."""
        idle = dict.fromkeys(self.active, 0)
        reach = 0.0
        for url in self.active:
            fuller = min(self.active[url] + batch, self.limit(url))
            reach = max(reach, self._worth_waiting(url, idle | {url: fuller}))
        return int(reach)

    def _fits(self, url: str, together: int, factor: float) -> bool:
        if url not in self.active or self.active[url] >= self.limit(url):
            return False
        return self.active[url] + 1 <= self.bound(url, together, factor) + 1e-9

    def _late(self, url: str) -> bool:
        if self.waiting is None or self.backends[url].pace is None:
            return False
        return self.waiting <= self._worth_waiting(url, self.active)

    def _per_token(self, url: str, pace: Pace, active: int) -> float:
        """Return the expected seconds in Run per sampled token with `active` rollouts on a backend.

        The pace was measured under one load. Beyond that load, a saturated backend shares its throughput
        among all rollouts. Below it, nothing shows that the backend is faster.
        """
        return max(1.0, active / max(pace.load, _SATURATED * self.limit(url))) / pace.rate

    def _worth_waiting(self, here: str, active: Mapping[str, int]) -> float:
        """Return up to how many waiting rollouts clearly faster backends are the better choice for all.

        The last of W waiting rollouts begins there once those beyond the free places have begun, at
        limit / t rollouts a second, and takes t. As long as it ends before one that begins `here` now, a
        rollout `here` would be the last to end. This is the threshold policy for two servers of different
        speeds (Lin and Kumar 1984). The result is 0 if no other backend is clearly faster, or if the faster
        ones have taken no rollout for as long as waiting could gain: no rollout waits for a hanging backend.

        Args:
            here: The URL of a backend.
            active: The number of active rollouts on each backend.
        """
        paces = {url: backend.pace for url, backend in self.backends.items() if backend.pace is not None}
        # The seconds per token for a rollout that begins now, or as soon as a place is free.
        soonest = {
            url: self._per_token(url, pace, min(active[url] + 1, self.limit(url)))
            for url, pace in paces.items()
        }
        faster = [url for url in soonest if here in soonest and soonest[url] * CLEARLY <= soonest[here]]
        if not faster:
            return 0.0
        seconds, best = soonest[here], min(faster, key=soonest.__getitem__)
        free = sum(max(0, self.limit(url) - active[url]) for url in faster)
        quiet = min(self.backends[url].quiet for url in faster)
        if not free and quiet > paces[best].seconds * seconds / soonest[best]:
            return 0.0
        throughput = sum(
            self.limit(url) / self._per_token(url, paces[url], self.limit(url)) for url in faster
        )
        return free + (SPREAD * seconds - soonest[best]) * throughput

    def _least(self, avoid: str | None, fresh: bool) -> Backend | None:
        avoided: tuple[float, str] | None = None
        late: list[tuple[float, str]] = []
        chosen: str | None = None
        while self._heap and chosen is None:
            key, url = self._heap[0]
            if self.active[url] >= self.limit(url):
                heapq.heappop(self._heap)  # Counts only grow while a router is in use.
            elif key != self._key(url):
                # The entry is stale because the backend has since been chosen; its current load is pushed
                # again.
                heapq.heapreplace(self._heap, (self._key(url), url))
            elif url == avoid:
                avoided = heapq.heappop(self._heap)
            elif fresh and self._late(url):
                late.append(heapq.heappop(self._heap))
            else:
                chosen = url
        for entry in late:
            heapq.heappush(self._heap, entry)
        if avoided is not None:
            heapq.heappush(self._heap, avoided)
            chosen = chosen or avoid
        return None if chosen is None else self._take(chosen)

    def _key(self, url: str) -> float:
        return (self.active[url] + 1) / self._speeds[url]

    def _take(self, url: str) -> Backend:
        self.active[url] += 1
        self._total += 1
        if self.waiting is not None:
            self.waiting -= 1
        return self.backends[url]
