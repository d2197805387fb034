"""Jobs as Slurm describes them, whichever of its answers they were read from. This module is pure."""

from __future__ import annotations

from dataclasses import dataclass

PENDING_STATES = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
SUSPENDED_STATES = frozenset({"SUSPENDED", "STOPPED"})
LIVE_STATES = (
    PENDING_STATES
    | SUSPENDED_STATES
    | {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "RESV_DEL_HOLD"}
)
"""The states of jobs that have not ended."""


class Unreadable(ValueError):
    """An answer is not one that any supported version of Slurm gives."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue, as squeue lists it."""

    id: int
    state: str
    """Such as `PENDING`, `RUNNING` or `COMPLETING`."""
    reason: str
    """Why the job is pending; `None` where there is no reason."""
    nodes: str
    used: float
    """Seconds for which the job has run."""
    left: float | None
    """Seconds that are left of the time limit; None: there is no limit, or it is not known."""
    limit: float | None
    """The time limit in seconds."""
    name: str
    comment: str


@dataclass(frozen=True, slots=True)
class JobDetails:
    """One job, which may have ended, as `scontrol show job` or sacct describes it."""

    id: int
    state: str
    reason: str
    exit_status: int
    """The exit status of its script."""
    exit_signal: int
    """The signal that ended it; 0: none did."""
    used: float
    """Seconds for which the job has run."""
    limit: float | None
    """The time limit in seconds; None: there is no limit, or it is not known."""

    @property
    def live(self) -> bool:
        """Whether the job has not ended."""
        return self.state in LIVE_STATES
