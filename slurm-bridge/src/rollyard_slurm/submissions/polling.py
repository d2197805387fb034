"""A poller, which brings the submissions of a home up to date with Slurm's queue.

The poller asks separately about each job that squeue does not list any longer. While Slurm does not answer,
everything counts as it was last seen.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from rollyard_drivers.host.log_file import telling_line

from rollyard_slurm.calls.protocol import SlurmCalls
from rollyard_slurm.errors import SlurmError
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.readers.jobs import PENDING_STATES, QueuedJob
from rollyard_slurm.scheduling import time_limits
from rollyard_slurm.scheduling.avoided_nodes import AvoidedNodes
from rollyard_slurm.scripts.batch import NODE_UNUSABLE
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.availability import SlurmAvailability
from rollyard_slurm.submissions.home_submissions import HomeSubmissions
from rollyard_slurm.submissions.submission import Submission
from rollyard_slurm.submissions.worker_ends import WorkerEnds

ENDS_AT_ONCE = 16
"""The largest number of jobs that left the queue and are asked about in one poll."""
CLOCK_SECONDS = 5.0
"""The time that a job has run may seem to shrink by so many seconds although the job was not restarted."""


class QueuePoller:
    """Brings the submissions of a home up to date with Slurm's queue.

    Args:
        avoided: The nodes that new jobs avoid. The poller adds the nodes on which workers could not work.
        worker_ends: The workers that have ended. The poller adds those that reconcile does not observe.
        successor_failed: A function that is called with the name of a workload whose successor ended before
            it took over.
        say: A function that is called with each line for the user of the bridge.
    """

    def __init__(
        self,
        site: Site,
        calls: SlurmCalls,
        submissions: HomeSubmissions,
        availability: SlurmAvailability,
        avoided: AvoidedNodes,
        worker_ends: WorkerEnds,
        successor_failed: Callable[[str, datetime], None],
        say: Callable[[str], None],
    ) -> None:
        self._site = site
        self._calls = calls
        self._submissions = submissions
        self._availability = availability
        self._avoided = avoided
        self._worker_ends = worker_ends
        self._successor_failed = successor_failed
        self._say = say
        self._signature: frozenset[tuple[object, ...]] = frozenset()
        self._strangers: set[int] = set()

    async def poll(self, now: datetime) -> None:
        """Ask Slurm about every submission. If Slurm does not answer, the submissions stay as they were."""
        try:
            listed = await self._calls.queue()
            await self._worker_ends.look_for_restarts(self._match(listed, now))
            await self._ends({job.id for job in listed}, now)
            await self._cancel_strangers(listed)
        except SlurmError as trouble:
            self._availability.lost(str(trouble))
            return
        self._availability.answered()
        signature = frozenset((job.id, job.state, job.reason) for job in listed)
        if signature != self._signature:
            self._submissions.changed = True
        self._signature = signature
        self._avoided.expire(now)
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
        for one in self._submissions:
            if not one.living or one.refused:
                continue
            seen = by_launch.get(one.launch) if one.job is None else by_id.get(one.job)
            if seen is None:
                if one.job is None and (one.unsure_until is None or now >= one.unsure_until):
                    self._submissions.forget(one)  # sbatch did not submit the job.
                continue
            if _has_restarted(one, seen):
                restarted.append(one)
            self._see(one, seen, now)
        return restarted

    def _identity(self, job: QueuedJob) -> SlurmJobIdentity | None:
        """Return the identity of a job of this home, or None for any other job."""
        identity = SlurmJobIdentity.parse(job.comment)
        return identity if identity is not None and identity.instance == self._site.instance else None

    def _see(self, one: Submission, seen: QueuedJob, now: datetime) -> None:
        """Update a submission from its job in the queue."""
        before, one.seen = one.seen, seen
        if one.job is not None and before is not None and before.state == seen.state:
            return
        one.job, one.unsure_until = seen.id, None
        running = seen.state == "RUNNING"
        one.queued_at = one.queued_at or seen.submitted
        one.nodes = one.nodes or seen.used_nodes
        one.started_at = (one.started_at or now - timedelta(seconds=seen.used)) if running else None
        if not running and before is not None and before.state == "RUNNING":
            self._submissions.health_checks.end(one)
        self._submissions.save(one)

    async def _ends(self, listed: set[int], now: datetime) -> None:
        """Ask Slurm what became of the jobs that squeue does not list any longer."""
        gone = [
            one for one in self._submissions if one.living and one.job is not None and one.job not in listed
        ]
        for one in gone[:ENDS_AT_ONCE]:
            assert one.job is not None
            known = await self._calls.details(one.job)
            if known is not None and known.live:
                continue  # The job was requeued, or squeue lists it again in a moment.
            wanted = self._site.profile.of(one.workload.kind)
            proven = await self._worker_ends.is_proven(one, known)
            one.restart_count = None if known is None else known.restarts
            end = time_limits.FORGOTTEN if known is None else time_limits.ending(known, wanted)
            message = end.message
            if not message and end.code:
                message = telling_line(self._site.log(one.submitted_as, one.job))
            if end.code == NODE_UNUSABLE and one.seen is not None:
                self._avoided.add(one.seen.nodes, now)
            self._end(one, time_limits.JobEnding(end.code, message, end.expected, proven), now)

    def _end(self, one: Submission, end: time_limits.JobEnding, now: datetime) -> None:
        """Note how the job of a submission ended, or forget the submission if nothing depends on it."""
        self._submissions.health_checks.end(one)
        self._submissions.changed = True
        is_front = one is self._submissions.groups()[one.workload.name].front
        one.ending, one.ended_at = end, now
        if is_front and not end.expected and one.stop_by is None and not one.retired:
            self._submissions.save(one)
            return
        if end.process_ended:
            self._worker_ends.note(one)
        # Another submission has taken its place, or the next plan launches the workload again at once.
        if not is_front and not end.expected and not one.retired:
            self._successor_failed(one.workload.name, now)
        self._submissions.forget(one)

    async def _cancel_strangers(self, listed: list[QueuedJob]) -> None:
        """Cancel the jobs of this home that have no record.

        sbatch submitted these jobs, but did not answer.
        """
        mine = {one.job for one in self._submissions if one.job is not None}
        strangers = [
            job.id
            for job in listed
            if self._identity(job) is not None
            and job.id not in mine
            and job.state != "COMPLETING"
            and job.id not in self._strangers
        ]
        if strangers:
            self._say(f"cancelled Slurm jobs of this home that nothing wants: {strangers}")
            await self._calls.cancel(strangers)
            self._strangers.update(strangers)

    def _read_troubles(self) -> None:
        """Read the files in which running workers report trouble with their nodes."""
        for one in self._submissions:
            if one.workload.kind == "stage-worker" and one.job is not None:
                file = self._site.trouble_file(one.submitted_as, one.job)
                try:
                    one.trouble = file.read_text()[:500] if one.running else ""
                except FileNotFoundError:
                    one.trouble = ""


def _has_restarted(one: Submission, seen: QueuedJob) -> bool:
    """Return whether Slurm itself has restarted the job of a stage worker since its restarts were counted."""
    if one.workload.kind != "stage-worker":
        return False
    if one.queued_at not in ("", seen.submitted):
        return True
    # Slurm keeps the time of submission if a script could not be launched, for example on a lost node.
    if not one.nodes:
        return False
    if seen.state != "RUNNING":
        return seen.state in PENDING_STATES
    before = one.seen
    shrank = before is not None and before.state == "RUNNING" and seen.used < before.used - CLOCK_SECONDS
    return shrank or seen.nodes != one.nodes
