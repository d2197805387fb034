"""What reconcile plans in the situations that users meet."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rollyard_crds import (
    BackendPool,
    BackendPoolStatus,
    BackendStatus,
    Condition,
    RolloutCounts,
    RolloutJob,
    RolloutJobStatus,
)
from rollyard_crds.fields.dynamic_sampling import DynamicSamplingStatus
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_drivers.reconcile.job import job_workloads, reconcile_job
from rollyard_drivers.reconcile.plan import (
    ObservedJob,
    ObservedPool,
    ObservedWorkload,
    Plan,
    PoolState,
    Profile,
)
from rollyard_drivers.reconcile.pool import pool_workloads, reconcile_pool
from rollyard_drivers.reconcile.reconcile_pass import pool_state, refused
from rollyard_drivers.reconcile.workloads import Replacements, restart_delay

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LOCAL = Profile(combine_stages=True)


def job_of(counts: dict[str, Any] | None = None, **spec: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "metadata": {"name": "job", "uid": "0123456789abcdef", "generation": 3},
            "spec": {
                "tasks": {"url": "file:///t"},
                "handler": "shell",
                "backendRef": {"name": "pool"},
                **spec,
            },
            "status": {"counts": counts or {}},
        }
    )


def running(job: RolloutJob, profile: Profile = LOCAL) -> tuple[ObservedWorkload, ...]:
    return tuple(
        ObservedWorkload(workload.name, workload.spec_hash, "running", NOW)
        for workload in job_workloads(job, profile)
    )


def condition(plan: Any, kind: str) -> Condition:
    conditions: list[Condition] = plan.status.conditions
    (found,) = [condition for condition in conditions if condition.type == kind]
    return found


def test_one_process_for_three_stages_only_where_all_have_one_replica() -> None:
    (worker,) = job_workloads(job_of(), LOCAL)
    assert worker.stages == ("init", "run", "eval")
    assert dict(worker.concurrency) == {"init": 16, "run": 1024, "eval": 16}, "the pool bounds Run"
    several = job_workloads(job_of(stages={"run": {"replicas": 2}}), LOCAL)
    assert [workload.stages for workload in several] == [("init",), ("run",), ("run",), ("eval",)]
    assert len({workload.name for workload in several}) == 4
    assert len(job_workloads(job_of(), Profile())) == 3


def test_names_are_dns_labels_even_for_the_longest_job_name() -> None:
    job = job_of(stages={"run": {"replicas": 10_000}})
    job.metadata.name = "x" * 63
    workloads = job_workloads(job)
    assert max(len(workload.name) for workload in workloads) <= 63
    assert len({workload.name for workload in workloads}) == len(workloads)


@pytest.mark.parametrize(("count", "read", "warned"), [(1, 2, True), (5, 8, True), (5, 11, False)])
def test_a_job_of_whose_rows_half_are_skipped_says_so_to_its_end(count: int, read: int, warned: bool) -> None:
    job = job_of()
    job.status.skipped_rows = SkippedRows(count=count, read=read, reasons=["line 3: id: is missing"])
    warning = f"{count} of {read} rows of the task list are skipped; the first is line 3: id: is missing"
    plan = reconcile_job(job, ObservedJob(pool=PoolState(True)), NOW, LOCAL)
    assert condition(plan, "Admitted").message == (warning if warned else "")
    assert plan.status.message.endswith(f"; {warning}") == warned
    assert plan.status.skipped_rows == job.status.skipped_rows
    ended = job.model_copy(update={"status": plan.status})
    ended.status.counts = RolloutCounts(total=4, succeeded=4)
    final = reconcile_job(ended, ObservedJob(pool=PoolState(True), closed=True), NOW, LOCAL)
    assert {condition(final, kind).status for kind in ("Succeeded", "Complete")} == {"True"}
    assert condition(final, "Failed").status == "False"
    assert final.status.message.endswith(f"; {warning}") == warned
    again = reconcile_job(
        job.model_copy(update={"status": final.status}), ObservedJob(closed=True), NOW, LOCAL
    )
    assert again.status.message == final.status.message


def test_missing_pool_is_a_reason_and_no_failure() -> None:
    plan = reconcile_job(job_of(), ObservedJob(), NOW, LOCAL)
    assert not plan.launch
    assert condition(plan, "Admitted").status == "True"
    assert condition(plan, "Running").reason == "BackendPoolNotFound"
    assert "'pool'" in plan.status.message
    assert condition(plan, "Finished").status == "False"
    assert reconcile_job(job_of(), ObservedJob(pool=PoolState(False)), NOW, LOCAL).launch


def test_oracle_needs_no_pool() -> None:
    job = job_of(agent={"type": "oracle"})
    job.spec.backend_ref = None
    plan = reconcile_job(job, ObservedJob(workloads=running(job)), NOW, LOCAL)
    assert condition(plan, "Running").status == "True"


def test_pool_not_ready_is_said() -> None:
    job = job_of()
    observed = ObservedJob(workloads=running(job), pool=PoolState(False, "loading"))
    plan = reconcile_job(job, observed, NOW, LOCAL)
    assert condition(plan, "Running").reason == "BackendPoolNotReady"
    assert "loading" in plan.status.message
    ready = reconcile_job(job, replace(observed, pool=PoolState(True)), NOW, LOCAL)
    assert (condition(ready, "Running").status, ready.status.message) == ("True", "")
    line = f"{'the reason, and what to do, ' * 12}and HF_ENDPOINT"
    said = reconcile_job(job, replace(observed, pool=PoolState(False, line)), NOW, LOCAL).status.message
    assert said == f"BackendPool 'pool' has no ready backend: {line}"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("word " * 204 + "last", "word " * 204 + "last"),
        ("word " * 204 + "longer", "word " * 204 + "…"),
        ("x" * 2000, "x" * 1022 + " …"),
    ],
)
def test_a_message_that_is_too_long_ends_with_a_whole_word(message: str, shown: str) -> None:
    refusal = refused(RolloutJobStatus(), 1, "Refused", message, NOW)
    assert refusal.message == refusal.conditions[0].message == shown
    assert RolloutJobStatus.model_validate(refusal.model_dump()) == refusal


def test_a_job_runs_once_each_stage_has_its_least_number_of_workers() -> None:
    stages = {"run": {"replicas": 2, "maxReplicas": 3, "concurrency": 1}}
    job = job_of({"total": 9, "run": {"queued": 9}}, stages=stages)
    workers = running(job)
    assert len(workers) == 5
    for missing, runs in ((0, False), (2, False), (3, True), (4, False)):
        there = ObservedJob(workers[:missing] + workers[missing + 1 :], PoolState(True))
        told = condition(reconcile_job(job, there, NOW, LOCAL), "Running")
        assert (told.status == "True") == runs, workers[missing].name
        assert told.reason == ("WorkersReady" if runs else "WorkersStarting")
    none = job_of(stages={stage: {"replicas": 0} for stage in ("init", "run", "eval")})
    plan = reconcile_job(none, ObservedJob(pool=PoolState(True)), NOW, LOCAL)
    assert (condition(plan, "Running").status, condition(plan, "Running").reason) == ("False", "NoWorkers")


@pytest.mark.parametrize("place", [0, 3])
def test_any_worker_may_exceed_the_limit_of_restarts_with_the_present_spec(place: int) -> None:
    job = job_of(backoffLimit=2, stages={"run": {"replicas": 2}})
    workers = list(running(job))
    dead = replace(workers[place], state="exited", exit_code=1, exited_at=NOW, restarts=2)

    def finished(seen: ObservedWorkload) -> str:
        workers[place] = seen
        plan = reconcile_job(job, ObservedJob(tuple(workers), PoolState(True)), NOW, LOCAL)
        return condition(plan, "Finished").reason

    assert finished(dead) == "BackoffLimitExceeded"
    for other in (
        replace(dead, restarts=1),
        replace(dead, exit_code=0),
        replace(dead, exit_code=None),
        replace(dead, blocked=True),
        replace(dead, spec_hash="another"),
        replace(dead, state="running", exit_code=None, exited_at=None),
    ):
        assert finished(other) == "NotFinished", other


def test_vanished_pool_leaves_workers_alone() -> None:
    job = job_of()
    plan = reconcile_job(job, ObservedJob(workloads=running(job)), NOW, LOCAL)
    assert not plan.stop
    assert condition(plan, "Running").reason == "BackendPoolNotFound"


def test_more_jobs_than_the_bound_wait_their_turn() -> None:
    profile = replace(LOCAL, max_active_jobs=2)
    plan = reconcile_job(job_of(), ObservedJob(pool=PoolState(True), admitted_others=2), NOW, profile)
    assert condition(plan, "Admitted").reason == "Queued"
    assert (plan.status.phase, plan.launch) == ("Pending", ())
    admitted = reconcile_job(job_of(), ObservedJob(pool=PoolState(True), admitted_others=1), NOW, profile)
    job = job_of()
    job.status = admitted.status
    later = reconcile_job(job, ObservedJob(pool=PoolState(True), admitted_others=2), NOW, profile)
    assert condition(later, "Admitted").status == "True", "an admitted job is not put back"


def test_suspend_drains_and_resume_launches() -> None:
    job = job_of(suspend=True)
    plan = reconcile_job(job, ObservedJob(workloads=running(job), pool=PoolState(True)), NOW, LOCAL)
    assert [stop.grace_seconds for stop in plan.stop] == [LOCAL.drain_seconds]
    assert condition(plan, "Suspended").status == "True"
    assert condition(plan, "Running").reason == "Suspended"
    job.spec.suspend = False
    assert reconcile_job(job, ObservedJob(pool=PoolState(True)), NOW, LOCAL).launch


@pytest.mark.parametrize(
    ("counts", "phase"),
    [
        ({"total": 2, "init": {"queued": 1, "active": 1}}, "Init"),
        ({"total": 2, "init": {"queued": 1}, "run": {"queued": 1}}, "Run"),
        ({"total": 2, "run": {"active": 1}, "eval": {"active": 1}}, "Run"),
        ({"total": 2, "eval": {"active": 1}, "succeeded": 1}, "Eval"),
        ({"total": 2, "succeeded": 2}, "Succeeded"),
        ({"total": 10, "succeeded": 9, "failed": 1}, "Succeeded"),
        ({"total": 10, "succeeded": 8, "failed": 2}, "Failed"),
    ],
)
def test_phase(counts: dict[str, Any], phase: str) -> None:
    plan = reconcile_job(job_of(counts), ObservedJob(pool=PoolState(True), closed=True), NOW, LOCAL)
    assert plan.status.phase == phase


def test_an_open_stream_is_not_finished_by_having_nothing_to_do() -> None:
    job = job_of({"total": 2, "succeeded": 2}, tasks={"stream": True})
    plan = reconcile_job(job, ObservedJob(pool=PoolState(True)), NOW, LOCAL)
    assert plan.status.phase == "Run"
    assert condition(plan, "Finished").status == "False"


def test_finished_workers_go_and_ttl_deletes() -> None:
    job = job_of({"total": 1, "succeeded": 1}, ttlSecondsAfterFinished=60)
    observed = ObservedJob(workloads=running(job), pool=PoolState(True), closed=True)
    plan = reconcile_job(job, observed, NOW, LOCAL)
    assert len(plan.stop) == 1
    assert plan.requeue_after == 60
    job.status = plan.status
    assert not reconcile_job(job, observed, NOW + timedelta(seconds=60), LOCAL).delete, "a worker is there"
    assert not reconcile_job(job, replace(observed, workloads=()), NOW + timedelta(seconds=59), LOCAL).delete
    later = reconcile_job(job, replace(observed, workloads=()), NOW + timedelta(seconds=60), LOCAL)
    assert later.delete
    assert later.status.completion_time == NOW


def test_cancelled() -> None:
    job = job_of({"total": 3, "run": {"active": 2}, "succeeded": 1})
    plan = reconcile_job(
        job, ObservedJob(pool=PoolState(True), cancelled="Cancelled", closed=True), NOW, LOCAL
    )
    assert plan.cancel == "Cancelled"
    assert plan.status.phase == "Cancelled"
    assert condition(plan, "Failed").reason == "Cancelled"


def test_a_template_that_fits_no_parser_ends_the_job_with_the_reason() -> None:
    job = job_of({"total": 3, "run": {"active": 1}, "failed": 1, "cancelled": 1})
    observed = ObservedJob(pool=PoolState(True), cancelled="NoToolParser", closed=True)
    plan = reconcile_job(job, observed, NOW, LOCAL)
    assert plan.status.phase == "Failed"
    assert {condition(plan, kind).reason for kind in ("Finished", "Failed")} == {"NoToolParser"}
    assert plan.status.message.startswith("no parser reads the tool calls of the chat template")
    assert "set agent.toolParser, or agent.tools to []" in plan.status.message
    assert reconcile_job(job.model_copy(update={"status": plan.status}), observed, NOW, LOCAL) == plan


@pytest.mark.parametrize(
    ("reason", "counts", "verdict"),
    [
        ("TargetMet", {"succeeded": 18, "failed": 2, "cancelled": 20}, ("Succeeded", "TargetMet")),
        # Four of twenty failed; the rollouts that were cancelled for the target do not make them fewer.
        ("TargetMet", {"succeeded": 16, "failed": 4, "cancelled": 20}, ("Failed", "TooManyFailures")),
        ("TargetNotMet", {"succeeded": 40}, ("Failed", "TargetNotMet")),
    ],
)
def test_the_end_of_dynamic_sampling(reason: str, counts: dict[str, Any], verdict: tuple[str, str]) -> None:
    sampling = {"targetGroups": 4, "informativeGroups": 4, "surplusRollouts": counts.get("cancelled", 0)}
    job = job_of({"total": 40, **counts}, samplesPerTask=2, dynamicSampling={"targetGroups": 4})
    job.status.dynamic_sampling = DynamicSamplingStatus.model_validate(sampling)
    observed = ObservedJob(pool=PoolState(True), closed=True)
    # Until the control plane has concluded the job, further groups may start.
    assert condition(reconcile_job(job, observed, NOW, LOCAL), "Finished").status == "False"
    plan = reconcile_job(job, replace(observed, cancelled=reason), NOW, LOCAL)
    assert (plan.status.phase, condition(plan, "Finished").reason) == verdict
    assert plan.cancel == ""
    assert "4 were wanted" in plan.status.message or verdict[1] == "TooManyFailures"
    assert plan.status.dynamic_sampling == job.status.dynamic_sampling


LEFT = "no task is left: 3 of 8 groups have a signal, 12 have none, 1 dropped; push tasks or close"
STEP = "no step is open: 8 of 8 groups have a signal; open one (POST …/targets) or close the stream"


@pytest.mark.parametrize(
    ("sampling", "counts", "message"),
    [
        ({}, {}, LEFT),
        ({"inFlightGroups": 1}, {}, ""),
        ({"waitingGroups": 1}, {}, ""),
        ({"informativeGroups": 8}, {}, STEP),
        # A step is met, and none of the groups that are left has begun; or one of them works.
        ({"informativeGroups": 8, "inFlightGroups": 2, "waitingGroups": 5}, {"init": {"queued": 4}}, STEP),
        ({"informativeGroups": 8, "inFlightGroups": 2}, {"run": {"active": 1}}, ""),
    ],
)
def test_a_stream_says_what_it_lacks(sampling: dict[str, Any], counts: dict[str, Any], message: str) -> None:
    job = job_of(
        {"total": 32, "succeeded": 32, **counts},
        tasks={"stream": True},
        samplesPerTask=2,
        dynamicSampling={"targetGroups": 4},
    )
    there = {"targetGroups": 8, "informativeGroups": 3, "uninformativeGroups": 12, "droppedGroups": 1}
    job.status.dynamic_sampling = DynamicSamplingStatus.model_validate(there | sampling)
    observed = ObservedJob(workloads=running(job), pool=PoolState(1))
    said = reconcile_job(job, observed, NOW, LOCAL).status.message
    assert said.startswith(message)
    assert bool(said) is bool(message)
    # What else is missing is said, too; and nothing is lacking in a stream that was closed.
    poolless = reconcile_job(job, replace(observed, pool=None), NOW, LOCAL).status.message
    assert poolless.startswith(message)
    assert "there is no BackendPool 'pool'" in poolless
    for ending in (replace(observed, closed=True), replace(observed, cancelled="TargetNotMet")):
        assert message == "" or message not in reconcile_job(job, ending, NOW, LOCAL).status.message
    job.spec.suspend = True
    assert reconcile_job(job, observed, NOW, LOCAL).status.message == "the job is suspended"


def test_an_admitted_job_says_what_is_hardly_meant() -> None:
    greedy = job_of({"total": 4}, samplesPerTask=4, sampling={"temperature": 0.0})
    admitted = condition(reconcile_job(greedy, ObservedJob(pool=PoolState(1)), NOW, LOCAL), "Admitted")
    assert admitted.status == "True"
    assert admitted.message.startswith("spec.sampling.temperature: at 0 the 4 samples of a task are alike")


def test_a_met_target_ends_the_job_once_the_surplus_has_ended() -> None:
    counts = {"total": 6, "succeeded": 4, "run": {"active": 2}}
    job = job_of(counts, samplesPerTask=2, dynamicSampling={"targetGroups": 1})
    observed = ObservedJob(workloads=running(job), pool=PoolState(True), closed=True, cancelled="TargetMet")
    plan = reconcile_job(job, observed, NOW, LOCAL)
    assert (plan.stop, plan.cancel, plan.status.phase) == ((), "", "Run")


@pytest.mark.parametrize(("closed", "cancel"), [(True, ""), (False, "DeadlineExceeded")])
def test_a_stream_that_ends_takes_no_further_tasks_though_all_its_rollouts_have_ended(
    closed: bool, cancel: str
) -> None:
    job = job_of({"total": 3, "run": {"active": 3}}, activeDeadlineSeconds=30)
    job.status = reconcile_job(job, ObservedJob(pool=PoolState(True)), NOW, LOCAL).status
    job.status.counts = job_of({"total": 3, "succeeded": 3}).status.counts
    plan = reconcile_job(
        job, ObservedJob(pool=PoolState(True), closed=closed), NOW + timedelta(seconds=30), LOCAL
    )
    assert plan.cancel == cancel


def test_deadline_counts_from_admission() -> None:
    job = job_of({"total": 3, "run": {"active": 3}}, activeDeadlineSeconds=30)
    job.status = reconcile_job(job, ObservedJob(pool=PoolState(True), closed=True), NOW, LOCAL).status
    job.status.counts = job_of({"total": 3, "run": {"active": 3}}).status.counts
    observed = ObservedJob(workloads=running(job), pool=PoolState(True), closed=True)
    early = reconcile_job(job, observed, NOW + timedelta(seconds=20), LOCAL)
    assert early.requeue_after == 10
    late = reconcile_job(job, observed, NOW + timedelta(seconds=30), LOCAL)
    assert late.cancel == "DeadlineExceeded"
    assert late.status.phase == "Failed"


def test_dead_worker_waits_then_comes_back_and_is_seen() -> None:
    job = job_of()
    (alive,) = running(job)
    dead = replace(alive, state="exited", exit_code=-9, exited_at=NOW + timedelta(seconds=5), restarts=2)
    observed = ObservedJob(workloads=(dead,), pool=PoolState(True))
    plan = reconcile_job(job, observed, NOW + timedelta(seconds=6), LOCAL)
    assert not plan.launch
    assert plan.requeue_after == 3.0
    assert condition(plan, "Degraded").reason == "CrashLoopBackOff"
    assert "signal 9" in condition(plan, "Degraded").message
    later = reconcile_job(job, observed, NOW + timedelta(seconds=9), LOCAL)
    assert [(launch.restarts, launch.last_end) for launch in later.launch] == [(3, "was killed by signal 9")]
    begun = replace(
        alive, started_at=NOW + timedelta(seconds=9), restarts=3, last_end="was killed by signal 9"
    )
    soon = reconcile_job(job, replace(observed, workloads=(begun,)), NOW + timedelta(seconds=10), LOCAL)
    told = condition(soon, "Degraded").message
    assert told.endswith("was restarted 3 times; the one before was killed by signal 9")
    steady = replace(dead, exited_at=NOW + timedelta(seconds=500))
    again = reconcile_job(job, replace(observed, workloads=(steady,)), NOW + timedelta(seconds=501), LOCAL)
    assert [launch.restarts for launch in again.launch] == [1], "it ran long enough to start over"


def test_a_worker_that_was_killed_after_useful_work_comes_back_at_once() -> None:
    job = job_of(backoffLimit=2)
    (alive,) = running(job)
    dead = replace(alive, state="exited", exit_code=-9, exited_at=NOW + timedelta(seconds=5), restarts=7)
    useful = replace(dead, useful=True)
    plan = reconcile_job(job, ObservedJob((useful,), PoolState(True)), NOW + timedelta(seconds=5), LOCAL)
    assert [launch.restarts for launch in plan.launch] == [1], "its earlier restarts do not count"
    assert condition(plan, "Degraded").reason == "Restarting"
    assert condition(plan, "Finished").status == "False"
    idle = reconcile_job(job, ObservedJob((dead,), PoolState(True)), NOW + timedelta(seconds=5), LOCAL)
    assert condition(idle, "Finished").reason == "BackoffLimitExceeded"
    # A worker ends with status 0 when its job is over, which the driver may not have seen yet.
    ended = replace(useful, exit_code=0)
    later = reconcile_job(job, ObservedJob((ended,), PoolState(True)), NOW + timedelta(seconds=5), LOCAL)
    assert not later.launch
    assert later.requeue_after == LOCAL.backoff_seconds


def test_a_backend_that_was_ready_for_a_while_comes_back_at_once() -> None:
    pool = pool_of()
    died = NOW + timedelta(seconds=200)
    (dead,) = backends_of(pool, state="exited", restarts=4, exit_code=-9, exited_at=died, url="")
    # The pause before restart 5 takes 16 s. A backend that was never ready may have loaded for minutes.
    for ready, restarts in ((None, []), (15, []), (16, [5]), (LOCAL.stable_seconds, [1])):
        since = None if ready is None else died - timedelta(seconds=ready)
        plan = reconcile_pool(pool, ObservedPool((replace(dead, ready_since=since),)), died, LOCAL)
        assert [launch.restarts for launch in plan.launch] == restarts, ready


def test_restart_delay_is_bounded() -> None:
    delays = [restart_delay(n, LOCAL) for n in range(2000)]
    assert delays[:4] == [1, 2, 4, 8]
    assert max(delays) == LOCAL.backoff_cap_seconds


def pool_of(**spec: Any) -> BackendPool:
    return BackendPool.model_validate(
        {"metadata": {"name": "p", "uid": "abc", "generation": 1}, "spec": {"model": "m", **spec}}
    )


def ready_backend(pool: BackendPool, **seen: Any) -> ObservedWorkload:
    """Return the pool's only backend, which has been ready since NOW."""
    (backend,) = backends_of(pool)
    return replace(backend, **{"ready_since": NOW, **seen})


