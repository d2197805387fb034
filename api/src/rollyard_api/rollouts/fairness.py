"""Sharing leases between jobs: pure. Higher priority first; among equals, fewest active rollouts first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Share:
    """One job that may have rollouts waiting."""

    job_id: int
    priority: int
    active: int


def allocate(
    shares: Iterable[Share],
    places: int,
    fetch: Callable[[int, int], Sequence[R]],
    admit: Callable[[int], bool],
) -> list[R]:
    """Fill up to `places`, each from the job that stands first at that moment.

    Args:
        shares: the candidate jobs.
        places: how many rollouts are wanted.
        fetch: `fetch(job_id, limit)` gives up to `limit` waiting rollouts of a job, oldest first;
            called at most once per job.
        admit: whether the job may have one more, asked once per rollout taken (backends with room).
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
