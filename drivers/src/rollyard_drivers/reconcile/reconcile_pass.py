"""What every driver's turn needs around the reconcile: reading jobs and pools, and what is worth telling.

Pure, as the reconcile itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rollyard_crds import (
    BackendPoolStatus,
    BackendStatus,
    Condition,
    RolloutJob,
    RolloutJobStatus,
)

from rollyard_drivers.reconcile.conditions import Claim, holds, updated
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


def told_of(backends: Sequence[BackendStatus]) -> list[tuple[object, ...]]:
    """What a driver tells the control plane of backends."""
    return [(one.url, one.ready, one.draining, one.policy_version, one.message) for one in backends]


def job_news(status: RolloutJobStatus) -> tuple[object, ...]:
    """What of a job's status is told at once when it changes: all that is not a count."""
    return (status.phase, status.conditions, status.observed_generation, status.message)


def pool_news(status: BackendPoolStatus) -> tuple[object, ...]:
    """What of a pool's status is told at once when it changes: all that is not of a single backend."""
    return (status.conditions, status.observed_generation, status.replicas, status.selector)


def in_words(conditions: Sequence[Condition]) -> list[tuple[str, str, str, str]]:
    """Conditions without times and generations: what they say."""
    return [(one.type, one.status, one.reason, one.message) for one in conditions]


def refused(
    job: RolloutJobStatus, generation: int, reason: str, message: str, now: datetime
) -> RolloutJobStatus:
    """The status of a job that cannot be registered now. It is tried again: what is missing may come.

    `observedGeneration` stays: that generation of the spec has had no effect yet.
    """
    claims = (Claim("Admitted", False, reason, message), Claim("Running", False, reason, message))
    return job.model_copy(
        update={
            "conditions": updated(job.conditions, claims, generation, now),
            "message": message[:256],
        }
    )
