"""The steps of every driver's pass around the reconcile: reading jobs and pools, and choosing what to report.

The module is pure, like the reconcile itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rollyard_crds import (
    BackendPool,
    BackendPoolStatus,
    BackendStatus,
    Condition,
    RolloutJob,
    RolloutJobStatus,
)
from rollyard_crds.fields.annotations import CANCEL_REASON, CLOSED

from rollyard_drivers.reconcile.conditions import ConditionUpdate, holds, shortened, updated
from rollyard_drivers.reconcile.plan import ObservedJob, ObservedWorkload, PoolState


def is_active(status: RolloutJobStatus) -> bool:
    """Return whether a job is admitted and not finished.

    Such a job counts against the number of jobs that run at the same time.
    """
    return holds(status.conditions, "Admitted") and not holds(status.conditions, "Finished")


def rank(job: RolloutJob) -> tuple[int, datetime]:
    """Return the sort key of a job: by priority, then by age.

    A job with a smaller key is admitted earlier.
    """
    created = job.metadata.creation_timestamp or datetime.min.replace(tzinfo=UTC)
    return (-job.spec.priority, created)


def observed_job(
    job: RolloutJob,
    workloads: Sequence[ObservedWorkload],
    pool: PoolState | None,
    admitted_others: int,
    refused: str = "",
) -> ObservedJob:
    """Return what is observed of a job whose annotations come from the control plane."""
    annotations = job.metadata.annotations
    return ObservedJob(
        workloads=tuple(workloads),
        pool=pool,
        closed=CLOSED in annotations,
        cancelled=annotations.get(CANCEL_REASON, ""),
        admitted_others=admitted_others,
        refused=refused,
    )


def pool_state(status: BackendPoolStatus) -> PoolState:
    """Return the part of a pool's status that its jobs need."""
    trouble = next((c.message for c in status.conditions if c.type == "Ready" and c.status != "True"), "")
    return PoolState(holds(status.conditions, "Ready"), trouble)


def routed_by(backends: Sequence[BackendStatus]) -> set[tuple[str, bool, bool]]:
    """Return the fields of the backends that decide where rollouts are routed."""
    return {(backend.url, backend.ready, backend.draining) for backend in backends}


def reported_backends(backends: Sequence[BackendStatus]) -> list[tuple[object, ...]]:
    """Return the fields of the backends that a driver reports to the control plane.

    The messages of ready backends are the control plane's own.
    """
    return [
        (
            backend.url,
            backend.ready,
            backend.draining,
            backend.policy_version,
            "" if backend.ready else backend.message,
        )
        for backend in backends
    ]


def in_words(conditions: Sequence[Condition]) -> list[tuple[str, str, str, str]]:
    """Return what the conditions say, without their times and generations."""
    return [
        (condition.type, condition.status, condition.reason, condition.message) for condition in conditions
    ]


def job_report(known: RolloutJob, status: RolloutJobStatus) -> RolloutJobStatus | None:
    """Return the status to send to the control plane.

    It is the whole status except the counts, which belong to the control plane.

    Args:
        known: The job as the control plane has it. Its generations may differ from those of an object in a
            cluster; the status is sent with the control plane's generation.
        status: The status that the reconcile returned.

    Returns:
        The status, or None if the control plane knows it already.
    """
    before, generation = known.status, known.metadata.generation or 0
    if (before.phase, before.message, before.observed_generation) == (
        status.phase,
        status.message,
        generation,
    ) and in_words(before.conditions) == in_words(status.conditions):
        return None
    if status.observed_generation == generation:
        return status
    conditions = in_generation(status.conditions, generation)
    return status.model_copy(update={"conditions": conditions, "observed_generation": generation})


def pool_report(known: BackendPool, status: BackendPoolStatus) -> BackendPoolStatus | None:
    """Return the status of a pool to send to the control plane, or None if it is known there already.

    It is the whole status except the parts that belong to a single backend.
    """
    before, generation = known.status, known.metadata.generation or 0
    if (before.observed_generation, before.replicas, before.selector) == (
        generation,
        status.replicas,
        status.selector,
    ) and in_words(before.conditions) == in_words(status.conditions):
        return None
    if status.observed_generation == generation:
        return status
    conditions = in_generation(status.conditions, generation)
    return status.model_copy(update={"conditions": conditions, "observed_generation": generation})


def in_generation(conditions: Sequence[Condition], generation: int) -> list[Condition]:
    """Return the same conditions, observed at another generation."""
    return [condition.model_copy(update={"observed_generation": generation}) for condition in conditions]


def refused(
    job: RolloutJobStatus, generation: int, reason: str, message: str, now: datetime
) -> RolloutJobStatus:
    """Return the status of a job that cannot be registered now.

    The registration is repeated, since what is missing may appear later. `observedGeneration` is not changed,
    because that generation of the spec has had no effect yet.
    """
    claims = (
        ConditionUpdate("Admitted", False, reason, message),
        ConditionUpdate("Running", False, reason, message),
    )
    return job.model_copy(
        update={
            "conditions": updated(job.conditions, claims, generation, now),
            "message": shortened(message),
        }
    )


def refused_pool(
    pool: BackendPoolStatus,
    generation: int,
    reason: str,
    message: str,
    now: datetime,
    types: Sequence[str] = ("Ready",),
) -> BackendPoolStatus:
    """Return the status of a pool that cannot be served now. Conditions of these types say why."""
    claims = [ConditionUpdate(kind, False, reason, message) for kind in types]
    return pool.model_copy(update={"conditions": updated(pool.conditions, claims, generation, now)})
