"""Whether a job has ended, by the conditions that its driver reports."""

from __future__ import annotations

from rollyard_crds.rolloutjob import RolloutJob
from rollyard_crds.weights import WeightUpdate

from rollyard_client.errors import JobReplaced

POLL_SECONDS = 0.5
WAIT_SECONDS = 20.0


def finished(job: RolloutJob) -> bool:
    """Condition `Finished` is True."""
    return any(c.type == "Finished" and c.status == "True" for c in job.status.conditions)


def check_same(job: RolloutJob, uid: str | None) -> None:
    """The job that is waited for is still the one with this uid (None: it was not seen before).

    Raises:
        JobReplaced: another one has its name.
    """
    if uid is not None and job.metadata.uid != uid:
        name = job.metadata.name
        raise JobReplaced(
            f"RolloutJob {name!r} was deleted while it was waited for, and another one was submitted under "
            "its name"
        )


def timed_out(job: RolloutJob, seconds: float) -> str:
    """What is said of a job that has not ended in time."""
    counts = job.status.counts
    ended = counts.succeeded + counts.failed + counts.cancelled
    return (
        f"RolloutJob {job.metadata.name!r} has not ended within {seconds:g} s: phase {job.status.phase}, "
        f"{ended} of {counts.total} rollouts ended"
    )


def update_timed_out(update: WeightUpdate, pool: str, seconds: float) -> str:
    """What is said of a weight update that still runs."""
    behind = [part.url for part in update.backends if part.step != "Done"]
    return (
        f"weight update {update.id} ({update.policy_version}) of BackendPool {pool!r} has not ended within "
        f"{seconds:g} s; not done: {', '.join(behind) or 'none'}"
    )
