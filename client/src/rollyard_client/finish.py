"""Whether a job has ended, by the conditions that its driver reports."""

from __future__ import annotations

from rollyard_crds.rolloutjob import RolloutJob

POLL_SECONDS = 0.5


def finished(job: RolloutJob) -> bool:
    """Condition `Finished` is True."""
    return any(c.type == "Finished" and c.status == "True" for c in job.status.conditions)


def timed_out(job: RolloutJob, seconds: float) -> str:
    """What is said of a job that has not ended in time."""
    counts = job.status.counts
    ended = counts.succeeded + counts.failed + counts.cancelled
    return (
        f"RolloutJob {job.metadata.name!r} has not ended within {seconds:g} s: phase {job.status.phase}, "
        f"{ended} of {counts.total} rollouts ended"
    )