def backends_of(pool: BackendPool, **seen: Any) -> tuple[ObservedWorkload, ...]:
    """Return the pool's backends, which run since NOW, or with what else is seen of all of them."""
    return tuple(
        replace(
            ObservedWorkload(one.name, one.spec_hash, "running", NOW, url=f"http://127.0.0.1:{number}"),
            **seen,
        )
        for number, one in enumerate(pool_workloads(pool), 1)
    )


def test_external_pool_launches_nothing() -> None:
    pool = pool_of(engine={"type": "external", "external": {"urls": ["http://a", "http://b"]}})
    seen = (
        BackendStatus(url="http://a", ready=True),
        BackendStatus(url="http://b", message="connection refused"),
    )
    plan = reconcile_pool(pool, ObservedPool(external=seen), NOW)
    assert not plan.launch
    assert condition(plan, "Ready").status == "True"
    assert "connection refused" in condition(plan, "Degraded").message
    assert condition(plan, "Progressing").status == "True"


def test_hung_backend_is_restarted() -> None:
    pool = pool_of()
    (workload,) = pool_workloads(pool)
    (seen,) = backends_of(pool, ready=False, unready_since=NOW, message="health check timed out")
    soon = reconcile_pool(pool, ObservedPool((seen,)), NOW + timedelta(seconds=10))
    assert not soon.stop
    assert soon.requeue_after == 50
    late = reconcile_pool(pool, ObservedPool((seen,)), NOW + timedelta(seconds=61))
    (stop,) = late.stop
    assert stop.name == workload.name
    assert condition(late, "Ready").status == "False"
    # Nothing of it is left when it is launched again, so the stop itself says how that counts.
    replaced = Replacements()
    replaced.note(stop)
    fresh = reconcile_pool(pool, ObservedPool(), NOW + timedelta(seconds=62)).launch[0]
    assert (fresh.restarts, fresh.last_end) == (0, "")
    for _ in range(2):  # The first try to launch it failed.
        counted = replaced.counted(fresh)
        assert (counted.restarts, counted.last_end) == (1, "did not answer (health check timed out)")
    other = replace(fresh, workload=replace(workload, args=("--other",)))
    assert replaced.counted(other) == other, "another spec starts over"
    replaced.launched(workload.name)
    assert replaced.counted(fresh) == fresh


