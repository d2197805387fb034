"""Properties of pools: they converge, always have a server while they roll, and drain before they stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus, Condition
from rollyard_drivers.reconcile.plan import ObservedPool, ObservedWorkload, Plan, Profile
from rollyard_drivers.reconcile.pool import pool_workloads, reconcile_pool
from rollyard_drivers.reconcile.workloads import Replacements

START = datetime(2026, 1, 1, tzinfo=UTC)
PROFILE = Profile()
READY_SECONDS = 20


class World:
    """A driver whose backends take their time to start, and a control plane that routes rollouts."""

    def __init__(self, replicas: int) -> None:
        self.now = START
        self.workloads: dict[str, ObservedWorkload] = {}
        self.active: dict[str, int] = {}
        self.requested: set[str] = set()
        self.routed: dict[str, bool] = {}
        """The reported backends by URL, and whether they drain."""
        self.deaf = 0
        """The number of reports that will not reach the control plane."""
        self.launches = 0
        self.ready_seconds = READY_SECONDS
        self.wrong = ""
        """Why every backend's weights are wrong, once it is ready."""
        self.replacements = Replacements()
        self.failing = False
        """If true, new backends never get ready."""
        self.disturbed = False
        """Whether anything but plans has taken a backend away."""
        self.pool = BackendPool.model_validate(
            {
                "metadata": {"name": "p", "uid": "abc"},
                "spec": {"model": "m", "replicas": replicas, "engine": {"type": "vllm"}},
            }
        )

    def serving(self) -> int:
        return sum(
            seen.state == "running" and seen.ready and seen.draining_since is None
            for seen in self.workloads.values()
        )

    def live(self) -> BackendPoolStatus:
        """Return the pool's status as the control plane has it: the driver's report and its own counts."""
        backends = [
            backend.model_copy(
                update={
                    "active_rollouts": self.active.get(backend.url, 0),
                    "restart_requested": backend.url in self.requested or bool(self.wrong and backend.ready),
                    "weights": "Current" if not self.wrong else "Failed" if backend.ready else "Stale",
                    "message": self.wrong if backend.ready else backend.message,
                }
            )
            for backend in self.pool.status.backends
        ]
        return self.pool.status.model_copy(update={"backends": backends})

    def turn(self) -> Plan[BackendPoolStatus]:
        self.pool.status = self.live()
        observed = ObservedPool(workloads=tuple(self.workloads.values()))
        plan = reconcile_pool(self.pool, observed, self.now, PROFILE)
        self.check(plan)
        self.carry_out(plan)
        if self.deaf:
            self.deaf -= 1
            return plan
        self.pool = self.pool.model_copy(update={"status": plan.status})
        # The control plane forgets what it wanted of servers that no longer exist.
        self.requested &= {backend.url for backend in plan.status.backends}
        self.routed = {backend.url: backend.draining for backend in plan.status.backends if backend.ready}
        return plan

    def check(self, plan: Plan[BackendPoolStatus]) -> None:
        reported: dict[str, BackendStatus] = {one.url: one for one in self.pool.status.backends}
        for stop in plan.stop:
            seen = self.workloads[stop.name]
            if seen.state != "running" or not seen.ready or seen.url in self.requested or self.wrong:
                continue
            assert seen.draining_since is not None, "stopped without being drained"
            over = (self.now - seen.draining_since).total_seconds() >= PROFILE.drain_seconds
            known = reported.get(seen.url)
            empty = known is not None and known.draining and not self.active.get(seen.url)
            assert over or empty, "stopped with rollouts before its time was over"
        assert not {stop.name for stop in plan.stop} & plan.drain
        gone = {self.workloads[stop.name].url for stop in plan.stop}
        assert not gone & {one.url for one in plan.status.backends}, "who is stopped could get rollouts"

    def carry_out(self, plan: Plan[Any]) -> None:
        before = self.serving()
        for stop in plan.stop:
            self.replacements.note(stop)
            gone = self.workloads.pop(stop.name)
            self.active.pop(gone.url, None)
            self.requested.discard(gone.url)
        for name, seen in self.workloads.items():
            since = (seen.draining_since or self.now) if name in plan.drain else None
            self.workloads[name] = replace(seen, draining_since=since)
        for launch in plan.launch:
            old = self.workloads.get(launch.workload.name)
            assert old is None or old.state == "exited", "two workloads of one name"
            launch = self.replacements.counted(launch)
            self.replacements.launched(launch.workload.name)
            self.launches += 1
            self.workloads[launch.workload.name] = ObservedWorkload(
                name=launch.workload.name,
                spec_hash=launch.workload.spec_hash,
                state="starting",
                started_at=self.now,
                restarts=launch.restarts,
                last_end=launch.last_end,
                url=f"http://127.0.0.1:{9000 + self.launches}",
                ready=False,
                message="starting",
            )
        if self.pool.spec.replicas > 1 and before > 0 and not self.disturbed:
            assert self.serving() > 0, "a plan left nobody who takes rollouts"

    def kill(self, which: int) -> None:
        self._take(which, lambda seen: replace(seen, state="exited", exit_code=-9, exited_at=self.now))

    def _take(self, which: int, change: Callable[[ObservedWorkload], ObservedWorkload]) -> None:
        alive = sorted(name for name, seen in self.workloads.items() if seen.state != "exited")
        if alive:
            name = alive[which % len(alive)]
            self.active.pop(self.workloads[name].url, None)
            self.workloads[name] = change(self.workloads[name])
            self.disturbed = True

    def request_restart(self, which: int) -> None:
        urls = sorted(self.routed)
        if urls:
            self.requested.add(urls[which % len(urls)])
            self.disturbed = True

    def route(self, which: int) -> None:
        """Start a rollout on a backend that is known to take some."""
        urls = sorted(url for url, draining in self.routed.items() if not draining)
        if urls:
            url = urls[which % len(urls)]
            self.active[url] = self.active.get(url, 0) + 1

    def wait(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)
        for name, seen in self.workloads.items():
            age = (self.now - seen.started_at).total_seconds()
            if seen.state == "starting" and age >= self.ready_seconds and not self.failing:
                up = replace(seen, state="running", ready=True, ready_since=self.now, message="")
                self.workloads[name] = up


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["kill", "restart", "route", "end", "deaf"]), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(0, 60)),
        st.tuples(st.just("scale"), st.integers(0, 4)),
        st.tuples(st.just("change"), st.integers(0, 2)),
    ),
    max_size=40,
)


