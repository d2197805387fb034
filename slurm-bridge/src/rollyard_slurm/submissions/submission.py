"""A submission: one Slurm job of a workload, which outlives restarts of the bridge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollyard_drivers.health.backend import BackendHealth
from rollyard_drivers.reconcile.plan import ObservedWorkload, Workload

from rollyard_slurm.readers import reasons
from rollyard_slurm.readers.jobs import PENDING_STATES, SUSPENDED_STATES, QueuedJob
from rollyard_slurm.scheduling.time_limits import Ending


@dataclass(slots=True)
class Submission:
    """One attempt to have Slurm run a workload."""

    launch: str
    """The unique name of the submission, which stands in the job's comment and in the names of its files."""
    workload: Workload
    restarts: int
    submitted_at: datetime
    last_end: str = ""
    """How the submission before it ended, as the launch said."""
    avoided: tuple[str, ...] = ()
    """The nodes that Slurm was asked to leave out, because workers could not use them."""
    job: int | None = None
    """The number of the job; None: it was refused, or sbatch has not answered."""
    unsure_until: datetime | None = None
    """sbatch did not answer: if no job of this launch has been seen at this time, there is none."""
    refused: str = ""
    """Why there is no job."""
    blocked: bool = False
    """It was refused, and neither for a limit nor for an outage: somebody has to change something."""
    retry_at: datetime | None = None
    seen: QueuedJob | None = None
    """The job as squeue last listed it."""
    started_at: datetime | None = None
    """The time since which it runs."""
    ending: Ending | None = None
    ended_at: datetime | None = None
    stop_by: datetime | None = None
    """It is being stopped, and is cancelled at this time at the latest."""
    drained: bool = False
    """It has received the signal to drain."""
    insisted: bool = False
    """It has received the signal to hand over at once."""
    cancelled_at: datetime | None = None
    draining_since: datetime | None = None
    retired: bool = False
    """A successor has taken its place."""
    health: BackendHealth = field(default_factory=BackendHealth)
    url: str = ""
    """The URL that the health check of a backend asks."""
    probe: asyncio.Task[None] | None = None
    trouble: str = ""
    """Why a running worker takes no Init work, in its own words."""

    @property
    def living(self) -> bool:
        """Whether it has a job that has not ended, may have one, or will be tried again."""
        return self.ending is None and not self.blocked

    @property
    def stopping(self) -> bool:
        """Whether it is being stopped."""
        return self.stop_by is not None and self.ending is None

    @property
    def waits(self) -> bool:
        """Whether its job has not started."""
        return self.seen is None or self.seen.state not in ("RUNNING", "COMPLETING")

    @property
    def running(self) -> bool:
        """Whether its job runs."""
        return self.ending is None and self.seen is not None and self.seen.state == "RUNNING"

    @property
    def serving(self) -> bool:
        """Whether it runs and is of use, so that its predecessor may end."""
        return self.running and (self.workload.kind == "stage-worker" or self.health.ready)

    def observed(self, name: str) -> ObservedWorkload:
        """Returns the submission as reconcile sees it, under a name."""
        ending, seen, health = self.ending, self.seen, self.health
        backend = self.workload.kind == "backend"
        state, message, pending, blocked = self._state()
        return ObservedWorkload(
            name=name,
            spec_hash=self.workload.spec_hash,
            state=state,
            started_at=self.started_at or self.submitted_at,
            restarts=self.restarts,
            last_end=self.last_end,
            exit_code=None if ending is None else ending.code,
            exited_at=self.ended_at if ending is not None else self.submitted_at,
            ready=health.ready if backend else True,
            unready_since=health.unready_since,
            url=self.url if seen is not None and seen.state == "RUNNING" else "",
            policy_version=health.policy_version,
            message=message,
            trouble=self.trouble if state == "running" else "",
            blocked=blocked,
            pending=pending,
            draining_since=self.draining_since,
        )

    def _state(self) -> tuple[Any, str, bool, bool]:
        """Returns the state and its message, and whether the submission is pending and blocked."""
        seen = self.seen
        if self.ending is not None:
            return "exited", self.ending.message, False, False
        if self.blocked:
            return "exited", self.refused, False, True
        if self.stop_by is not None:
            return "stopping", "", False, False
        if self.refused:
            return "starting", self.refused, True, False
        if self.job is None:
            return (
                "starting",
                "sbatch did not answer; the queue will show whether it took the job",
                True,
                False,
            )
        if seen is None:
            return "starting", f"Slurm job {self.job} was submitted", True, False
        if seen.state in PENDING_STATES:
            return "starting", reasons.waits(seen), True, reasons.is_blocked(seen)
        if seen.state in SUSPENDED_STATES:
            return "starting", f"Slurm has suspended job {self.job}", True, False
        if seen.state == "COMPLETING":
            return "stopping", "", False, False
        if self.workload.kind == "backend":
            return ("running" if self.health.warmed_up else "starting"), self.health.message, False, False
        return "running", "", False, False


def fresh(launch: str, workload: Workload, restarts: int, now: datetime, last_end: str = "") -> Submission:
    """Returns a submission that is about to be made."""
    return Submission(
        launch=launch, workload=workload, restarts=restarts, submitted_at=now, last_end=last_end
    )
