"""The reconcile of jobs, which every driver uses. It compares what is wanted with what is observed.

It is pure: it does no I/O, reads no clock, and depends on nothing of Kubernetes. Its input is `now` and
everything observed, and its output is a plan. A second call after the plan was carried out plans nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rollyard_crds import RolloutCounts, RolloutJob, RolloutJobStatus, StageName
from rollyard_crds.fields.dynamic_sampling import TARGET_MET, TARGET_NOT_MET, DynamicSamplingStatus
from rollyard_crds.fields.signals import warnings_of
from rollyard_crds.names import NO_TOOL_PARSER
from rollyard_crds.rolloutjob import StageCounts, StageSpec

from rollyard_drivers.reconcile.conditions import ConditionUpdate, find, holds, shortened, since, updated
from rollyard_drivers.reconcile.naming import child_index, child_name, made_of, owner_of
from rollyard_drivers.reconcile.plan import (
    TEMPLATE_NOT_ALLOWED,
    ObservedJob,
    ObservedWorkload,
    Owner,
    Plan,
    Profile,
    Stop,
    Workload,
)
from rollyard_drivers.reconcile.workloads import WorkloadPlan, earliest, exit_text, keep, restarts_in_a_row

_PROFILE: Final = Profile()


def job_workloads(
    job: RolloutJob, profile: Profile = _PROFILE, observed: Sequence[ObservedWorkload] = ()
) -> tuple[Workload, ...]:
    """Return the stage workers that a running job wants, by its counts and the workers that it has."""
    owner = owner_of(job)
    worked = job.spec.worked_stages
    specs = {stage: getattr(job.spec.stages, stage) for stage in worked}
    places = {stage: job.spec.places(stage) for stage in worked}

    def replicas_of(stage: StageName, role: str) -> int:
        current = _current(owner, role, observed)
        return wanted_replicas(specs[stage], places[stage], getattr(job.status.counts, stage), current)

    fixed_one = all(spec.replicas == 1 and not scales(spec) for spec in specs.values())
    if profile.combine_stages and fixed_one:
        groups: list[tuple[str, tuple[StageName, ...], int]] = [("worker", worked, 1)]
    elif profile.node_workers:
        groups = [("worker", worked, max(replicas_of(stage, "worker") for stage in worked))]
    else:
        groups = [(stage, (stage,), replicas_of(stage, stage)) for stage in worked]
    return tuple(
        Workload(
            name=child_name(owner, role, index),
            kind="stage-worker",
            owner=owner,
            index=index,
            stages=stages,
            concurrency=tuple((stage, places[stage]) for stage in stages),
            made_of=made_of(specs[stages[0]].template, job.metadata.labels, profile),
        )
        for role, stages, replicas in groups
        for index in range(replicas)
    )


def _current(owner: Owner, role: str, observed: Sequence[ObservedWorkload]) -> int:
    """Return the number of workers of a role, which is a stage or `worker`.

    This is one more than the highest index of a worker that is starting or running.
    """
    there = (workload.name for workload in observed if workload.state in ("starting", "running"))
    indices = (child_index(owner, role, name) for name in there)
    return max((index + 1 for index in indices if index is not None), default=0)


def ended(counts: RolloutCounts) -> int:
    """Return the number of rollouts that will not change any more."""
    return counts.succeeded + counts.failed + counts.cancelled


@dataclass(frozen=True, slots=True)
class _Outcome:
    succeeded: bool
    reason: str
    message: str


def _outcome(job: RolloutJob, observed: ObservedJob, now: datetime) -> _Outcome | None:
    counts = job.status.counts
    before = find(job.status.conditions, "Finished")
    if before is not None and before.status == "True":
        return _Outcome(holds(job.status.conditions, "Succeeded"), before.reason, before.message)
    done = ended(counts)
    left = _deadline_left(job, now)
    late = left is not None and left <= 0
    if observed.cancelled in (TARGET_MET, TARGET_NOT_MET):
        return _target_outcome(job, observed.cancelled) if done == counts.total else None
    if observed.cancelled == NO_TOOL_PARSER:
        return _Outcome(
            False,
            NO_TOOL_PARSER,
            f"no parser reads the tool calls of the chat template of BackendPool {_pool_name(job)!r}: set "
            "agent.toolParser, or agent.tools to []; the failed rollout's message says more",
        )
    if observed.cancelled and observed.cancelled != "DeadlineExceeded":
        return _Outcome(False, "Cancelled", f"cancelled; {counts.succeeded} of {counts.total} have a reward")
    if late or observed.cancelled:
        limit = job.spec.active_deadline_seconds
        return _Outcome(
            False, "DeadlineExceeded", f"{done} of {counts.total} rollouts had ended after {limit} s"
        )
    if not observed.closed or done < counts.total or job.spec.dynamic_sampling is not None:
        return None  # The control plane decides when a job with dynamic sampling has come to its end.
    return _too_many_failures(job, counts.total) or _Outcome(
        True, "AllEnded", f"{counts.succeeded} rollouts have a reward, {counts.failed} failed"
    )


def _pool_name(job: RolloutJob) -> str:
    return job.spec.backend_ref.name if job.spec.backend_ref is not None else ""


def _too_many_failures(job: RolloutJob, total: int) -> _Outcome | None:
    """Return the outcome of a job of whose `total` rollouts too many failed, or None."""
    allowed, failed = job.spec.failure_policy.max_failed_fraction, job.status.counts.failed
    if failed <= allowed * total:
        return None
    return _Outcome(
        False,
        "TooManyFailures",
        f"{failed} of {total} rollouts failed for infrastructure reasons; "
        f"failurePolicy.maxFailedFraction allows {allowed:g}",
    )


def _target_outcome(job: RolloutJob, reason: str) -> _Outcome:
    """Return the outcome of a job with dynamic sampling, which the control plane has concluded.

    Rollouts that were cancelled because the target was met do not count among those of which some failed.
    """
    sampling = job.status.dynamic_sampling or DynamicSamplingStatus()
    text = f"{sampling.informative_groups} groups have a signal, and {sampling.target_groups} were wanted"
    if reason == TARGET_NOT_MET:
        return _Outcome(False, reason, f"{text}; no further group can be started")
    failed = _too_many_failures(job, job.status.counts.total - sampling.surplus_rollouts)
    return failed or _Outcome(True, reason, text)


def _deadline_left(job: RolloutJob, now: datetime) -> float | None:
    start = since(job.status.conditions, "Admitted")
    if job.spec.active_deadline_seconds is None or start is None:
        return None
    return job.spec.active_deadline_seconds - (now - start).total_seconds()


def _phase(job: RolloutJob, outcome: _Outcome | None, admitted: bool) -> str:
    counts = job.status.counts
    if outcome is not None:
        if outcome.succeeded:
            return "Succeeded"
        return "Cancelled" if outcome.reason == "Cancelled" else "Failed"
    before_eval = [counts.init, counts.run]
    entered_run = sum((counts.run.queued, counts.run.active, counts.eval.queued, counts.eval.active))
    entered_run += ended(counts)
    if not admitted and not entered_run:
        return "Pending"
    if not entered_run:
        return "Init"
    in_eval = counts.eval.queued + counts.eval.active
    if any(stage.queued + stage.active for stage in before_eval) or not in_eval:
        return "Run"
    return "Eval"


def _admission(job: RolloutJob, observed: ObservedJob, profile: Profile) -> ConditionUpdate:
    if observed.refused:
        return ConditionUpdate("Admitted", False, TEMPLATE_NOT_ALLOWED, observed.refused)
    if job.spec.suspend:
        return ConditionUpdate("Admitted", False, "Suspended", "the job is suspended")
    if holds(job.status.conditions, "Admitted") or observed.admitted_others < profile.max_active_jobs:
        warnings = [*warnings_of(job.spec), *([_skipped(job)] if _skipped(job) else [])]
        return ConditionUpdate("Admitted", True, "Admitted", "; ".join(warnings))
    return ConditionUpdate(
        "Admitted",
        False,
        "Queued",
        f"{observed.admitted_others} jobs are active, which is the most that this driver runs at once",
    )


def _running(
    job: RolloutJob,
    observed: ObservedJob,
    admission: ConditionUpdate,
    fleet: WorkloadPlan,
    desired: Sequence[Workload],
) -> ConditionUpdate:
    reference = job.spec.backend_ref
    if not admission.status:
        return ConditionUpdate("Running", False, admission.reason, admission.message)
    if reference is not None and observed.pool is None:
        return ConditionUpdate(
            "Running",
            False,
            "BackendPoolNotFound",
            f"there is no BackendPool {reference.name!r} in namespace {job.metadata.namespace!r}; "
            "the job starts when there is one",
        )
    if not desired:
        idle = any(scales(getattr(job.spec.stages, stage)) for stage in job.spec.worked_stages)
        text = "nothing waits for a worker" if idle else "every stage has replicas 0"
        return ConditionUpdate("Running", False, "NoWorkers", text)
    least = {workload.name for workload in desired if workload.index < _least(job, workload)}
    if not least <= fleet.running:
        text = f"{len(least & fleet.running)} of {len(least)} stage workers run"
        details = "; ".join((*fleet.troubles, *fleet.waiting))
        return ConditionUpdate("Running", False, "WorkersStarting", f"{text}; {details}" if details else text)
    if observed.pool is not None and reference is not None and not observed.pool.ready:
        detail = f": {observed.pool.message}" if observed.pool.message else ""
        return ConditionUpdate(
            "Running",
            False,
            "BackendPoolNotReady",
            f"BackendPool {reference.name!r} has no ready backend{detail}",
        )
    return ConditionUpdate("Running", True, "WorkersReady", f"{len(fleet.running)} stage workers run")


def _skipped(job: RolloutJob) -> str:
    """Return a warning that at least half of the rows of the job's task list were left out, or ""."""
    skipped = job.status.skipped_rows
    if skipped is None or not skipped.many:
        return ""
    return f"{skipped.summary()}; the first is {skipped.reasons[0]}"


