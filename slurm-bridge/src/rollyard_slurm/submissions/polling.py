"""A poller, which brings the submissions of a home up to date with Slurm's queue.

The poller asks separately about each job that squeue does not list any longer. While Slurm does not answer,
everything counts as it was last seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rollyard_drivers.host.log_file import telling_line

from rollyard_slurm.errors import SlurmError
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.readers.jobs import PENDING_STATES, QueuedJob
from rollyard_slurm.scheduling import time_limits
from rollyard_slurm.scripts.batch import NODE_UNUSABLE
from rollyard_slurm.submissions.home_submissions import HomeSubmissions
from rollyard_slurm.submissions.submission import Submission
from rollyard_slurm.submissions.worker_ends import WorkerEnds

SOON_SECONDS: Final = 1.0
"""The shortest interval between two polls, in seconds."""
BUSY_SECONDS: Final = 10.0
"""The longest interval between two polls while there are jobs, in seconds."""
IDLE_SECONDS: Final = 60.0
"""The longest interval between two polls while there are no jobs, in seconds."""
ENDS_AT_ONCE: Final = 16
"""The largest number of jobs that left the queue and are asked about in one poll."""
CLOCK_SECONDS: Final = 5.0
"""The time that a job has run may seem to shrink by this many seconds although the job was not restarted."""


class QueuePoller:
    """Brings the submissions of a home up to date with Slurm's queue.

    Args:
        submissions: The submissions of the home.
        worker_ends: The workers that have ended. The poller adds those that reconcile does not observe.
        successor_failed: A function that is called with the name of a workload whose successor ended before
            it took over.
    """

    def __init__(
        self,
        submissions: HomeSubmissions,
        worker_ends: WorkerEnds,
        successor_failed: Callable[[str, datetime], None],
    ) -> None:
        self._submissions = submissions
        self._worker_ends = worker_ends
        self._successor_failed = successor_failed
        self._signature: frozenset[tuple[object, ...]] = frozenset()
        self._strangers: set[int] = set()

    async def poll(self, now: datetime) -> None:
        """Ask Slurm about every submission. If Slurm does not answer, the submissions stay as they were."""
        try:
            listed = await self._submissions.calls.queue()
            await self._worker_ends.look_for_restarts(self._match(listed, now))
            await self._ends({job.id for job in listed}, now)
            await self._cancel_strangers(listed)
        except SlurmError as trouble:
            self._submissions.availability.lost(str(trouble))
            return
        self._submissions.availability.answered()
        signature = frozenset((job.id, job.state, job.reason) for job in listed)
        if signature != self._signature:
            self._submissions.changed = True
        self._signature = signature
        self._submissions.avoided.expire(now)
        self._read_troubles()
        self._submissions.retire_predecessors()

    def _match(self, listed: list[QueuedJob], now: datetime) -> list[Submission]:
        """Update each submission from the job that belongs to it in the queue.

        Returns:
            The stage workers whose jobs Slurm itself has restarted.
        """
        restarted = []
        by_id = {job.id: job for job in listed}
        by_launch = {}
        for job in listed:
            identity = self._identity(job)
            if identity is not None:
                by_launch[identity.launch] = job
        for submission in self._submissions:
            if not submission.living or submission.refused:
                continue
            queued = by_launch.get(submission.launch) if submission.job is None else by_id.get(submission.job)
            if queued is None:
                if submission.job is None and (
                    submission.unsure_until is None or now >= submission.unsure_until
                ):
                    self._submissions.forget(submission)  # sbatch did not submit the job.
                continue
            if _has_restarted(submission, queued):
                restarted.append(submission)
            self._see(submission, queued, now)
        return restarted

    def _identity(self, job: QueuedJob) -> SlurmJobIdentity | None:
        """Return the identity of a job of this home, or None for any other job."""
        identity = SlurmJobIdentity.parse(job.comment)
        own = identity is not None and identity.instance == self._submissions.site.instance
        return identity if own else None

    def _see(self, submission: Submission, job: QueuedJob, now: datetime) -> None:
        """Update a submission from its job in the queue."""
        before, submission.seen = submission.seen, job
        if submission.job is not None and before is not None and before.state == job.state:
            return
        submission.job, submission.unsure_until = job.id, None
        running = job.state == "RUNNING"
        submission.queued_at = submission.queued_at or job.submitted
        submission.nodes = submission.nodes or job.used_nodes
        submission.started_at = (
            (submission.started_at or now - timedelta(seconds=job.used)) if running else None
        )
        if not running and before is not None and before.state == "RUNNING":
            self._submissions.health_checks.end(submission)
        self._submissions.save(submission)

    async def _ends(self, listed: set[int], now: datetime) -> None:
        """Ask Slurm what became of the jobs that squeue does not list any longer."""
        missing = [
            submission
            for submission in self._submissions
            if submission.living and submission.job is not None and submission.job not in listed
        ]
        for submission in missing[:ENDS_AT_ONCE]:
            assert submission.job is not None
            known = await self._submissions.calls.details(submission.job)
            if known is not None and known.live:
                continue  # The job was requeued, or squeue lists it again in a moment.
            profile = self._submissions.site.profile.of(submission.workload.kind)
            proven = await self._worker_ends.is_proven(submission, known)
            submission.restart_count = None if known is None else known.restarts
            end = time_limits.FORGOTTEN if known is None else time_limits.ending(known, profile)
            message = end.message
            if not message and end.code:
                message = telling_line(self._submissions.site.log(submission.submitted_as, submission.job))
            if end.code == NODE_UNUSABLE and submission.seen is not None:
                self._submissions.avoided.add(submission.seen.nodes, now)
            self._end(submission, time_limits.JobEnding(end.code, message, end.expected, proven), now)

    def _end(self, submission: Submission, end: time_limits.JobEnding, now: datetime) -> None:
        """Note how the job of a submission ended, or forget the submission if nothing depends on it."""
        self._submissions.health_checks.end(submission)
        self._submissions.changed = True
        is_front = submission is self._submissions.groups()[submission.workload.name].front
        submission.ending, submission.ended_at = end, now
        if is_front and not end.expected and submission.stop_by is None and not submission.retired:
            self._submissions.save(submission)
            return
        if end.process_ended:
            self._worker_ends.note(submission)
        # Another submission has taken its place, or the next plan launches the workload again at once.
        if not is_front and not end.expected and not submission.retired:
            self._successor_failed(submission.workload.name, now)
        self._submissions.forget(submission)

    async def _cancel_strangers(self, listed: list[QueuedJob]) -> None:
        """Cancel the jobs of this home that have no record.

        sbatch submitted these jobs, but did not answer.
        """
        mine = {submission.job for submission in self._submissions if submission.job is not None}
        strangers = [
            job.id
            for job in listed
            if self._identity(job) is not None
            and job.id not in mine
            and job.state != "COMPLETING"
            and job.id not in self._strangers
        ]
        if strangers:
            self._submissions.say(f"cancelled Slurm jobs of this home that nothing wants: {strangers}")
            await self._submissions.calls.cancel(strangers)
            self._strangers.update(strangers)

    def _read_troubles(self) -> None:
        """Read the files in which running workers report trouble with their nodes."""
        for submission in self._submissions:
            if submission.workload.kind == "stage-worker" and submission.job is not None:
                file = self._submissions.site.trouble_file(submission.submitted_as, submission.job)
                try:
                    submission.trouble = file.read_text()[:500] if submission.running else ""
                except FileNotFoundError:
                    submission.trouble = ""


def _has_restarted(submission: Submission, job: QueuedJob) -> bool:
    """Return whether Slurm itself has restarted the job of a stage worker since its restarts were counted."""
    if submission.workload.kind != "stage-worker":
        return False
    if submission.queued_at not in ("", job.submitted):
        return True
    # Slurm keeps the time of submission if a script could not be launched, for example on a lost node.
    if not submission.nodes:
        return False
    if job.state != "RUNNING":
        return job.state in PENDING_STATES
    before = submission.seen
    shrank = before is not None and before.state == "RUNNING" and job.used < before.used - CLOCK_SECONDS
    return shrank or job.nodes != submission.nodes


@dataclass(slots=True)
class PollInterval:
    """Decides when to poll next: soon after a change, and seldom while nothing happens.

    The interval doubles with each poll that finds nothing new.
    """

    next: float = 0.0
    pause: float = SOON_SECONDS
    last: float = float("-inf")

    def due(self, now: float, changed: bool) -> bool:
        """Return whether to poll now. After a change, a poll is due one second after the last one."""
        return now >= self.next or (changed and now >= self.last + SOON_SECONDS)

    def polled(self, now: float, changed: bool, idle: bool, unavailable: bool) -> None:
        """Note that Slurm was polled.

        Args:
            now: The time of the poll in seconds, on the clock that `due` uses.
            changed: Whether the poll found something new.
            idle: Whether there are no jobs.
            unavailable: Whether Slurm did not answer. It is then polled less and less often, but at least
                every ten seconds.
        """
        longest = IDLE_SECONDS if idle and not unavailable else BUSY_SECONDS
        self.pause = SOON_SECONDS if changed and not unavailable else min(longest, self.pause * 2)
        self.last = now
        self.next = now + self.pause