@pytest.mark.parametrize(("lived", "counted"), [(90, 4), (500, 1)])
def test_a_hung_backend_counts_on_unless_it_ran_long(lived: float, counted: int) -> None:
    pool = pool_of()
    end = NOW + timedelta(seconds=lived)
    seen = ready_backend(pool, restarts=3, ready=False, unready_since=end - timedelta(seconds=61))
    (stop,) = reconcile_pool(pool, ObservedPool((seen,)), end).stop
    assert stop.again is not None
    assert (stop.again.restarts, stop.again.last_end) == (counted, "did not answer")
    gone = reconcile_pool(pool_of(replicas=0), ObservedPool((seen,)), end).stop
    assert [one.again for one in gone] == [None], "nobody wants it again"


@pytest.mark.parametrize(
    ("since", "reported", "left"),
    [
        (None, {}, 600),
        (None, {"draining": True}, 600),
        (100, {"active_rollouts": 2, "draining": True}, 500),
        # Until the control plane says that it drains, it may route a rollout there.
        (100, {}, 500),
        (100, {"draining": True}, 0),
        (100, {"url": "http://127.0.0.1:2", "draining": True}, 500),
        (599, {"active_rollouts": 2, "draining": True}, 1),
        (600, {"active_rollouts": 2, "draining": True}, 0),
        (601, {"active_rollouts": 2}, 0),
    ],
)
@pytest.mark.parametrize("outdated", [False, True], ids=["surplus", "outdated"])
def test_a_drain_ends_with_the_last_rollout_or_its_time(
    since: float | None, reported: dict[str, Any], left: float, outdated: bool
) -> None:
    pool = pool_of(replicas=1 if outdated else 0)
    draining_since = None if since is None else NOW - timedelta(seconds=since)
    (seen,) = backends_of(pool_of(), draining_since=draining_since)
    seen = replace(seen, spec_hash="old") if outdated else seen
    status = BackendStatus.model_validate({"url": seen.url, "ready": True} | reported)
    pool.status.backends = [status]
    plan = reconcile_pool(pool, ObservedPool((seen,)), NOW, Profile(drain_seconds=600.0))
    assert plan.drain == ({seen.name} if left else set())
    assert [one.name for one in plan.stop] == ([] if left else [seen.name])
    if left:
        assert plan.requeue_after == left
        assert condition(plan, "Progressing").reason == "Draining"