def _unscored(job: RolloutJob) -> str:
    """Return how many rollouts wait for the trainer's rewards, or ""."""
    waiting = job.status.counts.eval.queued
    if job.spec.trainer_reward_seconds is None or not waiting:
        return ""
    return f"rollouts that wait for the trainer's rewards: {waiting} (client.rewards hands them in)"


def _awaited(job: RolloutJob) -> str:
    """Return what an open stream with dynamic sampling lacks, or "" if it has something to do."""
    sampling, counts = job.status.dynamic_sampling, job.status.counts
    if sampling is None or counts.init.active or counts.run.active or counts.eval.active:
        return ""
    so_far = f"{sampling.informative_groups} of {sampling.target_groups} groups have a signal"
    if sampling.informative_groups >= sampling.target_groups:
        return f"no step is open: {so_far}; open one (POST …/targets) or close the stream"
    if sampling.in_flight_groups or sampling.waiting_groups:
        return ""
    return (
        f"no task is left: {so_far}, {sampling.uninformative_groups} have none, {sampling.dropped_groups} "
        "dropped; push tasks or close the stream"
    )


def _least(job: RolloutJob, workload: Workload) -> int:
    """Return the number of workers of a stage without which the job does not count as running.

    Further workers come and go with the queue.
    """
    replicas: list[int] = [getattr(job.spec.stages, stage).replicas for stage in workload.stages]
    return max(1, *replicas)


