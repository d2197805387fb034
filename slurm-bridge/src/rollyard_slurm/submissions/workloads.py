"""The workloads of one home as Slurm jobs.

This is the part of the bridge that carries out plans, and reports what is observed of the jobs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rollyard_crds.workers import AssignmentOffer
from rollyard_drivers.host.child import Folders
from rollyard_drivers.host.downloads import Downloads
from rollyard_drivers.reconcile.plan import ObservedWorkload, Owner, Plan, Stop

from rollyard_slurm.calls.protocol import SlurmCalls
from rollyard_slurm.errors import SlurmError
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.home_submissions import HomeSubmissions
from rollyard_slurm.submissions.polling import QueuePoller
from rollyard_slurm.submissions.ready_workers import DEFAULT_NAMESPACE, ReadyWorkers
from rollyard_slurm.submissions.stopping import Stopper
from rollyard_slurm.submissions.submission import Submission
from rollyard_slurm.submissions.submitting import Submitter
from rollyard_slurm.submissions.worker_ends import WorkerEnds


class SlurmWorkloads:
    """The workloads of one home. Each of them consists of one or several submissions.

    Args:
        calls: The calls to Slurm.
        worker_token: A function that returns the token of the workers of a RolloutJob, or of a ready worker.
        wake: A function that is called when the next pass should start early, because something changed.
        say: A function that is called with a line for the user of the bridge, once for each change.
        namespaces: The namespaces in which workers stand ready.
    """

    def __init__(
        self,
        site: Site,
        calls: SlurmCalls,
        http: httpx.AsyncClient,
        worker_token: Callable[[Owner], str],
        wake: Callable[[], None],
        say: Callable[[str], None],
        namespaces: Collection[str] = (DEFAULT_NAMESPACE,),
    ) -> None:
        self.submissions = HomeSubmissions(site, calls, http, wake, say)
        self.availability = self.submissions.availability
        self._stopper = Stopper(self.submissions)
        self._ready_workers = ReadyWorkers(self.submissions, self._stopper, namespaces)
        self._downloads = Downloads(Folders(site.logs, site.home / "pids"), wake)
        take = self._ready_workers.take
        self._submitter = Submitter(self.submissions, worker_token, take, self._downloads)
        self._worker_ends = WorkerEnds(self.submissions)
        self._poller = QueuePoller(self.submissions, self._worker_ends, self._submitter.successor_failed)

    # These members report what is observed.

    @property
    def ready(self) -> bool:
        """Whether plans may be made.

        This is so when Slurm has answered, or when no submission can have a job.
        """
        return self.availability.answered_once or all(submission.refused for submission in self.submissions)

    @property
    def jobs(self) -> list[Submission]:
        """The submissions that have or may have a job that has not ended, or will be tried again."""
        return [submission for submission in self.submissions if submission.living]

    def owners(self) -> set[Owner]:
        """Return the jobs and pools that have at least one submission."""
        return self.submissions.owners

    def observed(self, owner: Owner) -> tuple[ObservedWorkload, ...]:
        """Return the observed workloads of an owner. Jobs that were replaced have names of their own."""
        return tuple(
            submission.observed(name)
            for name, submission in self.submissions.named().items()
            if submission.workload.owner == owner
        )

    def ended_workers(self, owner: Owner) -> tuple[str, ...]:
        """Return the workers of a job that have certainly ended, and are not observed as workloads."""
        return self._worker_ends.of(owner)

    def end_reported(self, owner: Owner, worker: str) -> None:
        """Note that the end of a worker was reported to the control plane."""
        self._worker_ends.reported(owner, worker)

    async def poll(self, now: datetime) -> None:
        """Ask Slurm about every submission. If Slurm does not answer, the submissions stay as they were."""
        await self._poller.poll(now)

    def find_endpoints(self) -> None:
        """Begin to check the health of backends that have announced their URLs."""
        for submission in self.submissions:
            serves = submission.workload.kind == "backend" and submission.living and not submission.stopping
            if serves and self.submissions.health_checks.find(submission):
                self.submissions.changed = True

    # These methods act on the jobs.

    async def carry_out(self, owner: Owner, plan: Plan[Any]) -> None:
        """Start and stop the workloads that the plan of one owner names.

        Stopping takes several passes, and the next calls of `act` continue it.
        """
        for stop in plan.stop:
            self.stop(stop)
        now = datetime.now(UTC)
        for name, submission in self.submissions.named().items():
            if submission.workload.owner == owner:
                since = (submission.draining_since or now) if name in plan.drain else None
                if since != submission.draining_since:
                    submission.draining_since = since
                    self.submissions.save(submission)
        for launch in plan.launch:
            await self._submitter.launch(launch, now)

    def stop(self, stop: Stop) -> None:
        """Begin to stop a workload, and forget a workload that has ended.

        The job is cancelled when the grace of the stop is over.
        """
        if stop.name in self.submissions.named():
            self._submitter.note_stop(stop)
            self._stopper.stop(stop)

    async def act(self, now: datetime) -> None:
        """Do what is due: send signals, cancel jobs, retry refused submissions, and submit successors."""
        self._submitter.begin_turn()
        try:
            await self._stopper.proceed(now)
        except SlurmError as trouble:
            self.availability.lost(str(trouble))
        if self.availability.trouble:
            return
        await self._submitter.retry(now)
        await self._submitter.submit_successors(now)

    async def keep_ready(self, now: datetime, offer: Callable[[AssignmentOffer], Awaitable[str]]) -> None:
        """Offer RolloutJobs to the ready workers that they have taken, and keep further workers ready.

        Args:
            now: The present time.
            offer: Sends an offer to the control plane, and returns why the worker cannot have the RolloutJob,
                or an empty string. It raises StoreTrouble if the control plane does not answer.
        """
        await self._ready_workers.offer(now, offer)
        if not self.availability.trouble and self.availability.answered_once:
            await self._ready_workers.keep(now, self._submitter)

    def logs(self) -> set[Path]:
        """Return the log files of the jobs that have not ended."""
        return {
            self.submissions.site.log(submission.submitted_as, submission.job)
            for submission in self.jobs
            if submission.job is not None
        }

    # These methods are called when the bridge ends.

    def stop_kind(self, kind: str, grace_seconds: float, now: datetime) -> None:
        """Begin to stop every workload of one kind.

        Args:
            kind: The kind, `stage-worker` or `backend`.
            grace_seconds: The time until the jobs are cancelled, in seconds.
            now: The present time.
        """
        self._stopper.stop_kind(kind, grace_seconds, now)

    def left(self, kind: str) -> list[Submission]:
        """Return the submissions of one kind that have not ended."""
        return [submission for submission in self.jobs if submission.workload.kind == kind]

    async def close(self) -> None:
        """End the downloads and the health checks. The Slurm jobs continue to run."""
        await self._downloads.stop()
        await self.submissions.close()
