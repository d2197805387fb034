"""Submissions: one sbatch job each, wanted by a workload, and kept in a file over restarts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollyard_drivers.health.backend import BackendHealth
from rollyard_drivers.reconcile.plan import ObservedWorkload, Workload

from rollyard_slurm.readers import reasons
from rollyard_slurm.readers.command_output import QueuedJob
from rollyard_slurm.scheduling.time_limits import Ending

PENDING_STATES = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
SUSPENDED_STATES = frozenset({"SUSPENDED", "STOPPED"})


@dataclass(slots=True)
class Submission:
    """One try to have a workload run by Slurm."""

    launch: str
    """Its own for good: in the job's comment, and in the names of its files."""
    workload: Workload
    restarts: int
    submitted_at: datetime
    last_end: str = ""
    """How the one before ended, as the launch said."""
    avoided: tuple[str, ...] = ()
    """Nodes that it asked Slurm to leave out, because workers could not use them."""
    job: int | None = None
    """None: refused, or sbatch has not said."""
    unsure_until: datetime | None = None
    """sbatch did not answer: if no job of this launch is seen by then, there is none."""
    refused: str = ""
    """Why there is no job."""
    blocked: bool = False
    """Refused, and not for a limit or an outage: somebody has to change something."""
    retry_at: datetime | None = None
    seen: QueuedJob | None = None
    """As squeue listed it last."""
    started_at: datetime | None = None
    """Since when it runs."""
    ending: Ending | None = None
    ended_at: datetime | None = None
    stop_by: datetime | None = None
    """It is being stopped: then at the latest it is cancelled."""
    drained: bool = False
    insisted: bool = False
    cancelled_at: datetime | None = None
    draining_since: datetime | None = None
    retired: bool = False
    """A successor has taken its place."""
    health: BackendHealth = field(default_factory=BackendHealth)
    url: str = ""
    """Backends: where the probe looks."""
    probe: asyncio.Task[None] | None = None
    trouble: str = ""
    """Workers: why it runs and takes no Init work, in its own words."""

    @property
    def living(self) -> bool:
        """It has a job that has not ended, or may have one, or is tried again."""
        return self.ending is None and not self.blocked

    @property
    def stopping(self) -> bool:
        return self.stop_by is not None and self.ending is None

    @property
    def running(self) -> bool:
        return self.ending is None and self.seen is not None and self.seen.state == "RUNNING"

    @property
    def serving(self) -> bool:
        """Running, and of use: its predecessor may go."""
        return self.running and (self.workload.kind == "stage-worker" or self.health.ready)

    def observed(self, name: str) -> ObservedWorkload:
        """As reconcile sees it."""
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
        """State, message, pending, blocked."""
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
            return "starting", "sbatch did not answer; whether it took the job will be seen", True, False
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
    """A submission that is about to be made."""
    return Submission(
        launch=launch, workload=workload, restarts=restarts, submitted_at=now, last_end=last_end
    )
