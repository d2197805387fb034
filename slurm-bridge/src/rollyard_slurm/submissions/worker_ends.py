"""The ends of stage workers that Slurm proves, and that reconcile does not observe.

A worker whose process has ended is reported to the control plane, which takes its leases back at once. The
end of a job alone proves nothing: Slurm gives up the jobs of a node that does not answer, while their
processes may still run there. Such workers are not reported, and their leases expire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from rollyard_drivers.reconcile.plan import Owner

from rollyard_slurm.errors import SlurmError
from rollyard_slurm.readers.jobs import JobDetails
from rollyard_slurm.submissions.home_submissions import HomeSubmissions
from rollyard_slurm.submissions.submission import Submission

KEPT: Final = 1024
"""The largest number of workers that wait to be reported. Leases of the oldest ones expire instead."""
RESTARTS_AT_ONCE: Final = 16
"""The largest number of restarted jobs that are asked about in one poll."""
_BY_THEMSELVES: Final = frozenset({"COMPLETED", "FAILED", "OUT_OF_MEMORY"})
"""The states of jobs whose node has reported the end of the batch script."""
_NODE_LOST: Final = frozenset({"NODE_FAIL", "BOOT_FAIL"})


class WorkerEnds:
    """Decides whether workers have ended, and keeps the names of those that are to be reported.

    Args:
        submissions: The submissions of the home.
    """

    def __init__(self, submissions: HomeSubmissions) -> None:
        self._submissions = submissions
        self._ended: deque[tuple[Owner, str]] = deque(maxlen=KEPT)

    def of(self, owner: Owner) -> tuple[str, ...]:
        """Return the workers of an owner that have ended and are to be reported, oldest first."""
        return tuple(worker for whose, worker in self._ended if whose == owner)

    def reported(self, owner: Owner, worker: str) -> None:
        """Remove a worker that was reported."""
        if (owner, worker) in self._ended:
            self._ended.remove((owner, worker))

    def note(self, submission: Submission) -> None:
        """Keep the present worker of a submission, which has ended, until it is reported."""
        end = (submission.workload.owner, submission.worker)
        if submission.worker and end not in self._ended:
            self._ended.append(end)

    async def is_proven(self, submission: Submission, job: JobDetails | None) -> bool:
        """Return whether the worker of a job that has ended certainly runs no more.

        Args:
            submission: The submission of the job.
            job: The job as Slurm knows it, or None if Slurm has forgotten it.
        """
        if submission.workload.kind != "stage-worker" or job is None or job.state in _NODE_LOST:
            return False
        if job.state in _BY_THEMSELVES or not (submission.nodes or job.used):
            return True
        if not submission.nodes or job.restarts != submission.restart_count:
            return False  # The nodes of the last worker are not known.
        return await self._respond(submission.nodes)

    async def _respond(self, nodes: str) -> bool:
        """Return whether Slurm shows that these nodes answer it. If Slurm cannot be asked, it does not."""
        try:
            return await self._submissions.calls.nodes_respond(nodes)
        except SlurmError:
            return False

    async def look_for_restarts(self, restarted: Iterable[Submission]) -> None:
        """Note the workers that ended when Slurm itself restarted their jobs.

        Each restart gives the worker of a job a new name. Slurm starts a job again after its node has
        reported the end of the processes, or when the node does not answer.

        Raises:
            SlurmError: Slurm does not answer.
        """
        for submission in list(restarted)[:RESTARTS_AT_ONCE]:
            assert submission.job is not None
            assert submission.seen is not None
            job = await self._submissions.calls.details(submission.job)
            if job is None:
                continue
            # If two restarts were seen as one, the known nodes are not those of the last worker.
            once = submission.restart_count is not None and job.restarts == submission.restart_count + 1
            if once and submission.nodes and await self._respond(submission.nodes):
                self.note(submission)
            submission.restart_count, submission.queued_at = job.restarts, submission.seen.submitted
            submission.nodes = submission.seen.used_nodes
            self._submissions.save(submission)
