"""Functions that decide whether a job has ended, by the conditions that its driver reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rollyard_client.errors import JobReplaced

if TYPE_CHECKING:
    from rollyard_crds.rolloutjob import RolloutJob
    from rollyard_crds.weights import WeightUpdate

POLL_SECONDS: Final = 0.5
WAIT_SECONDS: Final = 20.0


def finished(job: RolloutJob) -> bool:
    """Return whether the condition `Finished` of the job is True."""
    return any(c.type == "Finished" and c.status == "True" for c in job.status.conditions)


def check_same(job: RolloutJob, uid: str | None) -> None:
    """Check that the awaited job still has this uid, which is None before the job was first seen.

    Raises:
        JobReplaced: Another job has its name now.
    """
    if uid is not None and job.metadata.uid != uid:
        name = job.metadata.name
        raise JobReplaced(
            f"RolloutJob {name!r} was deleted while it was waited for, and another one was submitted under "
            "its name"
        )


def timed_out(job: RolloutJob, seconds: float) -> str:
    """Return the message about a job that has not ended in time."""
    counts = job.status.counts
    ended = counts.succeeded + counts.failed + counts.cancelled
    return (
        f"RolloutJob {job.metadata.name!r} has not ended within {seconds:g} s: phase {job.status.phase}, "
        f"{ended} of {counts.total} rollouts ended{awaited(job)}"
    )


def awaited(job: RolloutJob) -> str:
    """Return the end of a message about a job that takes too long: the job's own message."""
    return f"; it says: {job.status.message}" if job.status.message else ""


def update_timed_out(update: WeightUpdate, pool: str, seconds: float) -> str:
    """Return the message about a weight update that has not ended in time."""
    behind = ", ".join(part.url for part in update.backends if part.step != "Done")
    return (
        f"weight update {update.id} ({update.policy_version}) of BackendPool {pool!r} has not ended within "
        f"{seconds:g} s; {f'not done: {behind}' if behind else update.message or 'all backends are done'}"
    )
