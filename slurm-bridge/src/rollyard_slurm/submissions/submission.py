"""A submission is one Slurm job of a workload. The job outlives restarts of the bridge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollyard_drivers.health import BackendHealth
from rollyard_drivers.reconcile.plan import ObservedWorkload, Workload

from rollyard_slurm.readers import reasons
from rollyard_slurm.readers.jobs import PENDING_STATES, SUSPENDED_STATES, QueuedJob
from rollyard_slurm.scheduling.time_limits import JobEnding


@dataclass(slots=True)
class Submission:
    """One attempt to run a workload as a Slurm job."""

    launch: str
    """The unique name of the submission, which is part of the job's comment and of the names of its files."""
    workload: Workload
    restarts: int
    submitted_at: datetime
    last_end: str = ""
    """A description of how the previous submission ended, which the plan's launch contained."""
    avoided: tuple[str, ...] = ()
    """The nodes that Slurm was asked to exclude, because workers could not use them."""
    job: int | None = None
    """The number of the Slurm job, or None if the job was refused or sbatch has not answered."""
    unsure_until: datetime | None = None
    """The time until which the job may still appear, if sbatch did not answer.

    If the queue has shown no job of this launch until this time, there is none.
    """
    refused: str = ""
    """The reason why there is no job. It is empty if the job was not refused."""
    blocked: bool = False
    """Whether the job was refused for a reason other than a limit or an outage.

    A person has to change something before another try can succeed.
    """
    retry_at: datetime | None = None
    """The time of the next try to submit a job that was refused."""
    seen: QueuedJob | None = None
    """The job as squeue listed it last."""
    started_at: datetime | None = None
    """The time since which the job runs."""
    ending: JobEnding | None = None
    ended_at: datetime | None = None
    stop_by: datetime | None = None
    """The time at which the job is cancelled at the latest. It is None unless the job is being stopped."""
    drained: bool = False
    """Whether the job has received the signal to drain."""
    insisted: bool = False
    """Whether the job has received the signal to hand over its rollouts at once."""
    cancelled_at: datetime | None = None
    """The time at which the job was last cancelled."""
    draining_since: datetime | None = None
    retired: bool = False
    """Whether a successor has taken the place of this submission."""
    health: BackendHealth = field(default_factory=BackendHealth)
    url: str = ""
    """The URL to which the health check of a backend sends its requests."""
    probe: asyncio.Task[None] | None = None
    restart_count: int | None = 0
    """How many times Slurm has started the job again, or None if this is not known."""
    queued_at: str = ""
    """The time of submission that the job had when its restarts were last counted.

    It is the text of `QueuedJob.submitted`, and is empty until the job is first seen.
    """
    nodes: str = ""
    """The nodes on which the job was seen to run or to complete since its last start."""
    trouble: str = ""
    """The reason why a running worker takes no Init work, as the worker reported it."""
    ready: str = ""
    """The name under which the worker stood ready before it was given to its RolloutJob.

    It is empty for jobs that were submitted for their RolloutJob.
    """
    offered: bool = False
    """Whether the control plane has answered the offer of the RolloutJob to the worker that stood ready."""

    @property
    def living(self) -> bool:
        """Whether the submission has or may have a job that has not ended, or will be tried again."""
        return self.ending is None and not self.blocked

    @property
    def worker(self) -> str:
        """The name of the job's stage worker. It is empty for backends, and if the name is not known."""
        if self.workload.kind == "backend" or self.standing or self.job is None:
            return ""
        if self.restart_count is None:
            return ""
        again = f"-r{self.restart_count}" if self.restart_count else ""
        return f"{self.workload.name}-{self.job}{again}"

    @property
    def standing(self) -> bool:
        """Whether this is a worker that stands ready and has no RolloutJob yet."""
        return self.workload.owner.kind == "ReadyWorker"

    @property
    def submitted_as(self) -> str:
        """The name of the workload that the job was submitted as, which is part of the names of its files."""
        return self.ready or self.workload.name

    @property
    def stopping(self) -> bool:
        """Whether the submission is being stopped."""
        return self.stop_by is not None and self.ending is None

    @property
    def waits(self) -> bool:
        """Whether the job neither runs nor completes, or is not known to do so."""
        return self.seen is None or self.seen.state not in ("RUNNING", "COMPLETING")

    @property
    def running(self) -> bool:
        """Whether the job runs."""
        return self.ending is None and self.seen is not None and self.seen.state == "RUNNING"

    @property
    def serving(self) -> bool:
        """Whether the job runs and does its work. Its predecessor may then end."""
        return self.running and (self.workload.kind == "stage-worker" or self.health.ready)

    def observed(self, name: str) -> ObservedWorkload:
        """Return the submission as reconcile observes it.

        Args:
            name: The name under which reconcile knows the submission.
        """
        ending, queued, health = self.ending, self.seen, self.health
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
            url=self.url if queued is not None and queued.state == "RUNNING" else "",
            policy_version=health.policy_version,
            message=message,
            trouble=self.trouble if state == "running" else "",
            blocked=blocked,
            pending=pending,
            draining_since=self.draining_since,
            worker=self.worker if ending is None or ending.process_ended else "",
            ready_since=health.ready_since,
        )

    def _state(self) -> tuple[Any, str, bool, bool]:
        """Return the state, its message, whether the submission is pending, and whether it is blocked."""
        queued = self.seen
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
        if queued is None:
            return "starting", f"Slurm job {self.job} was submitted", True, False
        if queued.state in PENDING_STATES:
            return "starting", reasons.waits(queued), True, reasons.is_blocked(queued)
        if queued.state in SUSPENDED_STATES:
            return "starting", f"Slurm has suspended job {self.job}", True, False
        if queued.state == "COMPLETING":
            return "stopping", "", False, False
        if self.workload.kind == "backend":
            return ("running" if self.health.warmed_up else "starting"), self.health.message, False, False
        return "running", "", False, False
