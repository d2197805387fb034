"""Whole jobs over uneven backends, in simulated time: how near the router comes to the ideal split."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_api.backends.monitoring import WEIGHT
from rollyard_api.backends.router import Backend, Pace, Router
from rollyard_api.settings import Settings

CONSTANT, MIXED, SHARED = 0.0, 0.5, 1.0
"""The part of a token's time that grows with the rollouts beside it: none, half, or all (shared).
"""
TOKENS = 100.0
FOLD_SECONDS = Settings(state_dir=Path()).speeds_seconds


@dataclass
class Server:
    """A server on which all rollouts advance at the same rate: a clock of tokens and a heap of ends."""

    speed: float
    shared: float
    limit: int
    tokens: float = 0.0
    ends: list[tuple[float, int, int, float, float]] = field(default_factory=list)

    def rate(self, active: int) -> float:
        """Return the tokens per second of one rollout; `speed` is the rate with all places taken."""
        return self.speed / (1.0 - self.shared + self.shared * active / self.limit)

    @property
    def due(self) -> float:
        """Return the seconds until the next rollout ends."""
        return (self.ends[0][0] - self.tokens) / self.rate(len(self.ends)) if self.ends else float("inf")


@dataclass
class Yard:
    """A pool of servers and a worker with a place for every rollout that they take."""

    speeds: list[float]
    limit: int
    shared: float
    samples: int = 8
    spread: float = 0.25
    waits: bool = True
    seed: int = 1
    fold: float = FOLD_SECONDS
    """Seconds between two writes of what was measured."""
    measured: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    groups: dict[int, set[str]] = field(default_factory=dict)

    def play(self, rollouts: int) -> float:
        """Return the makespan beside the ideal: all work by the throughput of all places together."""
        rng, order = random.Random(self.seed), itertools.count()
        work = [TOKENS * rng.lognormvariate(0.0, self.spread) for _ in range(rollouts)]
        servers = {f"http://b{i}": Server(s, self.shared, self.limit) for i, s in enumerate(self.speeds)}
        ideal = sum(work) / (self.limit * sum(self.speeds))
        queue = [(i // self.samples, tokens) for i, tokens in enumerate(work)][::-1]
        left, home = Counter(group for group, _ in queue), dict[int, str]()
        now = folded = 0.0
        fresh: dict[str, list[tuple[float, float, int]]] = {}
        while queue or any(server.ends for server in servers.values()):
            router = self._router(servers, len(queue))
            while queue:
                group, tokens = queue[-1]
                chosen = router.choose(None, home.get(group), together=left[group])
                if chosen is None:
                    break
                queue.pop()
                home[group] = chosen.url
                self.groups.setdefault(group, set()).add(chosen.url)
                server = servers[chosen.url]
                heapq.heappush(server.ends, (server.tokens + tokens, next(order), group, tokens, now))
            url = min(servers, key=lambda one: servers[one].due)
            seconds = servers[url].due
            assert seconds < float("inf"), "rollouts wait, nothing runs, and none is given out"
            for server in servers.values():
                server.tokens += seconds * server.rate(len(server.ends)) if server.ends else 0.0
            now += seconds
            _, _, group, tokens, began = heapq.heappop(servers[url].ends)
            fresh.setdefault(url, []).append((tokens, now - began, len(servers[url].ends) + 1))
            left[group] -= 1
            if now >= folded + self.fold:
                self._fold(fresh)
                folded, fresh = now, {}
        self._fold(fresh)
        return now / ideal

    def _router(self, servers: dict[str, Server], waiting: int) -> Router:
        backends = []
        for url, server in servers.items():
            rate, load, seconds = self.measured.get(url, (None, 0.0, 0.0))
            pace = None if rate is None or not self.waits else Pace(rate, load, seconds)
            active = len(server.ends)
            backends.append(Backend(url, active=active, speed=rate, pace=pace, max_active=self.limit))
        return Router.of(backends, waiting=waiting if self.waits else None)

    def _fold(self, fresh: dict[str, list[tuple[float, float, int]]]) -> None:
        for url, runs in fresh.items():
            tokens, seconds, loads = (sum(column) for column in zip(*runs, strict=True))
            new = (tokens / seconds, loads / len(runs), seconds / len(runs))
            old, weight = self.measured.get(url, new), 1 - (1 - WEIGHT) ** len(runs)
            self.measured[url] = tuple(o + weight * (n - o) for o, n in zip(old, new, strict=True))  # type: ignore[assignment]


def _ratio(speeds: list[float], limit: int, shared: float, rollouts: int, **options: bool | int) -> float:
    """Return the median of several draws of lengths: no policy knows that a rollout will be twice as long."""
    found = []
    for seed in range(max(1, 1200 // rollouts)):
        yard = Yard(speeds, limit, shared, seed=seed, **options)  # type: ignore[arg-type]
        yard.play(rollouts)  # The pool's first job finds out how fast the backends are.
        found.append(yard.play(rollouts))
    return statistics.median(found)


FOUR = [40.0, 10.0]


@pytest.mark.parametrize("shared", [CONSTANT, MIXED, SHARED])
@pytest.mark.parametrize(
    ("limit", "rollouts", "samples"), [(4, 200, 8), (16, 200, 4), (16, 200, 8), (64, 800, 8)]
)
def test_four_times_slower(limit: int, rollouts: int, samples: int, shared: float) -> None:
    found = _ratio(FOUR, limit, shared, rollouts, samples=samples)
    assert found <= 1.15
    assert found <= _ratio(FOUR, limit, shared, rollouts, samples=samples, waits=False) + 0.01


@pytest.mark.parametrize("shared", [CONSTANT, MIXED, SHARED])
@pytest.mark.parametrize(
    ("speeds", "limit", "rollouts", "bound"),
    [
        # Places are few beside the rollouts here, so one rollout's length is a small part of the whole.
        ([100.0, 10.0], 4, 400, 1.1),
        ([100.0, 10.0], 16, 1600, 1.15),
        ([40.0, 20.0, 10.0], 4, 400, 1.1),
        ([40.0, 20.0, 10.0], 16, 1600, 1.1),
    ],
)
def test_other_ratios(speeds: list[float], limit: int, rollouts: int, bound: float, shared: float) -> None:
    assert _ratio(speeds, limit, shared, rollouts) <= bound


@pytest.mark.parametrize("shared", [CONSTANT, SHARED])
@pytest.mark.parametrize(("limit", "rollouts"), [(4, 200), (16, 200), (64, 800)])
def test_even_backends_lose_nothing(limit: int, rollouts: int, shared: float) -> None:
    for speeds in ([20.0, 20.0], [20.0, 18.0]):
        assert _ratio(speeds, limit, shared, rollouts) <= _ratio(
            speeds, limit, shared, rollouts, waits=False
        ) * (1 + 1e-9)


def _short_first_job(fold: float) -> float:
    """Return the median ratio of first jobs, which take two seconds, with `fold` seconds between writes."""
    yards = (Yard([400.0, 100.0], 4, CONSTANT, samples=5, fold=fold, seed=seed) for seed in range(40))
    return statistics.median(yard.play(40) for yard in yards)


def test_a_short_first_job_uses_what_its_own_first_rollouts_have_shown() -> None:
    assert _short_first_job(FOLD_SECONDS) <= 1.15
    assert _short_first_job(2.0) >= 1.25, "speeds that are written every two seconds come too late"


def test_groups_are_split_no_more_than_without_waiting() -> None:
    whole = []
    for waits in (True, False):
        yard = Yard(FOUR, 16, MIXED, waits=waits)
        yard.play(400)
        yard.groups.clear()
        yard.play(400)
        whole.append(sum(len(urls) == 1 for urls in yard.groups.values()))
    assert whole[0] >= whole[1]


PACES = st.builds(Pace, st.floats(0.01, 1e4), st.floats(1, 64), st.floats(0.01, 1e4))


@st.composite
def pools(draw: st.DrawFn) -> Router:
    limits = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    backends = [
        Backend(
            f"http://b{i}",
            active=draw(st.integers(0, limit + 2)),
            max_active=limit,
            speed=draw(st.one_of(st.none(), st.floats(0.01, 1e4))),
            pace=draw(st.one_of(st.none(), PACES)),
            quiet=draw(st.sampled_from([0.0, 1e12])),
        )
        for i, limit in enumerate(limits)
    ]
    return Router.of(backends, waiting=draw(st.integers(1, 2000)))


@given(pools())
def test_waiting_ends(router: Router) -> None:
    """A rollout waits only for a full backend that takes others, and the latest time for that is known
    before.
    """
    waiting, full = router.waiting, [b for b in router.backends.values() if b.active >= b.max_active]
    assert waiting is not None
    horizon = router.horizon(1)
    room = len(full) < len(router.backends)
    copy = router.copy()
    chosen = router.choose(None, None)
    if chosen is not None:
        assert router.waiting == waiting - 1
    elif room:
        assert waiting <= horizon
        assert any(b.pace is not None and b.quiet == 0.0 for b in full), "it waits for one that hangs"
        assert copy.choose("http://b0", None) is not None, "one that has begun elsewhere is not made to wait"


def test_who_waits() -> None:
    def pool(waiting: int | None, *, fast: int = 16, slow: int = 2, **changes: float | None) -> Router:
        quiet, pace = changes.get("quiet", 0.0) or 0.0, Pace(40.0, 16, 2.5)
        slower = None if changes.get("unknown") else Pace(changes.get("rate", 10.0) or 10.0, 16, 10.0)
        backends = [
            Backend("fast", active=fast, speed=40.0, pace=pace, quiet=quiet, max_active=16),
            Backend("slow", active=slow, speed=10.0, pace=slower, max_active=16),
        ]
        return Router.of(backends, waiting=waiting)

    def where(router: Router, group: str | None = None) -> str | None:
        chosen = router.choose(None, group, together=8)
        return chosen and chosen.url

    assert where(pool(200)) == where(pool(None)) == "slow", "many wait: every place is used"
    assert where(pool(30)) is None, "30 are served by the fast one before the slow one has served one"
    assert where(pool(30), "slow") is None, "not even beside its group"
    assert where(pool(30, fast=15, slow=0)) == "fast", "though the slow one is idle"
    assert where(pool(30, quiet=60.0)) == "slow", "nothing has ended on the fast one for long"
    assert where(pool(30, unknown=1.0)) == "slow"
    assert where(pool(5, rate=30.0)) == "slow", "not clearly slower"
    assert pool(30, rate=30.0).horizon(8) == 0, "nobody needs to count"
    assert pool(30).choose("slow", None) == pool(30).backends["slow"], "it is there already"
    assert pool(30).choose(None, None, avoid="fast") == pool(30).backends["slow"], "it failed on the other"
