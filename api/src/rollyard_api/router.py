"""Choosing a backend for a rollout: pure, over counts of active rollouts.

A min-heap keyed by active rollouts; a rollout stays on its backend (prefix cache); the
samples of a group share one while its load stays within BOUND × mean + 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

BOUND = 1.25


@dataclass(frozen=True, slots=True)
class Backend:
    """One ready server and how many rollouts it holds now."""

    url: str
    policy_version: str = ""
    active: int = 0


@dataclass(slots=True)
class Router:
    """One pool's ready backends while a batch of leases is being given out."""

    max_active: int
    backends: dict[str, Backend]
    active: dict[str, int] = field(init=False)
    _heap: list[tuple[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.active = {url: backend.active for url, backend in self.backends.items()}
        self._heap = [(count, url) for url, count in self.active.items()]
        heapq.heapify(self._heap)

    @classmethod
    def of(cls, max_active: int, backends: Iterable[Backend]) -> Router:
        """A router over these backends, at most `max_active` rollouts on each."""
        return cls(max_active, {backend.url: backend for backend in backends})

    @property
    def free(self) -> int:
        """How many more rollouts the pool takes."""
        return sum(max(0, self.max_active - count) for count in self.active.values())

    def _within(self, url: str | None, bound: float) -> bool:
        return url is not None and url in self.active and self.active[url] < min(self.max_active, bound)

    def choose(self, own: str | None, group: str | None) -> Backend | None:
        """The backend for one more rollout, counted from now on; None when all are full.

        Args:
            own: where the rollout was before; kept while that has room.
            group: where its group's other samples are; kept while the load stays within the bound.
        """
        mean = sum(self.active.values()) / len(self.active) if self.active else 0.0
        if self._within(own, float("inf")):
            return self._take(own or "")
        if self._within(group, BOUND * mean + 1):
            return self._take(group or "")
        while self._heap:
            count, url = self._heap[0]
            if count != self.active[url]:
                # A stale entry: the backend was taken by stickiness; its present count is pushed again.
                heapq.heapreplace(self._heap, (self.active[url], url))
                continue
            return self._take(url) if count < self.max_active else None
        return None

    def _take(self, url: str) -> Backend:
        self.active[url] += 1
        return self.backends[url]
