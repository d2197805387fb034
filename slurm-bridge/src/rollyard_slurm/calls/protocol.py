"""What the bridge asks of Slurm, however Slurm is reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollyard_slurm.readers.jobs import JobDetails, QueuedJob
from rollyard_slurm.scripts.batch import BatchScript


class SlurmCalls(Protocol):
    """The calls to Slurm. Each of them may raise SlurmUnavailable."""

    async def submit(self, script: BatchScript) -> int:
        """Submits a batch script and returns the number of the job.

        Raises:
            SubmitRefused: Slurm does not accept it.
        """
        ...

    async def queue(self) -> list[QueuedJob]:
        """Returns every job of this user that has not ended."""
        ...

    async def details(self, job: int) -> JobDetails | None:
        """Returns one job, which may have ended; None where Slurm does not know it (any longer)."""
        ...

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        """Sends a signal to the batch scripts alone; jobs that have ended are left out."""
        ...

    async def cancel(self, jobs: Sequence[int]) -> None:
        """Ends jobs, also pending ones; jobs that have ended are left out."""
        ...