def reconcile_job(
    job: RolloutJob, observed: ObservedJob, now: datetime, profile: Profile = _PROFILE
) -> Plan[RolloutJobStatus]:
    """Return the plan for `job` at this time.

    The counts in `job.status` are the control plane's current ones; the rest of the status is made here. A
    job that was Finished remains so, with the same reason.
    """
    outcome = _outcome(job, observed, now)
    admission = _admission(job, observed, profile)
    if outcome is not None:
        return _finished_plan(job, observed, outcome, now, profile)
    missing_pool = job.spec.backend_ref is not None and observed.pool is None
    # If the pool vanishes later, the workers are left alone. They wait, since the pool may come back.
    start = admission.status and not (missing_pool and not observed.workloads)
    desired = job_workloads(job, profile, observed.workloads) if start else ()
    broken = _beyond_limit(job, desired, observed, profile)
    if broken is not None:
        return _finished_plan(job, observed, broken, now, profile)
    grace = profile.drain_seconds
    fleet = keep(desired, observed.workloads, now, profile, grace)
    running = _running(job, observed, admission, fleet, desired)
    claims = (
        admission,
        ConditionUpdate("Suspended", job.spec.suspend, "Suspended" if job.spec.suspend else "NotSuspended"),
        running,
        _degraded(fleet),
        ConditionUpdate("Finished", False, "NotFinished"),
    )
    open_stream = admission.status and not (observed.closed or observed.cancelled)
    awaited = (
        _unscored(job),
        _awaited(job) if open_stream else "",
        "" if running.status else running.message,
    )
    message = "; ".join(part for part in (*awaited, _skipped(job)) if part)
    return Plan(
        status=_job_status(job, claims, _phase(job, None, admission.status), now, message),
        launch=fleet.launch,
        stop=fleet.stop,
        requeue_after=earliest((fleet.requeue_after, _deadline_left(job, now))),
    )