def act(world: World, action: str, number: int) -> None:
    if action == "kill":
        world.kill(number)
    elif action == "restart":
        world.request_restart(number)
    elif action == "route":
        world.route(number)
    elif action == "deaf":
        world.deaf = 1 + number
    elif action == "end":
        world.active = {url: count - 1 for url, count in world.active.items() if count > 1}
    elif action == "wait":
        world.wait(number)
    elif action == "scale":
        world.pool.spec.replicas = number
    else:
        world.pool.spec.engine.args = [f"--seed={number}"]


def settle(world: World) -> None:
    """Wait long enough for every backend to be drained and replaced, one after the other, after a long
    backoff.
    """
    for _ in range(8 * (world.pool.spec.replicas + len(world.workloads) + 2)):
        world.wait(int(PROFILE.backoff_cap_seconds) // 2 + 1)
        world.turn()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 4), steps)
def test_pools_converge_whatever_happens(replicas: int, script: list[tuple[str, int]]) -> None:
    world = World(replicas)
    for action, number in script:
        act(world, action, number)
        world.turn()
    settle(world)
    wanted = {workload.name: workload.spec_hash for workload in pool_workloads(world.pool)}
    serving = {
        name: seen.spec_hash
        for name, seen in world.workloads.items()
        if seen.state == "running" and seen.ready and seen.draining_since is None
    }
    assert serving == wanted
    assert len(world.workloads) == len(wanted)
    assert not world.requested
    again = world.turn()
    assert (again.launch, again.stop, again.drain) == ((), (), frozenset())
    assert again.status == world.live()
    assert again.status.ready_replicas == world.pool.spec.replicas


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["route", "route", "end", "deaf"]), st.integers(0, 5)),
            st.tuples(st.just("wait"), st.integers(0, 40)),
            st.tuples(st.just("change"), st.integers(0, 2)),
            st.tuples(st.just("scale"), st.integers(2, 4)),
        ),
        max_size=40,
    ),
)
def test_a_rolling_pool_always_has_who_serves(replicas: int, script: list[tuple[str, int]]) -> None:
    """It is also asserted after each plan in `World.carry_out`, and holds while nothing is killed."""
    world = World(replicas)
    settle(world)
    assert world.serving() == replicas
    for action, number in script:
        act(world, action, number)
        world.turn()
        assert world.serving() >= 1
    assert not world.disturbed


