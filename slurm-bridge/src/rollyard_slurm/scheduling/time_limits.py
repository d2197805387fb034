"""Time limits, preemption and lost nodes: what is normal, and when to prepare. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollyard_slurm.profile import SIGNAL_SECONDS, JobProfile
from rollyard_slurm.readers.command_output import JobDetails, QueuedJob

AHEAD_SECONDS = 600
EARLY_SECONDS = 60
"""Slurm may send the signal before a time limit so much earlier than asked."""
SHORTEST_SECONDS = 10.0
"""Who ended by itself sooner than that did not end for its time limit. With the shortest limit, a minute, and
a signal 15 s before it, slurmctld, which looks every 30 s, gives it after 15 s at the earliest."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended."""

    code: int | None
    """Exit status, negative a signal; None: it was taken away (node lost, cancelled, forgotten)."""
    message: str
    expected: bool
    """Time limit or preemption: nothing is wrong, and a successor may begin at once."""


def ahead_seconds(limit: float, wanted: JobProfile) -> float:
    """So long before its end a job's successor is submitted.

    Args:
        limit: the job's time limit in seconds.
    """
    least = (wanted.signal_seconds or SIGNAL_SECONDS) + EARLY_SECONDS
    return min(max(float(wanted.ahead_seconds or AHEAD_SECONDS), least), limit / 2)


def wants_successor(job: QueuedJob, wanted: JobProfile) -> bool:
    """Whether a running job is so close to its time limit that its successor should queue now."""
    if job.state != "RUNNING" or job.left is None or job.limit is None:
        return False
    return job.left <= ahead_seconds(job.limit, wanted)


def ending(job: JobDetails, wanted: JobProfile) -> Ending:
    """What the end of a job means."""
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
    """Whether a job that ended well had been told that its time was nearly over."""
    if job.limit is None or job.used < SHORTEST_SECONDS:
        return False
    return job.used >= job.limit - (wanted.signal_seconds or SIGNAL_SECONDS) - EARLY_SECONDS - 5


FORGOTTEN = Ending(None, "Slurm does not know any more how it ended", False)