def _beyond_limit(
    job: RolloutJob, desired: Sequence[Workload], observed: ObservedJob, profile: Profile
) -> _Outcome | None:
    """Return the outcome of a job whose worker failed more often in a row than it may, or None.

    A worker that ended with status 0, or that was taken away, does not count as failed. A worker that was
    taken away (evicted, or its node was lost) has no exit code.
    """
    limit = job.spec.backoff_limit
    if limit is None:
        return None
    hashes = {workload.name: workload.spec_hash for workload in desired}
    for current in observed.workloads:
        failed = current.state == "exited" and not current.blocked and current.exit_code not in (None, 0)
        if failed and current.spec_hash == hashes.get(current.name):
            restarts = restarts_in_a_row(current, "stage-worker", profile)
            if restarts >= limit:
                return _Outcome(
                    False,
                    "BackoffLimitExceeded",
                    f"{exit_text(current)} after {restarts} restarts in a row; backoffLimit allows {limit}",
                )
    return None


def _degraded(fleet: WorkloadPlan) -> ConditionUpdate:
    if not fleet.troubles:
        return ConditionUpdate("Degraded", False, "Healthy")
    reason = (
        "CrashLoopBackOff"
        if fleet.crash_looping
        else "WorkersBlocked"
        if fleet.blocked
        else "WorkersImpaired"
        if fleet.impaired
        else "Restarting"
    )
    return ConditionUpdate("Degraded", True, reason, "; ".join(fleet.troubles))


def _finished_plan(
    job: RolloutJob, observed: ObservedJob, outcome: _Outcome, now: datetime, profile: Profile
) -> Plan[RolloutJobStatus]:
    verdict = "Succeeded" if outcome.succeeded else "Failed"
    opposite = "Failed" if outcome.succeeded else "Succeeded"
    admitted = holds(job.status.conditions, "Admitted")
    claims = (
        ConditionUpdate("Admitted", admitted, "Admitted" if admitted else "Finished"),
        ConditionUpdate("Suspended", False, "Finished"),
        ConditionUpdate("Running", False, outcome.reason, outcome.message),
        ConditionUpdate("Degraded", False, "Finished"),
        ConditionUpdate("Finished", True, outcome.reason, outcome.message),
        ConditionUpdate(verdict, True, outcome.reason, outcome.message),
        ConditionUpdate(opposite, False, outcome.reason),
        # Tools that know Jobs of Kubernetes look for this name of a success.
        ConditionUpdate("Complete", outcome.succeeded, outcome.reason, outcome.message),
    )
    message = "; ".join(part for part in (outcome.message, _skipped(job)) if part)
    status = _job_status(job, claims, _phase(job, outcome, admitted), now, message)
    since_end = (now - (since(status.conditions, "Finished") or now)).total_seconds()
    ttl = job.spec.ttl_seconds_after_finished
    left = None if ttl is None else ttl - since_end
    expired = left is not None and left <= 0 and not observed.workloads
    unfinished = job.status.counts.total - ended(job.status.counts)
    return Plan(
        status=status,
        stop=tuple(
            Stop(workload.name, 0.0 if workload.state == "exited" else profile.stop_seconds)
            for workload in observed.workloads
            if workload.state != "stopping"
        ),
        cancel=outcome.reason if unfinished or not observed.closed else "",
        delete=expired,
        requeue_after=None if expired else earliest((left,)),
    )


def _job_status(
    job: RolloutJob,
    claims: tuple[ConditionUpdate, ...],
    phase: str,
    now: datetime,
    message: str,
) -> RolloutJobStatus:
    before = job.status
    generation = job.metadata.generation
    conditions = updated(before.conditions, claims, generation, now)
    return before.model_copy(
        update={
            "phase": phase,
            "conditions": conditions,
            "observed_generation": generation or 0,
            "start_time": before.start_time or since(conditions, "Admitted"),
            "completion_time": before.completion_time or since(conditions, "Finished"),
            "message": shortened(message),
        }
    )


def wanted_replicas(stage: StageSpec, places: int, counts: StageCounts, current: int = 0) -> int:
    """Return the number of workers that a stage needs, between `replicas` and `maxReplicas`.

    Args:
        stage: The spec of the stage.
        places: The number of rollouts that each worker holds at once.
        counts: The current counts of the stage.
        current: The number of workers that the stage has. The number is reduced only once fewer rollouts are
            active than the smaller number of workers has places for, because the rollouts of a worker that is
            removed may have to start over.
    """
    most = stage.replicas if stage.max_replicas is None else stage.max_replicas
    load = counts.queued + counts.active
    need = min(most, max(stage.replicas, -(-load // places)))
    if need >= current or not counts.active or counts.active < need * places:
        return need
    return min(current, most)


def scales(stage: StageSpec) -> bool:
    """Return whether the number of the stage's workers follows its queue."""
    return stage.max_replicas is not None and stage.max_replicas > stage.replicas
