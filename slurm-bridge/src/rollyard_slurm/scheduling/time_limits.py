"""Decisions about how a job ended and when its successor is due. This module is pure.

A job may end because of its time limit, a preemption or a lost node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rollyard_slurm.profile import SIGNAL_SECONDS, JobProfile
from rollyard_slurm.readers.jobs import JobDetails, QueuedJob

AHEAD_SECONDS: Final = 600
"""The default of `aheadSeconds` in a profile."""
EARLY_SECONDS: Final = 60
"""How many seconds earlier than requested Slurm may send the signal before a time limit."""
SHORTEST_SECONDS: Final = 10.0
"""A job that ended by itself after fewer seconds than this did not end because of its time limit.

The shortest limit is one minute. With a signal 15 s before it, slurmctld, which checks every 30 s, sends the
signal after 15 s at the earliest.
"""


@dataclass(frozen=True, slots=True)
class JobEnding:
    """A description of how a job ended."""

    code: int | None
    """The exit status, or a negated signal number.

    It is None if the node of the job was lost, if the job reached its time limit, was preempted or was
    cancelled, or if Slurm has forgotten it.
    """
    message: str
    expected: bool
    """Whether the job ended because of its time limit or a preemption.

    In this case nothing is wrong, and a successor may start at once.
    """
    process_ended: bool = True
    """Whether the job's processes have certainly ended. Those on a lost node may still run."""


def ahead_seconds(limit: float, profile: JobProfile) -> float:
    """Return how many seconds before the end of a job its successor is submitted.

    Args:
        limit: The time limit of the job in seconds.
        profile: The profile of this kind of job.
    """
    least = (profile.signal_seconds or SIGNAL_SECONDS) + EARLY_SECONDS
    return min(max(float(profile.ahead_seconds or AHEAD_SECONDS), least), limit / 2)


def wants_successor(job: QueuedJob, profile: JobProfile) -> bool:
    """Return whether a running job is close enough to its time limit for its successor to be submitted."""
    if job.state != "RUNNING" or job.left is None or job.limit is None:
        return False
    return job.left <= ahead_seconds(job.limit, profile)


def ending(job: JobDetails, profile: JobProfile) -> JobEnding:
    """Return a description of how a job ended, with a message for the user."""
    who = f"Slurm job {job.id}"
    if job.state == "TIMEOUT":
        return JobEnding(None, f"{who} reached its time limit", True)
    if job.state == "PREEMPTED":
        return JobEnding(None, f"{who} was preempted", True)
    if job.state in ("NODE_FAIL", "BOOT_FAIL"):
        return JobEnding(None, f"the node of {who} failed ({job.state})", False)
    if job.state in ("CANCELLED", "REVOKED", "DEADLINE"):
        return JobEnding(
            None, f"{who} was cancelled" + (" (DEADLINE)" if job.state == "DEADLINE" else ""), False
        )
    if job.state == "OUT_OF_MEMORY":
        memory = f" (asked for {profile.memory})" if profile.memory else ""
        return JobEnding(-9, f"{who} ran out of memory{memory}: raise `memory` in the profile", False)
    code = -job.exit_signal if job.exit_signal else job.exit_status
    return JobEnding(code, "", code == 0 and _near_limit(job, profile))


def _near_limit(job: JobDetails, profile: JobProfile) -> bool:
    """Return whether a job that ended with status 0 had received the signal before its time limit."""
    if job.limit is None or job.used < SHORTEST_SECONDS:
        return False
    return job.used >= job.limit - (profile.signal_seconds or SIGNAL_SECONDS) - EARLY_SECONDS - 5


FORGOTTEN: Final = JobEnding(None, "Slurm no longer knows how it ended", False)
"""The ending of a job that Slurm does not know any longer."""
