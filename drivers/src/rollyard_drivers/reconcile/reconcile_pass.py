"""What every driver's pass needs around the reconcile: reading jobs and pools, and what is to be reported.

It is pure, as the reconcile itself is.
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

from rollyard_drivers.reconcile.conditions import ConditionUpdate, holds, updated
from rollyard_drivers.reconcile.plan import ObservedJob, ObservedWorkload, PoolState

CLOSED = "rollyard.dev/closed"
"""Annotation of the control plane: no task will be added to the job."""
CANCEL_REASON = "rollyard.dev/cancel-reason"
"""Annotation of the control plane: the job was cancelled, and why."""


def is_active(status: RolloutJobStatus) -> bool:
    """Admitted and not finished: it counts among those that run at once."""
    return holds(status.conditions, "Admitted") and not holds(status.conditions, "Finished")


def rank(job: RolloutJob) -> tuple[int, datetime]:
    """Smaller is admitted earlier: by priority, then by age."""
    made = job.metadata.creation_timestamp or datetime.min.replace(tzinfo=UTC)
    return (-job.spec.priority, made)


def observed_job(
    job: RolloutJob,
    workloads: Sequence[ObservedWorkload],
    pool: PoolState | None,
    admitted_others: int,
    refused: str = "",
) -> ObservedJob:
    """What surrounds a job whose annotations are the control plane's."""
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
    """A pool as its jobs need to know it."""
    trouble = next((c.message for c in status.conditions if c.type == "Ready" and c.status != "True"), "")
    return PoolState(status.ready_replicas, trouble)


def routed_by(backends: Sequence[BackendStatus]) -> set[tuple[str, bool, bool]]:
    """What of backends decides where rollouts go."""
    return {(one.url, one.ready, one.draining) for one in backends}


def reported_backends(backends: Sequence[BackendStatus]) -> list[tuple[object, ...]]:
    """The fields of backends that a driver reports to the control plane."""
    return [(one.url, one.ready, one.draining, one.policy_version, one.message) for one in backends]


def in_words(conditions: Sequence[Condition]) -> list[tuple[str, str, str, str]]:
    """Conditions without times and generations: what they say."""
    return [(one.type, one.status, one.reason, one.message) for one in conditions]


def job_report(known: RolloutJob, status: RolloutJobStatus) -> RolloutJobStatus | None:
    """The status that the control plane is to be sent: all but the counts, which are its own.

    Args:
        known: the job as the control plane has it. Its generations may differ from those of an object in a
            cluster; the status is sent in the control plane's.

    Returns:
        None if the control plane knows the status already.
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
    """The same for a pool: all of the status that does not belong to a single backend."""
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
    """The same conditions, observed at another generation."""
    return [one.model_copy(update={"observed_generation": generation}) for one in conditions]


def refused(
    job: RolloutJobStatus, generation: int, reason: str, message: str, now: datetime
) -> RolloutJobStatus:
    """The status of a job that cannot be registered now. It is tried again: what is missing may come.

    `observedGeneration` stays: that generation of the spec has had no effect yet.
    """
    claims = (
        ConditionUpdate("Admitted", False, reason, message),
        ConditionUpdate("Running", False, reason, message),
    )
    return job.model_copy(
        update={
            "conditions": updated(job.conditions, claims, generation, now),
            "message": message[:256],
        }
    )
