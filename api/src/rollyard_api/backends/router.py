"""Choosing a backend for a rollout: pure, over counts of active rollouts and measured speeds.

A min-heap keyed by (active + 1) / relative speed: the shortest expected delay, so that backends
of different speeds fill in proportion to them. A rollout stays on its backend (prefix cache), and
the samples of a group share one, while the load there stays within a bound, as in consistent
hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): without one, a backend drowns.
The last rollouts of the queue wait for a place on a faster backend where they end sooner so.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rollyard_api.backends.run_estimates import Pace, Place, worth_waiting

BOUND = 1.25
"""The samples of a group stay together while their backend has at most this multiple of its fair share."""
OWN_BOUND = 2.0
"""Likewise a rollout on its own backend, whose cache holds more than the group's prompt."""
MIN_RELATIVE_SPEED = 1 / 16
"""Floor beside the fastest: a backend that was measured slow once must get rollouts to be measured again."""
_EVEN = 0.5
"""Backends at least this fast, beside the fastest, take a whole group beyond their fair share."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One eligible server and how many rollouts it holds now."""

    url: str
    policy_version: str = ""
    active: int = 0
    speed: float | None = None
    """Sampled tokens per second of a rollout's model time; None: not measured yet."""
    policy_index: int = 0
    pace: Pace | None = None
    """What completed Runs have shown lately; None: nothing."""
    quiet: float = 0.0
    """Seconds since a rollout last began there."""


def eligible(*, ready: bool, weights: str, circuit: str, draining: bool, paused: bool) -> bool:
    """Whether a backend may be given rollouts: columns of its row, and `paused` of its pool's."""
    return ready and weights == "Current" and circuit == "Closed" and not draining and not paused


def relative_speeds(backends: Iterable[Backend]) -> dict[str, float]:
    """Each backend's speed beside the fastest one's, in (0, 1]; the mean for those not measured."""
    speeds = {backend.url: backend.speed for backend in backends}
    known = [speed for speed in speeds.values() if speed is not None and speed > 0]
    if not known:
        return dict.fromkeys(speeds, 1.0)
    mean, fastest = sum(known) / len(known), max(known)
    return {url: max((speed or mean) / fastest, MIN_RELATIVE_SPEED) for url, speed in speeds.items()}


@dataclass(slots=True)
class Router:
    """One pool's eligible backends while a batch of leases is being given out."""

    max_active: int
    backends: dict[str, Backend]
    reserved: int = 0
    """Places that are kept for rollouts whose backend is gone: they hold a sandbox and tokens already."""
    waiting: int | None = None
    """Rollouts that are still to come, those before Run included; None: many, or nobody counted."""
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
    def of(
        cls, max_active: int, backends: Iterable[Backend], reserved: int = 0, waiting: int | None = None
    ) -> Router:
        """A router over these backends, at most `max_active` rollouts on each."""
        return cls(max_active, {backend.url: backend for backend in backends}, reserved, waiting)

    def copy(self) -> Router:
        """Another router that begins where this one does, or did before its first choice."""
        return replace(self)

    @property
    def free(self) -> int:
        """How many more rollouts the pool takes from the queue."""
        places = sum(max(0, self.max_active - count) for count in self.active.values())
        return max(0, places - self.reserved)

    def bound(self, url: str, together: int, factor: float = BOUND) -> float:
        """Rollouts up to which a sticky choice may load the backend, the one to be placed included.

        `factor` times its fair share by speed, or the fair share and as much as a pool whose loads
        are even needs to take `together` rollouts of one group on one backend:
        n = share·T + k grows beyond its share of T + k by k·(1 - share).
        """
        share = self._speeds[url] / self._speed_sum
        fair = (self._total + 1) * share
        slack = together * (1 - share) * min(1.0, self._speeds[url] / _EVEN)
        return max(factor * fair, fair + slack)

    def choose(
        self, own: str | None, group: str | None, *, together: int = 1, avoid: str | None = None
    ) -> Backend | None:
        """The backend for one more rollout, counted from now on; None when all are full.

        Or, with `waiting`, when it ends sooner if it waits for a faster one; a rollout that has
        been somewhere is not made to wait.

        Args:
            own: where the rollout was before; kept while the load there stays within its bound.
            group: where its group's other samples are; kept likewise.
            together: unfinished rollouts of its group.
            avoid: where its last attempt failed; taken only if no other has room.
        """
        fresh = own is None and avoid is None
        for url, factor in ((own, OWN_BOUND), (group, BOUND)):
            if url is None or url == avoid or not self._fits(url, together, factor):
                continue
            if not (fresh and self._late(url)):
                return self._take(url)
        return self._least(avoid, fresh)

    def horizon(self, batch: int) -> int:
        """How many waiting rollouts may matter to the next `batch` choices; 0: none, whatever waits."""
        places = {url: self._place(url) for url in self.active}
        reach = 0.0
        for url, place in places.items():
            if place is not None:
                others = [replace(other, active=0) for at, other in places.items() if other and at != url]
                fuller = replace(place, active=min(place.active + batch, self.max_active))
                reach = max(reach, worth_waiting(fuller, others))
        return int(reach)

    def _fits(self, url: str, together: int, factor: float) -> bool:
        if url not in self.active or self.active[url] >= self.max_active:
            return False
        return self.active[url] + 1 <= self.bound(url, together, factor) + 1e-9

    def _late(self, url: str) -> bool:
        here = None if self.waiting is None else self._place(url)
        if here is None or self.waiting is None:
            return False
        others = [place for other in self.active if other != url and (place := self._place(other))]
        return self.waiting <= worth_waiting(here, others)

    def _place(self, url: str) -> Place | None:
        backend = self.backends[url]
        if backend.pace is None:
            return None
        return Place(backend.pace, self.active[url], self.max_active, backend.quiet)

    def _least(self, avoid: str | None, fresh: bool) -> Backend | None:
        avoided: tuple[float, str] | None = None
        late: list[tuple[float, str]] = []
        chosen: str | None = None
        while self._heap and chosen is None:
            key, url = self._heap[0]
            if self.active[url] >= self.max_active:
                heapq.heappop(self._heap)  # counts only grow while a router lives
            elif key != self._key(url):
                # A stale entry: the backend was taken since; its present load is pushed again.
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
