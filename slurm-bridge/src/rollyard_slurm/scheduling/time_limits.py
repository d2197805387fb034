"""Time limits, preemption and lost nodes, and when a successor is due. This module is pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollyard_slurm.profile import SIGNAL_SECONDS, JobProfile
from rollyard_slurm.readers.jobs import JobDetails, QueuedJob

AHEAD_SECONDS = 600
"""The default for `aheadSeconds` of a profile."""
EARLY_SECONDS = 60
"""Slurm may send the signal before a time limit this much earlier than it was asked to."""
SHORTEST_SECONDS = 10.0
"""A job that ended by itself sooner than this did not end because of its time limit. With the shortest limit,
one minute, and a signal 15 s before it, slurmctld, which looks every 30 s, sends the signal after 15 s at the
earliest."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended."""

    code: int | None
    """The exit status, or a negated signal; None: the job's node was lost, the job was cancelled, or Slurm
    has forgotten it."""
    message: str
    expected: bool
    """The job ended for its time limit or by preemption: nothing is wrong, and a successor may start at
    once."""


def ahead_seconds(limit: float, wanted: JobProfile) -> float:
    """Returns how many seconds before the end of a job its successor is submitted.

    Args:
        limit: The time limit of the job in seconds.
    """
    least = (wanted.signal_seconds or SIGNAL_SECONDS) + EARLY_SECONDS
    return min(max(float(wanted.ahead_seconds or AHEAD_SECONDS), least), limit / 2)


def wants_successor(job: QueuedJob, wanted: JobProfile) -> bool:
    """Returns whether a running job is so close to its time limit that its successor should queue now."""
    if job.state != "RUNNING" or job.left is None or job.limit is None:
        return False
    return job.left <= ahead_seconds(job.limit, wanted)


def ending(job: JobDetails, wanted: JobProfile) -> Ending:
    """Returns what the end of a job means."""
    who = f"Slurm job {job.id}"
    if job.state == "TIMEOUT":
        return Ending(None, f"{who} reached its time limit", True)
    if job.state == "PREEMPTED":
        return Ending(None, f"{who} was preempted", True)
    if job.state in ("NODE_FAIL", "BOOT_FAIL"):
        return Ending(None, f"the node of {who} failed ({job.state})", False)
    if job.state in ("CANCELLED", "REVOKED", "DEADLINE"):
        return Ending(
            None, f"{who} was cancelled" + (" (DEADLINE)" if job.state == "DEADLINE" else ""), False
        )
    if job.state == "OUT_OF_MEMORY":
        asked = f" (asked for {wanted.memory})" if wanted.memory else ""
        return Ending(-9, f"{who} ran out of memory{asked}: raise `memory` in the profile", False)
    code = -job.exit_signal if job.exit_signal else job.exit_status
    return Ending(code, "", code == 0 and _near_limit(job, wanted))


def _near_limit(job: JobDetails, wanted: JobProfile) -> bool:
    """Returns whether a job that ended well had received the signal that its time was nearly over."""
    if job.limit is None or job.used < SHORTEST_SECONDS:
        return False
    return job.used >= job.limit - (wanted.signal_seconds or SIGNAL_SECONDS) - EARLY_SECONDS - 5


FORGOTTEN = Ending(None, "Slurm no longer knows how it ended", False)