def test_why_a_pod_has_not_begun_is_told_once() -> None:
    pool = pool_of()
    why = "ErrImagePull: manifest unknown"
    (seen,) = backends_of(pool, state="starting", ready=False, message=why, blocked=True, pending=True)
    plan = reconcile_pool(pool, ObservedPool((seen,)), NOW)
    for kind in ("Ready", "Degraded"):
        assert condition(plan, kind).message.count("manifest unknown") == 1
    assert [one.message for one in plan.status.backends] == [why]


def test_a_pool_whose_only_backend_is_stale_is_not_ready() -> None:
    pool = pool_of()
    seen = ready_backend(pool, restarts=1)
    stale = BackendStatus(url=seen.url, ready=True, weights="Stale", message="it began with weights '0'")
    pool.status = pool.status.model_copy(update={"backends": [stale], "policy_version": "v1"})
    plan = reconcile_pool(pool, ObservedPool((seen,)), NOW + timedelta(seconds=130))
    assert (condition(plan, "Ready").status, plan.status.ready_replicas) == ("False", 0)
    assert condition(plan, "Ready").message == f"{seen.url}: it began with weights '0'"
    assert condition(plan, "Progressing").status == "True"
    assert pool_state(plan.status) == PoolState(False, condition(plan, "Ready").message)
    assert plan.status.backends[0].message == "it began with weights '0'"
    degraded = condition(plan, "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "BackendsFailing")
    # It has to be brought to the pool's weights first, which is nothing wrong for a while.
    late = ready_backend(pool, ready_since=NOW + timedelta(seconds=100))
    soon = reconcile_pool(pool, ObservedPool((late,)), NOW + timedelta(seconds=130))
    assert (condition(soon, "Degraded").status, soon.requeue_after) == ("False", 30)
    assert condition(soon, "Ready").message == condition(plan, "Ready").message
    # So has one that the control plane does not know yet.
    pool.status = pool.status.model_copy(update={"backends": []})
    fresh = reconcile_pool(pool, ObservedPool((seen,)), NOW)
    assert condition(fresh, "Ready").status == "False"


@pytest.mark.parametrize(("weights", "drained"), [("Current", 1), ("Stale", 0)])
def test_a_backend_whose_weights_are_behind_serves_nobody_while_the_next_is_replaced(
    weights: Any, drained: int
) -> None:
    pool = pool_of(replicas=2)
    seen = backends_of(pool)
    old = replace(seen[0], spec_hash="of another spec")
    pool.status.backends = [
        BackendStatus(url=seen[0].url, ready=True),
        BackendStatus(url=seen[1].url, ready=True, weights=weights),
    ]
    assert len(reconcile_pool(pool, ObservedPool((old, seen[1])), NOW).drain) == drained


@pytest.mark.parametrize("external", [False, True])
def test_a_pool_stays_ready_while_its_weights_are_updated(external: bool) -> None:
    engine = {"type": "external", "external": {"urls": ["http://127.0.0.1:1"]}}
    pool = pool_of(engine=engine) if external else pool_of()

    def turn(weights: str) -> Plan[BackendPoolStatus]:
        known = BackendStatus(url="http://127.0.0.1:1", ready=True).model_copy(update={"weights": weights})
        if weights != "Current":
            known.message = "to v2"
        pool.status = pool.status.model_copy(update={"backends": [known], "policy_version": "v2"})
        seen = ObservedPool(external=(known,)) if external else ObservedPool((ready_backend(pool),))
        plan = reconcile_pool(pool, seen, NOW)
        pool.status = plan.status
        return plan

    assert condition(turn("Updating"), "Ready").status == "False", "nothing has shown that it can serve"
    assert condition(turn("Current"), "Ready").status == "True"
    plan = turn("Updating")
    assert (condition(plan, "Ready").status, condition(plan, "Ready").reason) == ("True", "WeightsUpdating")
    assert [condition(plan, kind).status for kind in ("Progressing", "Degraded")] == ["False", "False"]
    assert plan.status.ready_replicas == 0
    assert condition(turn("Failed"), "Ready").status == "False"
    assert condition(turn("Updating"), "Ready").status == "False"


def test_a_start_may_take_as_long_as_the_pause_before_the_next() -> None:
    pool = pool_of(engine={"type": "vllm", "startTimeoutSeconds": 1})
    seen = ready_backend(pool, state="starting", ready=False, ready_since=None, restarts=9)
    assert not reconcile_pool(pool, ObservedPool((seen,)), NOW + timedelta(seconds=59)).stop
    (stop,) = reconcile_pool(pool, ObservedPool((seen,)), NOW + timedelta(seconds=60)).stop
    assert stop.again is not None
    assert stop.again.restarts == 10


def test_scaled_to_zero() -> None:
    plan = reconcile_pool(pool_of(replicas=0), ObservedPool(), NOW)
    assert condition(plan, "Ready").reason == "NoBackends"
    assert condition(plan, "Degraded").status == "False"


def vllm_pool(**spec: Any) -> BackendPool:
    engine = {
        "type": "vllm",
        "args": ["--seed=$(BACKEND_INDEX)"],
        "env": {"BIND": "$(BACKEND_INDEX)"},
        "resources": {"gpu": 2},
    }
    return pool_of(engine=engine, replicas=2, **spec)


def test_workloads_of_an_engine_carry_what_a_start_needs() -> None:
    first, second = pool_workloads(vllm_pool())
    assert (first.args, first.env, first.gpus) == (("--seed=0",), (("BIND", "0"),), 2)
    assert (second.args, second.env) == (("--seed=1",), (("BIND", "1"),))
    changes: list[dict[str, Any]] = [
        {"command": ["x"]},
        {"args": ["--seed=0", "a"]},
        {"env": {}},
        {"resources": None},
    ]
    hashes = {first.spec_hash}
    for change in changes:
        pool = vllm_pool()
        for name, value in change.items():
            setattr(pool.spec.engine, name, value)
        hashes.add(pool_workloads(pool)[0].spec_hash)
    assert len(hashes) == 1 + len(changes)
    patient = vllm_pool()
    patient.spec.engine.start_timeout_seconds = 1
    assert pool_workloads(patient) == (first, second), "a longer patience restarts nobody"


def test_start_timeout_is_the_engines_own_and_the_start_is_told() -> None:
    pool = vllm_pool()
    pool.spec.engine.start_timeout_seconds = 200
    seen = backends_of(pool, state="starting", ready=False, message="starting")
    plan = reconcile_pool(pool, ObservedPool(seen), NOW + timedelta(seconds=199))
    assert (plan.stop, plan.requeue_after) == ((), 1)
    assert "loads the model" in condition(plan, "Progressing").message
    assert condition(plan, "Degraded").status == "False"
    late = reconcile_pool(pool, ObservedPool(seen), NOW + timedelta(seconds=201))
    assert {stop.name for stop in late.stop} == {one.name for one in seen}


def test_what_the_machine_lacks_is_told_and_looked_for_again() -> None:
    pool = vllm_pool()
    first, second = backends_of(pool)
    seen = first, replace(second, state="exited", message="wants 2 GPUs", blocked=True, exited_at=NOW, url="")
    plan = reconcile_pool(pool, ObservedPool(seen), NOW + timedelta(seconds=1))
    assert (plan.launch, plan.requeue_after) == ((), 4)
    degraded = condition(plan, "Degraded")
    assert (degraded.reason, "wants 2 GPUs" in degraded.message) == ("BackendsFailing", True)
    again = reconcile_pool(pool, ObservedPool(seen), NOW + timedelta(seconds=5))
    assert [(one.workload.name, one.restarts) for one in again.launch] == [(second.name, 0)]


def test_a_requested_restart_is_done_once_and_what_others_know_is_kept() -> None:
    pool = vllm_pool()
    seen = backends_of(pool)
    pool.status.backends = [
        BackendStatus(url="http://127.0.0.1:1", ready=True, restart_requested=True, weights="Failed"),
        BackendStatus(url="http://127.0.0.1:2", ready=True, circuit="Open", active_rollouts=3),
    ]
    plan = reconcile_pool(pool, ObservedPool(seen), NOW + timedelta(seconds=1))
    assert [stop.name for stop in plan.stop] == [seen[0].name]
    assert "wrong weights" in condition(plan, "Degraded").message
    (kept,) = plan.status.backends
    assert (kept.url, kept.circuit, kept.active_rollouts) == ("http://127.0.0.1:2", "Open", 3)
    gone = (replace(seen[0], state="stopping"), seen[1])
    assert not reconcile_pool(pool, ObservedPool(gone), NOW).stop
