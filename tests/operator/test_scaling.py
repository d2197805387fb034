"""Workers follow the queue, and a worker that fails again and again fails its job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_crds import RolloutJob
from rollyard_crds.rolloutjob import StageCounts, StageSpec
from rollyard_drivers.reconcile.job import job_workloads, reconcile_job, wanted_replicas
from rollyard_drivers.reconcile.naming import child_index, child_name
from rollyard_drivers.reconcile.plan import ObservedJob, ObservedWorkload, Owner, PoolState, Profile

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job_of(counts: dict[str, Any] | None = None, **spec: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "metadata": {"name": "job", "uid": "0123456789abcdef", "generation": 1},
            "spec": {"tasks": {"stream": True}, "handler": "shell", "backendRef": {"name": "pool"}, **spec},
            "status": {"counts": counts or {}},
        }
    )


def seen(
    job: RolloutJob, stage: str, indices: range | list[int], state: str = "running"
) -> tuple[ObservedWorkload, ...]:
    wide = job.model_copy(deep=True)
    getattr(wide.spec.stages, stage).replicas = 20
    workloads = [workload for workload in job_workloads(wide) if workload.stages == (stage,)]
    return tuple(
        ObservedWorkload(workloads[index].name, workloads[index].spec_hash, state, NOW)  # type: ignore[arg-type]
        for index in indices
    )


@pytest.mark.parametrize(
    ("bounds", "queued", "active", "current", "wanted"),
    [
        ((1, None), 1000, 10, 1, 1),  # Without maxReplicas there are as many as asked for.
        ((3, None), 0, 0, 5, 3),
        ((0, None), 5, 0, 0, 0),
        ((0, 4), 0, 0, 0, 0),  # It goes from nothing, and back to it.
        ((0, 4), 1, 0, 0, 1),
        ((1, 8), 10, 0, 1, 1),
        ((1, 8), 11, 0, 1, 2),
        ((1, 8), 1000, 0, 1, 8),
        ((1, 8), 0, 21, 5, 3),
        ((1, 8), 0, 30, 5, 5),  # Three would be full to the last place, so this is too early.
        ((1, 8), 0, 29, 5, 3),
        ((1, 4), 0, 60, 6, 4),  # The bound was lowered, which holds at once.
    ],
)
def test_wanted_replicas(
    bounds: tuple[int, int | None], queued: int, active: int, current: int, wanted: int
) -> None:
    stage = StageSpec(replicas=bounds[0], max_replicas=bounds[1])
    assert wanted_replicas(stage, 10, StageCounts(queued=queued, active=active), current) == wanted


@given(
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(1, 50),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(0, 40),
)
def test_replicas_are_within_bounds_and_settle(
    replicas: int, more: int, places: int, queued: int, active: int, current: int
) -> None:
    stage = StageSpec(replicas=replicas, max_replicas=max(1, replicas + more))
    counts = StageCounts(queued=queued, active=active)
    most = stage.max_replicas or 0
    wanted = wanted_replicas(stage, places, counts, current)
    assert replicas <= wanted <= most
    assert wanted_replicas(stage, places, counts, wanted) == wanted, "the same counts again change nothing"
    if wanted < min(current, most):
        assert active == 0 or active < wanted * places
    if queued + active:
        assert wanted >= 1
        assert wanted == most or wanted * places >= queued + active


def test_a_stage_grows_with_its_queue_and_goes_on_running_meanwhile() -> None:
    stages = {"run": {"replicas": 1, "maxReplicas": 4, "concurrency": 8}}
    job = job_of({"total": 30, "run": {"queued": 22, "active": 8}}, stages=stages)
    there = seen(job, "init", [0]) + seen(job, "run", [0]) + seen(job, "eval", [0])
    plan = reconcile_job(job, ObservedJob(workloads=there, pool=PoolState(True)), NOW)
    assert [launch.workload.name[-5:] for launch in plan.launch] == ["run-1", "run-2", "run-3"]
    assert {one.type: one.status for one in plan.status.conditions}["Running"] == "True"


def test_a_stage_shrinks_from_its_highest_index_and_lets_it_drain() -> None:
    stages = {"run": {"replicas": 1, "maxReplicas": 4, "concurrency": 8}}
    job = job_of({"total": 30, "run": {"active": 9}, "succeeded": 21}, stages=stages)
    there = seen(job, "init", [0]) + seen(job, "run", range(4)) + seen(job, "eval", [0])
    plan = reconcile_job(job, ObservedJob(workloads=there, pool=PoolState(True)), NOW)
    assert not plan.launch
    assert [(stop.name[-5:], stop.grace_seconds) for stop in plan.stop] == [
        ("run-2", Profile().drain_seconds),
        ("run-3", Profile().drain_seconds),
    ]


def test_nothing_waits_for_a_stage_that_may_be_empty() -> None:
    stages = {name: {"replicas": 0, "maxReplicas": 2} for name in ("init", "run", "eval")}
    plan = reconcile_job(job_of(stages=stages), ObservedJob(pool=PoolState(True)), NOW)
    assert not plan.launch
    assert plan.status.message == "nothing waits for a worker"


@given(st.from_regex(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True), st.integers(0, 9_999))
def test_an_index_is_read_back_from_a_name(name: str, index: int) -> None:
    owner = Owner("RolloutJob", "default", name, "0123456789abcdef")
    child = child_name(owner, "run", index)
    assert child_index(owner, "run", child) == index
    assert child_index(owner, "init", child) is None
    assert child_index(owner, "run", child + "x") is None


@pytest.mark.parametrize(
    ("limit", "restarts", "code", "lived", "fails"),
    [
        (None, 99, 1, 0, False),
        (0, 0, 1, 0, True),
        (2, 1, 1, 0, False),
        (2, 2, 1, 0, True),
        (2, 2, -9, 0, True),
        (2, 2, 0, 0, False),  # It ended well.
        (2, 2, None, 0, False),  # It was evicted, or its node is lost.
        (2, 2, 1, 3600, False),  # It had run for long, so a new row begins.
    ],
)
def test_backoff_limit(limit: int | None, restarts: int, code: int | None, lived: int, fails: bool) -> None:
    job = job_of({"total": 4, "run": {"queued": 4}}, backoffLimit=limit)
    dead = replace(
        seen(job, "run", [0])[0],
        state="exited",
        exit_code=code,
        restarts=restarts,
        exited_at=NOW + timedelta(seconds=lived),
        message="ImportError: no module",
    )
    observed = ObservedJob(workloads=(dead,), pool=PoolState(True))
    plan = reconcile_job(job, observed, NOW + timedelta(seconds=lived))
    failed = {one.type: one for one in plan.status.conditions}.get("Failed")
    assert (failed is not None and failed.status == "True") == fails
    if fails:
        assert failed is not None
        assert failed.reason == "BackoffLimitExceeded"
        assert "ImportError" in failed.message
        assert plan.cancel == "BackoffLimitExceeded"
        assert not plan.launch
        again = reconcile_job(
            job.model_copy(update={"status": plan.status}), ObservedJob(cancelled=plan.cancel), NOW
        )
        assert again.status.conditions == plan.status.conditions


def test_what_waits_for_a_place_is_said_and_is_no_failure() -> None:
    job = job_of()
    (worker,) = seen(job, "run", [0], "starting")
    gated = replace(worker, pending=True, message="held back until queue 'team' admits it")
    plan = reconcile_job(job, ObservedJob(workloads=(gated,), pool=PoolState(True)), NOW)
    claims = {one.type: one for one in plan.status.conditions}
    assert claims["Degraded"].status == "False"
    assert "until queue 'team' admits it" in claims["Running"].message
    blocked = replace(gated, blocked=True, message="ImagePullBackOff: no such image")
    plan = reconcile_job(job, ObservedJob(workloads=(blocked,), pool=PoolState(True)), NOW)
    claims = {one.type: one for one in plan.status.conditions}
    assert claims["Degraded"].status == "True"
    assert "no such image" in claims["Running"].message
    assert blocked.name not in [launch.workload.name for launch in plan.launch], "the cluster keeps trying"


def test_pod_templates_matter_only_where_there_are_pods() -> None:
    plain, other = job_of(), job_of(stages={"run": {"template": {"image": "mine:1"}}})

    def hashes(job: RolloutJob, profile: Profile) -> dict[str, str]:
        return {workload.name[-6:]: workload.spec_hash for workload in job_workloads(job, profile)}

    assert hashes(plain, Profile()) == hashes(other, Profile())
    pods = Profile(made_of="release-1")
    differing = {name for name, digest in hashes(plain, pods).items() if digest != hashes(other, pods)[name]}
    assert differing == {"-run-0"}
    assert not set(hashes(plain, pods).values()) & set(hashes(plain, Profile(made_of="release-2")).values())


def test_no_worker_evaluates_where_the_trainer_gives_the_rewards() -> None:
    stages = {"eval": {"replicas": 4, "maxReplicas": 8}}
    job = job_of({"eval": {"queued": 96}}, handler="unscored", stages=stages)
    assert [workload.stages for workload in job_workloads(job)] == [("init",), ("run",)]
    (combined,) = job_workloads(job, Profile(combine_stages=True))
    assert combined.stages == ("init", "run")
    (of_node,) = job_workloads(job, Profile(node_workers=True))
    assert (of_node.stages, [stage for stage, _ in of_node.concurrency]) == (("init", "run"), ["init", "run"])
    observed = ObservedJob(pool=PoolState(ready=True, message=""))
    message = reconcile_job(job, observed, NOW).status.message
    assert message.startswith(
        "rollouts that wait for the trainer's rewards: 96 (client.rewards hands them in)"
    )
    evaluated = job_of({"eval": {"queued": 96}}, stages=stages)
    assert "trainer" not in reconcile_job(evaluated, observed, NOW).status.message
    assert len(job_workloads(evaluated)) == 8
