"""Jobs share the leases fairly."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rollyard_api.rollouts.leasing import Share, allocate
from rollyard_testing.api.plane import Worker, make_manifest


def _allocate(
    sizes: dict[int, int], places: int, active: dict[int, int] | None = None, **priority: int
) -> Counter[int]:
    shares = [Share(job, priority.get(f"p{job}", 0), (active or {}).get(job, 0)) for job in sizes]
    taken = allocate(shares, places, lambda job, limit: [job] * min(limit, sizes[job]), lambda _job: True)
    return Counter(taken)


def test_a_small_job_does_not_wait_for_a_large_one() -> None:
    assert _allocate({1: 100_000, 2: 5}, 8) == {1: 4, 2: 4}
    assert _allocate({1: 100_000, 2: 2}, 8) == {1: 6, 2: 2}
    assert _allocate({1: 100_000, 2: 5}, 4, active={1: 60}) == {2: 4}


def test_priority_goes_first() -> None:
    assert _allocate({1: 10, 2: 10}, 8, p2=1) == {2: 8}
    assert _allocate({1: 10, 2: 3}, 8, p2=1) == {2: 3, 1: 5}


def test_a_job_that_may_have_no_more_leaves_its_places_to_others() -> None:
    admitted = iter([True, False])
    taken = allocate(
        [Share(1, 1, 0), Share(2, 0, 0)],
        5,
        lambda job, limit: [job] * limit,
        lambda job: job == 2 or next(admitted),
    )
    assert Counter(taken) == {1: 1, 2: 4}


async def test_two_jobs_of_very_different_size(served: Any) -> None:
    many = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(200)]}
    for name, tasks in (("large", many), ("small", {"inline": many["inline"][:6]})):
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(name, tasks=tasks))
    worker = Worker(served.worker)
    first = await worker.lease(init=8)
    assert Counter(lease["job"] for lease in first) == {"large": 4, "small": 4}
    second = await worker.lease(init=8)
    assert Counter(lease["job"] for lease in second) == {"large": 6, "small": 2}
