"""The protocol of calls to Slurm. It is the same for Slurm's commands and for slurmrestd."""

from __future__ import annotations

from collections.abc import Sequence
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
