"""Models of jobs as Slurm describes them. This module is pure.

The models are the same for all answers from which jobs are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PENDING_STATES: Final = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
"""The states of jobs that have not started, or that start again."""
SUSPENDED_STATES: Final = frozenset({"SUSPENDED", "STOPPED"})
"""The states of jobs that have started and do not run at the moment."""
LIVE_STATES: Final = (
    PENDING_STATES
    | SUSPENDED_STATES
    | {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "RESV_DEL_HOLD"}
)
"""The states of all jobs that have not ended."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue, as squeue lists it."""

    id: int
    state: str
    """The state of the job, such as `PENDING`, `RUNNING` or `COMPLETING`."""
    reason: str
    """The reason why the job is pending. It is the word `None` if there is no reason."""
    nodes: str
    used: float
    """The time for which the job has run, in seconds."""
    left: float | None
    """The time that is left of the time limit, in seconds.

    It is None if there is no limit or it is not known.
    """
    limit: float | None
    """The time limit in seconds, or None if there is no limit or it is not known."""
    name: str
    comment: str
    submitted: str
    """The time at which Slurm took the job, or at which it last queued the job again.

    Slurm gives a job that it queues again a new time, once the job's nodes have reported the end of its
    processes. It keeps the time of a job whose script could not be launched. Two such texts can only be
    tested for equality, because the form depends on the kind of call.
    """

    @property
    def used_nodes(self) -> str:
        """The nodes on which the job runs or completes. It is empty in all other states."""
        return self.nodes if self.state in ("RUNNING", "COMPLETING") else ""


@dataclass(frozen=True, slots=True)
class JobDetails:
    """One job as `scontrol show job` or sacct describes it. The job may have ended."""

    id: int
    state: str
    reason: str
    exit_status: int
    """The exit status of the job's script."""
    exit_signal: int
    """The number of the signal that ended the job, or 0 if no signal ended it."""
    used: float
    """The time for which the job has run, in seconds."""
    limit: float | None
    """The time limit in seconds, or None if there is no limit or it is not known."""
    restarts: int | None = None
    """How many times Slurm has started the job again, or None if this is not known."""

    @property
    def live(self) -> bool:
        """Whether the job has not ended."""
        return self.state in LIVE_STATES
