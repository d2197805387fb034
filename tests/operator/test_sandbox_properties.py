"""Properties of the reconcile of sandboxes: whatever happens, claims get one pod each and none is left."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from rollyard_operator.pods.observed_sandbox import ObservedSandbox, Trouble
from rollyard_operator.sandboxes.planning import (
    DeleteSandbox,
    ObservedSandboxes,
    Refusal,
    SandboxLimits,
    SandboxPlan,
    WantedSandbox,
    WarmNeed,
    WarmNumbers,
    reconcile_sandboxes,
)
from rollyard_process.token_bucket import TokenBucket

START = datetime(2026, 1, 1, tzinfo=UTC)
NAMESPACES = ("one", "two")
FLAVORS = ("f0", "f1")


@dataclass
class World:
    """A cluster and a control plane in which plans may be carried out only in part."""

    per_second: float = 5.0
    burst: int = 6
    now: datetime = START
    pods: dict[tuple[str, str], ObservedSandbox] = field(default_factory=dict)
    claims: dict[str, WantedSandbox] = field(default_factory=dict)
    filed: dict[str, datetime] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    """Maps a claim to a pod's uid, as the control plane knows it."""
    warm: dict[tuple[str, str], int] = field(default_factory=dict)
    refusals: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    launches: list[datetime] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.bucket = TokenBucket(self.per_second, self.burst)

    def plan(self) -> SandboxPlan:
        claims = [
            replace(claim, age_seconds=(self.now - self.filed[claim.id]).total_seconds())
            for claim in self.claims.values()
        ]
        needs = [WarmNeed(ns, flavor, count) for (ns, flavor), count in self.warm.items()]
        limits = SandboxLimits(tokens=self.bucket.tokens(self.seconds), per_second=self.per_second)
        observed = ObservedSandboxes(tuple(self.pods.values()), self.refusals)
        return reconcile_sandboxes(claims, needs, observed, self.now, limits)

    @property
    def seconds(self) -> float:
        return (self.now - START).total_seconds()

    def check(self, plan: SandboxPlan) -> None:
        """Check what holds for every plan, whatever the world looks like."""
        names = [(launch.namespace, launch.name) for launch in plan.launch]
        assert len(set(names)) == len(names)
        assert not set(names) & self.pods.keys(), "a name that is taken"
        assert len(names) <= self.bucket.tokens(self.seconds) + 1e-6, "faster than the rate"
        taken = [take.pod.uid for take in plan.take]
        assert len(set(taken)) == len(taken), "one pod for two claims"
        assert len({bind.pod.uid for bind in plan.bind}) == len(plan.bind)
        doomed = {delete.uid for delete in plan.delete}
        assert not doomed & set(taken)
        assert not doomed & {bind.pod.uid for bind in plan.bind}
        pending = {claim.id for claim in self.claims.values() if claim.state == "Pending"}
        assert {bind.claim for bind in plan.bind} <= pending
        for claim, uid in self.bound.items():
            if self.claims[claim].state == "Bound":
                assert uid not in doomed, "the sandbox of a bound claim"
        for launch in plan.launch:
            if launch.claim:
                free = [
                    pod
                    for pod in self.pods.values()
                    if (pod.namespace, pod.flavor, pod.claim) == (launch.namespace, launch.flavor, "")
                    and pod.state == "ready"
                    and pod.usable
                    and pod.uid not in taken
                ]
                assert not free, "a cold pod although a warm one is ready"

    def carry_out(self, plan: SandboxPlan, dice: random.Random, loss: float) -> None:
        """Carry the plan out; each step is lost with probability `loss`."""

        def done() -> bool:
            return dice.random() >= loss

        took = set()
        for take in plan.take:
            key = take.pod.namespace, take.pod.name
            if done() and self.pods.get(key) == take.pod:
                self.pods[key] = replace(take.pod, claim=take.claim)
                took.add(take.claim)
        for bind in plan.bind:
            pod = self.pods.get((bind.pod.namespace, bind.pod.name))
            if done() and pod is not None and pod.claim == bind.claim:
                self.claims[bind.claim] = replace(self.claims[bind.claim], state="Bound", address=pod.address)
                assert pod.uid not in self.bound.values(), "two claims share a pod"
                self.bound[bind.claim] = pod.uid
        for fail in plan.fail:
            if done():
                self.claims[fail.claim] = replace(self.claims[fail.claim], state="Failed")
        for claim in plan.remove:
            if done():
                assert not [pod for pod in self.pods.values() if pod.claim == claim], "a pod is left"
                del self.claims[claim]
                self.bound.pop(claim, None)
        for delete in plan.delete:
            if done():
                self.delete(delete)
        for launch in plan.launch:
            if done():
                self.bucket.take(self.seconds)
                self.launches.append(self.now)
                self.count += 1
                key = launch.namespace, launch.name
                self.pods[key] = ObservedSandbox(
                    *key, f"uid-{self.count}", launch.flavor, launch.claim, "starting", self.now
                )

    def delete(self, delete: DeleteSandbox) -> None:
        key = delete.namespace, delete.name
        pod = self.pods[key]
        assert pod.uid == delete.uid
        if delete.force:
            del self.pods[key]
        else:
            self.pods[key] = replace(pod, state="stopping", gone_due=self.now, usable=True)

    # What the cluster, workers and people do.

    def file(self, place: int, flavor: int) -> None:
        claim = f"c{len(self.filed)}"
        self.filed[claim] = self.now
        self.claims[claim] = WantedSandbox(claim, NAMESPACES[place], "Pending", 0.0, FLAVORS[flavor])

    def release(self, which: int) -> None:
        if self.claims:
            claim = sorted(self.claims)[which % len(self.claims)]
            self.claims[claim] = replace(self.claims[claim], state="Released")

    def change(self, which: int, **changes: object) -> None:
        alive = sorted(key for key, pod in self.pods.items() if pod.state in ("starting", "ready"))
        if alive:
            key = alive[which % len(alive)]
            self.pods[key] = replace(self.pods[key], **changes)  # type: ignore[arg-type]

    def vanish(self, which: int) -> None:
        if self.pods:
            del self.pods[sorted(self.pods)[which % len(self.pods)]]

    def settle_pods(self) -> None:
        """Let time pass: what starts is ready, and what stops is gone."""
        for key, pod in list(self.pods.items()):
            if pod.state == "stopping" and pod.usable:
                del self.pods[key]
            elif pod.state == "starting" and pod.trouble is None:
                self.pods[key] = replace(pod, state="ready", address=f"tcp://{pod.uid}:1")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("file"), st.integers(0, 1), st.integers(0, 1)),
        st.tuples(st.just("file"), st.integers(0, 1), st.integers(0, 1)),
        st.tuples(st.just("release"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("warm"), st.integers(0, 3), st.integers(0, 4)),
        st.tuples(st.just("fail"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("vanish"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("kubectl delete"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("node lost"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("unschedulable"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("secret lost"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("settle"), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 400), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)


def happen(world: World, action: str, first: int, second: int) -> None:
    if action == "file":
        world.file(first, second)
    elif action == "release":
        world.release(first)
    elif action == "warm":
        world.warm[NAMESPACES[first % 2], FLAVORS[first // 2]] = second
    elif action == "fail":
        world.change(first, state="failed", trouble=Trouble("Broken", "it broke", world.now))
    elif action == "vanish":
        world.vanish(first)
    elif action == "kubectl delete":
        world.change(first, state="stopping", gone_due=world.now)
    elif action == "node lost":  # The deletion is never confirmed, so only force helps.
        world.change(first, state="stopping", gone_due=world.now + timedelta(seconds=30), usable=False)
    elif action == "unschedulable":
        trouble = Trouble("Unschedulable", "0/3 nodes", world.now, "scheduler")
        world.change(first, state="starting", trouble=trouble)
    elif action == "secret lost":
        starting = [key for key, pod in world.pods.items() if pod.state != "stopping" and not pod.claim]
        if starting:
            key = sorted(starting)[first % len(starting)]
            world.pods[key] = replace(world.pods[key], usable=False)
    elif action == "settle":
        world.settle_pods()
    else:
        world.now += timedelta(seconds=first / 10)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
def test_it_converges_whatever_happens(script: list[tuple[str, int, int]], seed: int, loss: float) -> None:
    world, dice = World(), random.Random(seed)
    for action, first, second in script:
        happen(world, action, first, second)
        plan = world.plan()
        world.check(plan)
        world.carry_out(plan, dice, loss)

    for _ in range(60):  # Nothing happens from outside, and nothing is lost.
        world.now += timedelta(seconds=31)
        world.settle_pods()
        plan = world.plan()
        world.check(plan)
        world.carry_out(plan, dice, 0.0)
    plan = world.plan()
    assert plan == SandboxPlan(requeue_after=plan.requeue_after), "a repeat plans nothing"

    # Every claim got exactly one pod or an answer, and what was released is gone.
    assert {claim.state for claim in world.claims.values()} <= {"Bound"}
    owners = [pod.claim for pod in world.pods.values() if pod.claim]
    assert sorted(owners) == sorted(world.claims)
    # No pod is left over, and every warm one that is wanted exists.
    warm: dict[tuple[str, str], int] = {}
    for pod in world.pods.values():
        if not pod.claim:
            warm[pod.namespace, pod.flavor] = warm.get((pod.namespace, pod.flavor), 0) + 1
    assert warm == {key: count for key, count in world.warm.items() if count}
    # The rate was kept over every window.
    for index, begin in enumerate(world.launches):
        for later, end in enumerate(world.launches[index:], start=1):
            assert later <= world.burst + world.per_second * (end - begin).total_seconds() + 1e-6


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_warm_pods_are_used_first_and_refilled(ready: int, starting: int, claims: int) -> None:
    world = World(per_second=100.0, burst=1000)
    for number in range(ready + starting):
        state = "ready" if number < ready else "starting"
        key = ("one", f"sbw-f0-{number}")
        world.pods[key] = ObservedSandbox(*key, f"u{number}", "f0", "", state, START, "tcp://a:1")  # type: ignore[arg-type]
    world.warm["one", "f0"] = ready + starting
    for _ in range(claims):
        world.file(0, 0)
    plan = world.plan()
    taken = min(claims, ready + starting)
    assert len(plan.take) == taken
    assert len(plan.bind) == min(claims, ready), "ready ones at once"
    cold = [launch for launch in plan.launch if launch.claim]
    assert len(cold) == claims - taken
    assert len(plan.launch) - len(cold) == taken, "refilled"
    assert plan.launch[: len(cold)] == tuple(cold), "claims come before the warm ones"


def test_a_claim_whose_own_pod_has_no_place_takes_a_warm_one() -> None:
    """On a full node it would wait for the place that the warm pod has."""
    world = World()
    world.warm["one", "f0"] = 1
    world.file(0, 0)
    trouble = Trouble("Unschedulable", "0/1 nodes: insufficient cpu", START, "scheduler")
    own = ObservedSandbox("one", "sb-c0", "u0", "f0", "c0", "starting", START, trouble=trouble)
    warm = ObservedSandbox("one", "sbw-f0-0", "u1", "f0", "", "starting", START, "tcp://a:1")
    world.pods = {(pod.namespace, pod.name): pod for pod in (own, warm)}
    plan = world.plan()
    assert (plan.take, plan.delete) == ((), ()), "neither is ready: its own is as good"
    world.pods["one", "sbw-f0-0"] = replace(warm, state="ready")
    plan = world.plan()
    world.check(plan)
    assert [bind.pod.name for bind in plan.bind] == ["sbw-f0-0"]
    assert [pod.name for pod in plan.delete] == ["sb-c0"]
    world.pods["one", "sb-c0"] = replace(own, trouble=None)
    assert world.plan().take == (), "its own is on its way"


def test_a_pod_of_another_namespace_or_flavor_is_never_taken() -> None:
    world = World()
    for number, (namespace, flavor) in enumerate((("two", "f0"), ("one", "f1"))):
        key = (namespace, f"sbw-{flavor}-{number}")
        world.pods[key] = ObservedSandbox(*key, f"u{number}", flavor, "", "ready", START, "tcp://a:1")
        world.warm[namespace, flavor] = 1
    world.file(0, 0)
    plan = world.plan()
    assert (plan.take, [launch.name for launch in plan.launch]) == ((), ["sb-c0"])


def test_older_claims_come_first_when_the_rate_is_short() -> None:
    world = World(per_second=1.0, burst=2)
    for _ in range(4):
        world.file(0, 0)
        world.now += timedelta(seconds=1)
    plan = world.plan()
    assert [launch.claim for launch in plan.launch] == ["c0", "c1"]
    assert plan.requeue_after is not None
    assert 0 < plan.requeue_after <= 1.0


def test_a_refused_pod_is_asked_for_again_later_and_fails_in_the_end() -> None:
    world = World()
    world.file(0, 0)
    quota = Trouble("QuotaExceeded", "exceeded quota: pods", START, "scheduler")
    world.refusals["one", "sb-c0"] = Refusal(quota, START + timedelta(seconds=4))
    plan = world.plan()
    assert (plan.launch, plan.fail) == ((), ())
    assert plan.requeue_after == 4.0
    world.now = START + timedelta(seconds=4)
    assert world.plan().launch
    world.now = START + timedelta(seconds=300)
    (fail,) = world.plan().fail
    assert (fail.claim, fail.trouble) == ("c0", quota)
    world.now = START
    world.refusals["one", "sb-c0"] = Refusal(replace(quota, reason="PodRefused", hope="none"), START)
    assert [fail.trouble.reason for fail in world.plan().fail] == ["PodRefused"]


def test_a_claim_does_not_pay_for_what_a_warm_pod_waited_before() -> None:
    world = World()
    trouble = Trouble("Unschedulable", "0/3 nodes", START, "scheduler")
    key = ("one", "sbw-f0-0")
    world.pods[key] = ObservedSandbox(*key, "u", "f0", "", "starting", START, trouble=trouble)
    world.now = START + timedelta(seconds=1000)
    world.file(0, 0)
    plan = world.plan()
    assert [take.pod.name for take in plan.take] == ["sbw-f0-0"], "it is first in the scheduler's line"
    world.carry_out(plan, random.Random(0), 0.0)
    assert not world.plan().fail
    world.now += timedelta(seconds=300)
    assert [fail.trouble for fail in world.plan().fail] == [trouble]


def test_a_gated_pod_is_waited_for_however_long() -> None:
    world = World()
    world.file(0, 0)
    gate = Trouble("SchedulingGated", "held back until queue 'q' admits it", START, "gate")
    key = ("one", "sb-c0")
    world.pods[key] = ObservedSandbox(*key, "u", "f0", "c0", "starting", START, trouble=gate)
    world.now = START + timedelta(days=3)
    assert world.plan() == SandboxPlan()


def test_a_warm_pod_that_cannot_start_is_not_replaced_over_and_over() -> None:
    world = World()
    world.warm["one", "f0"] = 1
    key = ("one", "sbw-f0-0")
    trouble = Trouble("ImagePullFailed", "no such image", START, retryable=False)
    world.pods[key] = ObservedSandbox(*key, "u", "f0", "", "failed", START, trouble=trouble)
    plan = world.plan()
    assert (plan.launch, plan.delete, plan.requeue_after) == ((), (), 60.0)
    world.now = START + timedelta(seconds=60)
    assert [delete.name for delete in world.plan().delete] == ["sbw-f0-0"]
    world.file(0, 0)
    assert not world.plan().take, "no claim is given one that failed"


def test_a_claim_whose_job_has_no_object_yet_waits() -> None:
    claim = WantedSandbox("c", "one", "Pending", 5.0, "")
    plan = reconcile_sandboxes([claim], [], ObservedSandboxes(), START, SandboxLimits())
    assert plan == SandboxPlan()


def test_the_name_of_a_warm_pod_is_not_used_again() -> None:
    world, numbers, names = World(per_second=100.0, burst=1000), WarmNumbers(), []
    needs = [WarmNeed("one", "f0", 2)]
    for turn in range(4):
        pods = tuple(world.pods.values())
        plan = reconcile_sandboxes(
            [], needs, ObservedSandboxes(pods, {}, numbers.see(pods)), START, SandboxLimits()
        )
        names.append([launch.name for launch in plan.launch])
        made = [
            ObservedSandbox("one", name, name, "f0", "", "ready", START, "tcp://a:1") for name in names[-1]
        ]
        numbers.see(made)
        if turn == 1:
            # Claimed ones keep their numbers; those of other flavors count for themselves.
            numbers.see([replace(made[0], name="sbw-f0-7", claim="c0"), replace(made[0], flavor="f1")])
    assert names[:2] == [["sbw-f0-0", "sbw-f0-1"], ["sbw-f0-2", "sbw-f0-3"]]
    assert names[2:] == [["sbw-f0-8", "sbw-f0-9"], ["sbw-f0-10", "sbw-f0-11"]]
