"""Sharing leases between jobs, and choosing backends."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rollyard_api.fairness import Share, allocate
from rollyard_api.router import Backend, Router


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


async def test_two_jobs_of_very_different_size(served: Any, make_manifest: Any, worker_of: Any) -> None:
    many = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(200)]}
    for name, tasks in (("large", many), ("small", {"inline": many["inline"][:6]})):
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(name, tasks=tasks))
    worker = worker_of(served.worker)
    first = await worker.lease(init=8)
    assert Counter(lease["job"] for lease in first) == {"large": 4, "small": 4}
    second = await worker.lease(init=8)
    assert Counter(lease["job"] for lease in second) == {"large": 6, "small": 2}


def test_fewest_active_rollouts_first_and_a_finished_one_gives_its_place_back() -> None:
    router = Router.of(2, [Backend("a", active=1), Backend("b", active=0)])
    assert [choice.url if (choice := router.choose(None, None)) else None for _ in range(4)] == [
        "b",
        "a",
        "b",
        None,
    ]
    assert Router.of(2, [Backend("a", active=2), Backend("b", active=1)]).free == 1


def test_a_rollout_stays_on_its_backend() -> None:
    router = Router.of(8, [Backend("a", active=5), Backend("b", active=0)])
    assert router.choose("a", None) == Backend("a", active=5)
    gone = router.choose("c", None)
    assert gone is not None
    assert gone.url == "b"


def test_a_group_shares_a_backend_within_the_bound() -> None:
    router = Router.of(100, [Backend("a"), Backend("b"), Backend("c")])
    group: str | None = None
    for _ in range(12):
        chosen = router.choose(None, group)
        assert chosen is not None
        group = group or chosen.url
    # The bound holds at every choice: load ≤ 1.25 × mean + 1, so no backend has more than 1.25 × 4 + 1.
    assert max(router.active.values()) <= 6
    assert router.active[group or ""] >= max(router.active.values()) - 1
