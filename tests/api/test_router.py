"""The router alone: limits, bounds, proportion and stickiness over random pools and whole runs."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_api.backends.assignment import eligible
from rollyard_api.backends.router import (
    BOUND,
    MIN_RELATIVE_SPEED,
    OWN_BOUND,
    Backend,
    Router,
    limit_of,
    places_of,
)
from rollyard_api.storage.rows import RoutedBackend

URLS = [f"http://b{i}" for i in range(6)]
ELSEWHERE = "http://gone"
SPEEDS = st.one_of(st.none(), st.floats(0.01, 1e5))


@st.composite
def pools(draw: st.DrawFn) -> Router:
    backends = []
    for url in URLS[: draw(st.integers(1, len(URLS)))]:
        limit = draw(st.integers(1, 40))
        active = draw(st.integers(0, limit + 3))
        backends.append(Backend(url, active=active, speed=draw(SPEEDS), max_active=limit))
    return Router.of(backends, reserved=draw(st.integers(0, 5)))


CALLS = st.lists(
    st.tuples(
        st.sampled_from([None, ELSEWHERE, *URLS]),
        st.sampled_from([None, ELSEWHERE, *URLS]),
        st.integers(1, 16),
        st.sampled_from([None, ELSEWHERE, *URLS]),
    ),
    max_size=80,
)


@given(pools(), CALLS)
def test_no_choice_breaks_a_limit_or_the_bound(
    router: Router, calls: list[tuple[str, str, int, str]]
) -> None:
    free = sum(max(0, router.limit(url) - count) for url, count in router.active.items())
    assert router.free == max(0, free - router.reserved)
    for own, group, together, avoid in calls:
        before = dict(router.active)
        room = [url for url, count in before.items() if count < router.limit(url)]
        bounds = {url: router.bound(url, together, OWN_BOUND) for url in before}
        chosen = router.choose(own, group, together=together, avoid=avoid)
        if chosen is None:
            assert not room, "places were free and nobody got one"
            continue
        assert chosen.url in room, "over the limit, or no backend of the pool"
        assert router.active == before | {chosen.url: before[chosen.url] + 1}
        assert chosen.url != avoid or room == [avoid], "sent back to where it failed, with room elsewhere"
        if own in room and own != avoid and before[own] + 1 <= bounds[own]:
            assert chosen.url == own
    assert sum(n for n in router.active.values()) <= sum(
        max(b.active, b.max_active) for b in router.backends.values()
    )


@given(pools(), st.integers(1, 16))
def test_stickiness_never_overloads(router: Router, together: int) -> None:
    """Every rollout wants the same backend: it gets what the bound allows, and the others get the rest."""
    total = sum(router.active.values())
    target = URLS[0]
    others = [url for url in router.active if url != target]
    if not others:
        return
    for _ in range(200):
        room = any(router.active[url] < router.limit(url) for url in others)
        chosen = router.choose(target, target, together=together)
        if chosen is None:
            break
        total += 1
        share = router._speeds[target] / sum(router._speeds.values())
        if chosen.url == target and room:
            least = min(
                (router.active[url] + 1) / router._speeds[url]
                for url in others
                if router.active[url] < router.limit(url)
            )
            within = router.active[target] <= max(OWN_BOUND, BOUND) * share * total + together + 1e-6
            assert within or router.active[target] / router._speeds[target] <= least + 1e-6


@given(st.lists(st.floats(1.0, 8.0), min_size=2, max_size=6), st.integers(100, 400))
def test_load_is_in_proportion_to_speed(speeds: list[float], rollouts: int) -> None:
    router = Router.of([Backend(u, speed=s, max_active=10_000) for u, s in zip(URLS, speeds, strict=False)])
    for _ in range(rollouts):
        router.choose(None, None)
    for url, speed in zip(URLS, speeds, strict=False):
        ideal = rollouts * speed / sum(speeds)
        assert abs(router.active[url] - ideal) <= len(speeds), (router.active, speeds)


def test_a_backend_four_times_slower_holds_a_quarter() -> None:
    router = Router.of([Backend("fast", speed=400.0), Backend("slow", speed=100.0)])
    taken = Counter(choice.url for _ in range(100) if (choice := router.choose(None, None)))
    assert taken == {"fast": 80, "slow": 20}
    few = Router.of([Backend("fast", speed=400.0), Backend("slow", speed=100.0)])
    first = [choice.url for _ in range(3) if (choice := few.choose(None, None))]
    assert first == ["fast"] * 3, "an idle slow backend would have taken one for four times as long"


def test_unmeasured_and_badly_measured_backends_get_rollouts() -> None:
    router = Router.of([Backend("a", speed=300.0), Backend("b", speed=100.0), Backend("new")])
    taken = Counter(choice.url for _ in range(120) if (choice := router.choose(None, None)))
    assert taken == {"a": 60, "new": 40, "b": 20}, "the mean of the others until it is measured"
    wrong = Router.of([Backend("a", speed=1e9), Backend("b", speed=1e-9)])
    for _ in range(170):
        wrong.choose(None, None)
    assert wrong.active["b"] == int(170 * MIN_RELATIVE_SPEED / (1 + MIN_RELATIVE_SPEED))


def test_fewest_active_rollouts_first_and_a_finished_one_gives_its_place_back() -> None:
    router = Router.of([Backend("a", active=1, max_active=2), Backend("b", active=0, max_active=2)])
    chosen = [router.choose(None, None) for _ in range(4)]
    assert [choice and choice.url for choice in chosen] == ["b", "a", "b", None]
    assert Router.of([Backend("a", active=2, max_active=2), Backend("b", active=1, max_active=2)]).free == 1


def test_each_backend_has_a_limit_of_its_own() -> None:
    router = Router.of([Backend("large", max_active=5), Backend("small", max_active=2)])
    assert router.free == 7
    taken = Counter(choice.url for _ in range(9) if (choice := router.choose(None, "small", together=9)))
    assert taken == {"large": 5, "small": 2}


@pytest.mark.parametrize(
    ("cache", "context", "places"),
    [
        (750_000, 40_960, 73),  # Qwen3-8B on a GPU of 141 GB
        (699_040, 2048, 1024),  # 1,365 of a tiny model would keep one server's queue longer than useful
        (40_960, 40_960, 8),
        (1, 1_000_000, 8),
        (None, 40_960, 256),
        (750_000, None, 256),
        (None, None, 256),
    ],
)
def test_places_follow_from_the_cache(cache: int | None, context: int | None, places: int) -> None:
    assert places_of(cache, context) == places
    assert limit_of(None, places) == places
    assert limit_of(3, places) == 3, "the pool's own comes first"
    assert limit_of(None, None) == 8, "until the server was asked"


def test_places_are_kept_for_displaced_rollouts() -> None:
    router = Router.of([Backend("a", active=2, max_active=4)], reserved=1)
    assert router.free == 1
    assert Router.of([Backend("a", active=2, max_active=4)], reserved=3).free == 0
    assert router.choose(None, None) is not None, "one that moves gets a place all the same"


def test_a_rollout_stays_on_its_backend() -> None:
    def pool() -> Router:
        return Router.of([Backend("a", active=5, max_active=8), Backend("b", active=0, max_active=8)])

    stays, failed_there, gone = (
        pool().choose("a", None),
        pool().choose(None, "a", together=8, avoid="a"),
        pool().choose("c", None),
    )
    assert [one and one.url for one in (stays, failed_there, gone)] == ["a", "b", "b"]
    only = Router.of([Backend("a", max_active=8)]).choose(None, None, avoid="a")
    assert only is not None, "with no other backend it is better than none"


@given(
    *[st.booleans() for _ in range(2)],
    st.sampled_from(["Current", "Updating", "Stale", "Failed"]),
    st.sampled_from(["Closed", "Open", "HalfOpen"]),
)
def test_who_is_eligible(draining: bool, paused: bool, weights: Any, circuit: Any) -> None:
    row = RoutedBackend(
        *(
            1,
            "default",
            "p",
            "m",
            None,
            "m",
            8,
            paused,
            "http://a",
            "",
            0,
            weights,
            circuit,
            0,
            None,
            draining,
        ),
        *(None, None, None, None, None, None),
    )
    sound = (draining, paused, weights, circuit) == (False, False, "Current", "Closed")
    assert eligible(row) == sound


@dataclass
class Run:
    """A whole job: `groups` of `samples` in order, at most `places` at once, with random durations."""

    urls: list[str]
    places: int
    groups: int = 100
    samples: int = 8
    batch: int = 1
    speeds: dict[str, float] = field(default_factory=dict)
    where: dict[int, list[str]] = field(default_factory=dict)
    loads: list[dict[str, int]] = field(default_factory=list)

    def go(self, seed: int) -> Run:
        rng, order = random.Random(seed), itertools.count()
        queue = [g for g in range(self.groups) for _ in range(self.samples)][::-1]
        active, left, now = Counter[str](), Counter(queue), 0.0
        home: dict[int, str] = {}
        ending: list[tuple[float, int, int, str]] = []
        while queue or ending:
            backends = [Backend(u, active=active[u], speed=self.speeds.get(u)) for u in self.urls]
            router = Router.of(backends)
            while queue and len(ending) < self.places:
                group = queue.pop()
                chosen = router.choose(None, home.get(group), together=left[group])
                assert chosen is not None
                home[group] = chosen.url
                self.where.setdefault(group, []).append(chosen.url)
                active[chosen.url] += 1
                seconds = rng.lognormvariate(0, 0.5) / self.speeds.get(chosen.url, 1.0)
                heapq.heappush(ending, (now + seconds, next(order), group, chosen.url))
            if queue:
                self.loads.append(dict(active))
            for _ in range(min(self.batch, len(ending))):
                now, _, group, url = heapq.heappop(ending)
                active[url] -= 1
                left[group] -= 1
        return self

    @property
    def whole(self) -> float:
        """Return the share of the groups whose samples were all on one backend."""
        return sum(len(set(urls)) == 1 for urls in self.where.values()) / self.groups

    @property
    def skew(self) -> float:
        """Return the fuller backend's share of all active rollouts, as the mean over the run."""
        return sum(max(load.values()) / sum(load.values()) for load in self.loads) / len(self.loads)


def test_nearly_every_group_is_on_one_backend_and_load_is_even() -> None:
    for places, batch in ((16, 1), (32, 8), (64, 1), (128, 8)):
        run = Run(["a", "b"], places, batch=batch).go(places)
        assert run.whole >= 0.9, (places, batch, run.whole)
        assert run.skew <= 0.5 + 2 / 16, (places, batch, run.skew)
    many = Run(URLS, 96, groups=200).go(1)
    assert many.whole >= 0.95
    assert max(Counter(itertools.chain(*many.where.values())).values()) <= 1.25 * 1600 / len(URLS)


def test_groups_stay_together_where_speeds_differ() -> None:
    nearly = Run(["a", "b"], 64, speeds={"a": 1.1, "b": 1.0}).go(2)
    assert nearly.whole >= 0.9
    uneven = Run(["a", "b"], 64, speeds={"a": 4.0, "b": 1.0}).go(3)
    loads = [load.get("b", 0) / sum(load.values()) for load in uneven.loads]
    assert 0.12 <= sum(loads) / len(loads) <= 0.28, "a fifth of what is active"
