"""The protocol of calls to Slurm, shared by its commands and slurmrestd, and counts of the calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollyard_slurm.readers.jobs import JobDetails, QueuedJob
from rollyard_slurm.scripts.batch import BatchScript


class SlurmCalls(Protocol):
    """The calls that the bridge makes to Slurm. Each of them may raise SlurmUnavailable."""

    async def submit(self, script: BatchScript) -> int:
        """Submit a batch script and return the number of the job.

        Raises:
            SubmitRefused: Slurm does not accept the script.
        """
        ...

    async def queue(self) -> list[QueuedJob]:
        """Return all jobs of this user that have not ended."""
        ...

    async def details(self, job: int) -> JobDetails | None:
        """Return one job, which may have ended, or None if Slurm does not know it or no longer knows it."""
        ...

    async def nodes_respond(self, nodes: str) -> bool:
        """Return whether all nodes of a list, such as `cn[1-2]`, answer Slurm and are in order.

        The end of a job on such nodes is the end of its processes.
        """
        ...

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        """Send a signal to the batch scripts of jobs alone. Jobs that have ended are skipped."""
        ...

    async def cancel(self, jobs: Sequence[int]) -> None:
        """Cancel running and pending jobs. Jobs that have ended are skipped."""
        ...


@dataclass(slots=True)
class CallCounts:
    """The number of times that each command or call was made, and the time that all of them took together.

    They show the load that a bridge puts on the controller.
    """

    runs: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    """The time that all calls took together, in seconds."""
    since: float = field(default_factory=time.monotonic)
    """The monotonic time at which counting began."""

    def count(self, name: str) -> None:
        """Add one call of a command, or of an operation of slurmrestd, to the counts."""
        self.runs[name] = self.runs.get(name, 0) + 1

    def __str__(self) -> str:
        """Return a readable line with the counts and their rate per minute."""
        count, minutes = sum(self.runs.values()), max(1.0, time.monotonic() - self.since) / 60.0
        each = ", ".join(f"{name} {number}" for name, number in sorted(self.runs.items()))
        return f"Slurm was asked {count} times, {count / minutes:.1f} a minute ({each or 'nothing'})"