def test_a_broken_spec_takes_one_backend_only_and_the_next_spec_mends_it() -> None:
    world = World(3)
    settle(world)
    world.failing = True
    world.pool.spec.engine.args = ["--no-such-argument"]
    for _ in range(200):
        world.wait(5)
        world.turn()
    assert world.serving() == 2
    world.failing = False
    world.pool.spec.engine.args = []
    settle(world)
    assert world.serving() == 3


def conditions(plan: Plan[BackendPoolStatus]) -> dict[str, Condition]:
    return {one.type: one for one in plan.status.conditions}


@pytest.mark.parametrize("cause", ["wrong weights", "dies when ready", "dies at its start", "never answers"])
@pytest.mark.parametrize("start", [1, 130])
def test_a_restart_loop_slows_down_and_the_pool_is_degraded_until_a_backend_serves(
    cause: str, start: int
) -> None:
    """The pool is degraded in every pass, also between the end of one backend and the start of the next."""
    world = World(1)
    world.ready_seconds = start if cause in ("wrong weights", "dies when ready") else 10_000
    world.wrong = "the log-probabilities differ" if cause == "wrong weights" else ""
    world.pool.status.policy_version = "v1"
    if cause == "never answers":
        world.pool.spec.engine.start_timeout_seconds = start
    troubled = restarted = 0
    for second in range(3600):
        world.wait(1)
        age = [(world.now - seen.started_at).total_seconds() for seen in world.workloads.values()]
        if cause.startswith("dies") and age and age[0] > start:
            world.kill(0)
        plan = world.turn()
        found = conditions(plan)
        assert found["Ready"].status == "False" or cause == "dies when ready"
        restarted += bool(second > 1800 and plan.launch)
        if found["Degraded"].status == "True":
            troubled += 1
        else:
            assert not troubled or cause == "dies when ready", second
    last = conditions(plan)["Degraded"]
    assert last.reason == "CrashLoopBackOff"
    assert {
        "wrong weights": "had wrong weights (the log-probabilities differ)",
        "never answers": "did not answer",
    }.get(cause, "was killed by signal 9") in last.message
    assert restarted <= 1 + 1800 / max(start, PROFILE.backoff_cap_seconds)
    # It recovers by itself.
    world.wrong, world.ready_seconds = "", 1
    for _ in range(2 * int(PROFILE.stable_seconds)):
        world.wait(1)
        plan = world.turn()
    assert [conditions(plan)[kind].status for kind in ("Ready", "Degraded")] == ["True", "False"]


def test_scaling_up_again_gives_a_draining_backend_back() -> None:
    world = World(2)
    settle(world)
    for which in range(4):
        world.route(which)
    world.pool.spec.replicas = 1
    assert len(world.turn().drain) == 1
    world.wait(1)
    status = world.turn().status
    assert [backend.draining for backend in status.backends] == [False, True]
    assert (status.ready_replicas, status.ready_text) == (1, "1/1")
    world.pool.spec.replicas = 2
    before = set(world.workloads)
    status = world.turn().status
    assert [backend.draining for backend in status.backends] == [False, False]
    assert (set(world.workloads), world.serving()) == (before, 2)


def test_rollouts_keep_a_draining_backend_for_its_time_and_no_longer() -> None:
    world = World(1)
    settle(world)
    world.route(0)
    world.pool.spec.replicas = 0
    world.turn()
    world.wait(int(PROFILE.drain_seconds) - 1)
    assert world.turn().requeue_after == 1
    assert len(world.workloads) == 1
    world.wait(1)
    world.turn()
    assert not world.workloads
