"""Leases are shared between jobs by pure functions.

Jobs of higher priority come first. Among jobs of equal priority, the job with the fewest active rollouts
comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Share:
    """A job that may have waiting rollouts, with its priority and its number of active rollouts."""

    job_id: int
    priority: int
    active: int


def allocate(
    shares: Iterable[Share],
    places: int,
    fetch: Callable[[int, int], Sequence[R]],
    admit: Callable[[int], bool],
) -> list[R]:
    """Take up to `places` rollouts, each from the job that comes first at that moment.

    Args:
        shares: The candidate jobs.
        places: The number of rollouts that are wanted.
        fetch: The call `fetch(job_id, limit)` returns up to `limit` waiting rollouts of a job, oldest first.
            It is called at most once per job.
        admit: This returns whether the job may have one more rollout, because a backend has room. It is
            called once per rollout taken.

    Returns:
        The rollouts that were taken, in the order in which they are to be leased.
    """
    heap = [(-s.priority, s.active, s.job_id) for s in shares]
    heapq.heapify(heap)
    waiting: dict[int, list[R]] = {}
    taken: list[R] = []
    while heap and len(taken) < places:
        priority, active, job_id = heap[0]
        if job_id not in waiting:
            waiting[job_id] = list(reversed(fetch(job_id, places - len(taken))))
        if not waiting[job_id] or not admit(job_id):
            heapq.heappop(heap)
            continue
        taken.append(waiting[job_id].pop())
        heapq.heapreplace(heap, (priority, active + 1, job_id))
    return taken
