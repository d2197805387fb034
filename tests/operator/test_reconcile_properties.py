"""Properties of reconcile: idempotent, convergent, never two of one name, monotone at the end."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rollyard_crds import RolloutJob
from rollyard_drivers.reconcile.job import job_workloads, reconcile_job
from rollyard_drivers.reconcile.plan import ObservedJob, ObservedWorkload, Plan, PoolState, Profile

START = datetime(2026, 1, 1, tzinfo=UTC)


class World:
    """A driver that carries plans out at once, on a clock of its own."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.now = START
        self.workloads: dict[str, ObservedWorkload] = {}

    def apply(self, plan: Plan[Any]) -> None:
        for stop in plan.stop:
            assert stop.name in self.workloads, "stops what is not there"
            del self.workloads[stop.name]
        for launch in plan.launch:
            before = self.workloads.get(launch.workload.name)
            assert before is None or before.state == "exited", "two workloads of one name"
            self.workloads[launch.workload.name] = ObservedWorkload(
                name=launch.workload.name,
                spec_hash=launch.workload.spec_hash,
                state="running",
                started_at=self.now,
                restarts=launch.restarts,
                url=f"http://127.0.0.1:{9000 + launch.workload.index}",
            )

    def kill(self, which: int, code: int) -> None:
        alive = sorted(name for name, seen in self.workloads.items() if seen.state == "running")
        if alive:
            name = alive[which % len(alive)]
            self.workloads[name] = replace(
                self.workloads[name], state="exited", exit_code=code, exited_at=self.now
            )

    @property
    def seen(self) -> tuple[ObservedWorkload, ...]:
        return tuple(self.workloads.values())


def make_job(replicas: tuple[int, int, int], **spec: Any) -> RolloutJob:
    stages = dict(zip(("init", "run", "eval"), ({"replicas": n} for n in replicas), strict=True))
    return RolloutJob.model_validate(
        {
            "metadata": {"name": "job", "uid": "0123456789abcdef", "generation": 1},
            "spec": {
                "tasks": {"stream": True},
                "handler": "shell",
                "backendRef": {"name": "pool"},
                "stages": stages,
                **spec,
            },
        }
    )


replica_counts = st.tuples(*[st.integers(0, 3)] * 3)
profiles = st.builds(Profile, combine_stages=st.booleans(), backoff_cap_seconds=st.sampled_from([5.0, 60.0]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("kill"), st.integers(0, 20), st.sampled_from([-9, 0, 1])),
        st.tuples(st.just("wait"), st.integers(0, 200), st.just(0)),
        st.tuples(st.just("suspend"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("pool"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("scale"), st.integers(0, 3), st.integers(0, 2)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(replica_counts, profiles, steps)
def test_jobs_converge_whatever_happens(
    replicas: tuple[int, int, int], profile: Profile, script: list[tuple[str, int, int]]
) -> None:
    world = World(profile)
    job = make_job(replicas)
    pool: PoolState | None = PoolState(True)

    def turn() -> None:
        nonlocal job
        observed = ObservedJob(workloads=world.seen, pool=pool)
        plan = reconcile_job(job, observed, world.now, profile)
        names = [launch.workload.name for launch in plan.launch]
        assert len(names) == len(set(names))
        before = {condition.type: condition for condition in job.status.conditions}
        for condition in plan.status.conditions:
            old = before.get(condition.type)
            if old is not None:
                flipped = old.status != condition.status
                assert (condition.last_transition_time == old.last_transition_time) or flipped
                assert condition.last_transition_time >= old.last_transition_time
        world.apply(plan)
        job = job.model_copy(update={"status": plan.status})

    for action, first, second in script:
        if action == "kill":
            world.kill(first, second)
        elif action == "wait":
            world.now += timedelta(seconds=first)
        elif action == "suspend":
            job.spec.suspend = bool(first)
        elif action == "pool":
            pool = (None, PoolState(False), PoolState(True))[first]
        else:
            stage = ("init", "run", "eval")[second]
            getattr(job.spec.stages, stage).replicas = first
        turn()

    job.spec.suspend, pool = False, PoolState(True)
    for _ in range(3):
        world.now += timedelta(seconds=profile.backoff_cap_seconds + 1)
        turn()
    wanted = {workload.name: workload.spec_hash for workload in job_workloads(job, profile)}
    assert {seen.name: seen.spec_hash for seen in world.seen if seen.state == "running"} == wanted
    assert len(world.workloads) == len(wanted)

    again = reconcile_job(job, ObservedJob(workloads=world.seen, pool=pool), world.now, profile)
    assert (again.launch, again.stop, again.cancel, again.delete) == ((), (), "", False)
    assert again.status == job.status


reasons = st.sampled_from(["", "", "Cancelled", "DeadlineExceeded"])
counts = st.fixed_dictionaries(
    {name: st.integers(0, 5) for name in ("queued", "active", "succeeded", "failed", "cancelled")}
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(counts, st.booleans(), reasons, st.integers(0, 50)), min_size=1, max_size=8))
def test_a_finished_job_stays_finished_as_it_ended(
    history: list[tuple[dict[str, int], bool, str, int]],
) -> None:
    job = make_job((1, 1, 1), activeDeadlineSeconds=100)
    now = START
    verdict = None
    for numbers, closed, cancelled, seconds in history:
        now += timedelta(seconds=seconds)
        done = {name: numbers[name] for name in ("succeeded", "failed", "cancelled")}
        stage = {"queued": numbers["queued"], "active": numbers["active"]}
        job.status.counts = job.status.counts.model_validate(
            {"total": sum(numbers.values()), "run": stage, **done}
        )
        plan = reconcile_job(
            job, ObservedJob(pool=PoolState(True), closed=closed, cancelled=cancelled), now, Profile()
        )
        status = {condition.type: condition.status for condition in plan.status.conditions}
        finished = status["Finished"] == "True"
        assert (status.get("Succeeded") == "True") + (status.get("Failed") == "True") == int(finished)
        assert status.get("Complete") == status.get("Succeeded")
        assert (plan.status.phase in {"Succeeded", "Failed", "Cancelled"}) == finished
        if finished:
            assert not plan.launch
            ending = (plan.status.phase, plan.status.completion_time, status["Succeeded"])
            assert verdict in (None, ending)
            verdict = ending
        assert finished or verdict is None
        job = job.model_copy(update={"status": plan.status})
