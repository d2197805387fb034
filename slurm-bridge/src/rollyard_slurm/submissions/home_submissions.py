"""The submissions of one home, in memory and on disk, and the health checks of its backends.

The check of a backend begins when the backend has announced its URL. While Slurm does not answer, everything
counts as it was last seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
from pydantic import AwareDatetime, BaseModel, PlainSerializer
from rollyard_drivers.health import BackendHealth, watch_backend
from rollyard_drivers.host.home import read_json, write_json
from rollyard_drivers.reconcile.plan import Owner, Workload

from rollyard_slurm.calls.protocol import SlurmCalls
from rollyard_slurm.readers.jobs import PENDING_STATES
from rollyard_slurm.scheduling.time_limits import JobEnding, wants_successor
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.submission import Submission

AVOID_SECONDS: Final = 600.0
"""The time for which a node is avoided, in seconds."""


class SubmissionGroup:
    """The submissions of one workload, oldest first. At most one of them has the workload's name."""

    def __init__(self, members: list[Submission]) -> None:
        self.members = members

    @property
    def front(self) -> Submission:
        """The submission that counts as the workload.

        This is the newest one that serves. If none serves, it is the oldest one that will serve, or else one
        that is ending or has ended.
        """
        staying = [
            submission
            for submission in self.members
            if submission.living and not submission.stopping and not submission.retired
        ]
        serving = [submission for submission in staying if submission.serving]
        if serving:
            return serving[-1]
        # A submission that runs, such as a backend that is unhealthy at the moment, takes precedence over one
        # that only waits.
        running = [submission for submission in staying if submission.running]
        if running or staying:
            return (running or staying)[0]
        own = [submission for submission in self.members if not submission.retired] or self.members
        living = [submission for submission in own if submission.living]
        return (living or own)[-1]

    @property
    def successors(self) -> list[Submission]:
        """The submissions that have not ended and were made after the front."""
        index = self.members.index(self.front)
        return [submission for submission in self.members[index + 1 :] if submission.living]

    @property
    def predecessors(self) -> list[Submission]:
        """The submissions that have not ended and whose place the front has taken."""
        index = self.members.index(self.front)
        return [submission for submission in self.members[:index] if submission.living]


_Time = Annotated[AwareDatetime, PlainSerializer(datetime.isoformat)]


class _StoredEnding(BaseModel):
    code: int | None
    message: str
    at: _Time | None
    process_ended: bool


class _Record(BaseModel):
    """The content of one file. Each field that has the name of a submission's field holds the same value."""

    launch: str
    job: int | None
    restarts: int
    last_end: str
    submitted_at: _Time
    unsure_until: _Time | None
    started_at: _Time | None
    stop_by: _Time | None
    draining_since: _Time | None
    retired: bool
    restart_count: int | None
    queued_at: str
    nodes: str
    ready: str
    url: str
    """The URL of a backend that serves. It is empty for all other submissions."""
    ending: _StoredEnding | None
    workload: Workload


_COPIED: Final = tuple(_Record.model_fields.keys() - {"url", "ending"})


def load_records(folder: Path) -> list[Submission]:
    """Return the submissions of earlier runs, oldest first, from the files of a folder.

    A file that cannot be read is renamed and left out.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    submissions = []
    for path in sorted(folder.glob("*.json")):
        try:
            submissions.append(_submission(_Record.model_validate(read_json(path))))
        except (KeyError, TypeError, ValueError):  # A ValidationError is a ValueError.
            path.rename(path.with_suffix(".unreadable"))
    return sorted(submissions, key=lambda submission: submission.submitted_at)


def save_record(folder: Path, submission: Submission) -> None:
    """Write the file of a submission, either completely or not at all.

    Raises:
        OSError: The home cannot be written.
    """
    write_json(folder / f"{submission.launch}.json", _record(submission).model_dump(mode="json"))


def _record(submission: Submission) -> _Record:
    """Return the record of a submission."""
    values: dict[str, Any] = {name: getattr(submission, name) for name in _COPIED}
    ending = submission.ending
    if ending is not None:
        values["ending"] = _StoredEnding(
            code=ending.code,
            message=ending.message,
            at=submission.ended_at,
            process_ended=ending.process_ended,
        )
    return _Record.model_validate(
        {"ending": None, "url": submission.url if submission.health.warmed_up else "", **values}
    )


def _submission(record: _Record) -> Submission:
    """Return the submission that a record describes."""
    submission = Submission(record.launch, record.workload, record.restarts, record.submitted_at)
    for name in _COPIED:
        value = getattr(record, name)
        setattr(submission, name, value.astimezone(UTC) if isinstance(value, datetime) else value)
    if record.url:
        # The backend served when the last bridge ended. It counts as serving until its checks say otherwise.
        submission.url = record.url
        submission.health = BackendHealth(url=record.url, ready=True, warmed_up=True, message="")
    if record.ending is not None:
        stored = record.ending
        submission.ending = JobEnding(stored.code, stored.message, False, stored.process_ended)
        submission.ended_at = None if record.ending.at is None else record.ending.at.astimezone(UTC)
    return submission


class BackendHealthChecks:
    """The health checks of one bridge.

    Args:
        changed: A function that is called with each backend that becomes ready or stops being ready.
    """

    def __init__(self, site: Site, http: httpx.AsyncClient, changed: Callable[[Submission], None]) -> None:
        self._site = site
        self._http = http
        self._changed = changed

    def find(self, submission: Submission) -> bool:
        """Begin to check a backend, if it has announced its URL.

        Returns:
            Whether the backend has started and squeue has not shown this yet. In this case, Slurm should be
            polled soon.
        """
        path = self._site.endpoint_file(submission.launch)
        if submission.seen is None or submission.seen.state in PENDING_STATES:
            return submission.job is not None and path.exists()
        if not submission.running:
            return False
        document = read_json(path) or {}
        url = document.get("url")
        if isinstance(url, str) and document.get("job") == str(submission.job):
            self._check(submission, url)
        return False

    def _check(self, submission: Submission, url: str) -> None:
        """Begin the health check of a backend at a URL, unless it runs already."""
        if submission.probe is not None and submission.url == url:
            return
        if submission.url != url:  # Slurm has started the backend again on another node.
            submission.health = BackendHealth(url=url)
        self.pause(submission)
        submission.url = url

        def report(health: BackendHealth) -> None:
            before, submission.health = submission.health, health
            if before.ready != health.ready:
                self._changed(submission)

        submission.probe = asyncio.create_task(
            watch_backend(url, submission.workload.model, self._http, report, submission.health),
            name=f"health of {submission.workload.name}",
        )

    def pause(self, submission: Submission) -> None:
        """End the check of a backend, and keep its last known health."""
        if submission.probe is not None:
            submission.probe.cancel()
            submission.probe = None

    def end(self, submission: Submission) -> None:
        """End the check of a backend that does not run, and forget its health and its URL."""
        self.pause(submission)
        submission.health, submission.url = BackendHealth(), ""
        self._site.endpoint_file(submission.launch).unlink(missing_ok=True)

    async def close(self, submissions: Iterable[Submission]) -> None:
        """End the checks of all given submissions, and wait until they have ended."""
        probes = [submission.probe for submission in submissions if submission.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


class HomeSubmissions:
    """The submissions of one home, and what is shared by all that submits, polls and stops them.

    The first submissions are those that an earlier bridge has left.

    Args:
        calls: The calls to Slurm.
        wake: A function that is called when a backend becomes ready or stops being ready.
        say: A function that is called with each line for the user of the bridge.
    """

    def __init__(
        self,
        site: Site,
        calls: SlurmCalls,
        http: httpx.AsyncClient,
        wake: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.site = site
        self.calls = calls
        self.say = say
        self.availability = SlurmAvailability(say)
        self.avoided = AvoidedNodes()
        self._wake = wake
        self._folder = site.home / "submissions"
        self._all = load_records(self._folder)
        self.health_checks = BackendHealthChecks(site, http, self._health_changed)
        self.changed = True
        """Whether something was done or seen after which Slurm should be polled soon."""

    def __iter__(self) -> Iterator[Submission]:
        """Iterate over the present submissions, oldest first.

        Submissions may be forgotten during the iteration.
        """
        return iter(list(self._all))

    def add(self, submission: Submission) -> None:
        """Add a submission that has no record on disk yet."""
        self._all.append(submission)

    def save(self, submission: Submission) -> None:
        """Write the record of a submission.

        Raises:
            OSError: The home cannot be written.
        """
        save_record(self._folder, submission)

    def give(self, submission: Submission, workload: Workload, now: datetime) -> None:
        """Make a worker that stands ready the worker of a RolloutJob.

        From now on its record says so. No other RolloutJob takes it, whatever becomes of the bridge.

        Raises:
            OSError: The home cannot be written. The worker still stands ready.
        """
        before = submission.workload, submission.submitted_at, submission.started_at
        submission.ready, submission.workload = submission.workload.name, workload
        submission.submitted_at = submission.started_at = now
        try:
            self.save(submission)
        except OSError:
            submission.ready = ""
            submission.workload, submission.submitted_at, submission.started_at = before
            raise
        # The submissions of a workload are in the order in which they became its submissions.
        self._all.remove(submission)
        self._all.append(submission)

    def remove_record(self, submission: Submission) -> None:
        """Remove the record of a submission for which Slurm made no job."""
        (self._folder / f"{submission.launch}.json").unlink(missing_ok=True)

    def forget(self, submission: Submission) -> None:
        """Remove a submission and its files."""
        self.health_checks.end(submission)
        if submission.job is not None:
            self.site.trouble_file(submission.submitted_as, submission.job).unlink(missing_ok=True)
        if submission in self._all:
            self._all.remove(submission)
        self.remove_record(submission)
        if all(another.workload.owner != submission.workload.owner for another in self._all):
            self.site.token_file(submission.workload).unlink(missing_ok=True)
        if submission.ready:
            self.site.ready_token_file(submission.workload.owner.namespace, submission.ready).unlink(
                missing_ok=True
            )

    def near_limit(self, submission: Submission) -> bool:
        """Return whether the job of a submission is so close to its time limit that a successor is due."""
        profile = self.site.profile.of(submission.workload.kind)
        return submission.seen is not None and wants_successor(submission.seen, profile)

    @property
    def owners(self) -> set[Owner]:
        """The jobs and pools that have at least one submission."""
        return {submission.workload.owner for submission in self._all if not submission.standing}

    def groups(self) -> dict[str, SubmissionGroup]:
        """Return the groups of submissions, keyed by the names of their workloads."""
        groups: dict[str, list[Submission]] = {}
        for submission in self._all:
            groups.setdefault(submission.workload.name, []).append(submission)
        return {name: SubmissionGroup(members) for name, members in groups.items()}

    def named(self) -> dict[str, Submission]:
        """Return the submissions, keyed by the names under which reconcile knows them.

        The front of a group has the name of the workload. The name of each predecessor also has the number
        of its Slurm job.
        """
        named = {}
        for name, group in self.groups().items():
            front = group.front
            named[name] = front
            named |= {
                f"{name}-j{submission.job}": submission
                for submission in group.predecessors
                if submission is not front
            }
        return named

    def retire_predecessors(self) -> None:
        """Mark each submission whose successor serves as retired."""
        for group in self.groups().values():
            front = group.front
            for submission in group.predecessors:
                if front.serving and not submission.retired:
                    submission.retired = True
                    self.save(submission)

    def _health_changed(self, submission: Submission) -> None:
        self.retire_predecessors()
        self.save(submission)
        self._wake()

    async def close(self) -> None:
        """End the health checks. The Slurm jobs continue to run."""
        await self.health_checks.close(self._all)


def jobs_of(submissions: Iterable[Submission]) -> list[int]:
    """Return the numbers of the Slurm jobs of some submissions, without those that have no job."""
    return [submission.job for submission in submissions if submission.job is not None]


class SlurmAvailability:
    """Records whether Slurm answers.

    Args:
        say: A function that is called with a line for the user of the bridge at each change.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.trouble = ""
        """The reason why Slurm does not answer. It is empty while Slurm answers."""
        self.answered_once = False
        """Whether Slurm has answered since the bridge started. Nothing is submitted before that."""

    def lost(self, trouble: str) -> None:
        """Note that Slurm does not answer, and why."""
        if trouble != self.trouble:
            self._say(f"Slurm does not answer, everything counts as last seen: {trouble}")
        self.trouble = trouble

    def answered(self) -> None:
        """Note that Slurm answers."""
        if self.trouble:
            self._say(f"Slurm answers again (it did not: {self.trouble})")
        self.trouble = ""
        self.answered_once = True


class AvoidedNodes:
    """The nodes that new jobs avoid. Each is avoided for ten minutes, and only while other nodes will do."""

    def __init__(self) -> None:
        self._until: dict[str, datetime] = {}

    def add(self, node: str, now: datetime) -> None:
        """Add a node on which a worker ended for a reason that lies in the node."""
        if node:
            self._until[node] = now + timedelta(seconds=AVOID_SECONDS)

    def expire(self, now: datetime) -> None:
        """Forget the nodes that have been avoided for ten minutes."""
        self._until = {node: until for node, until in self._until.items() if until > now}

    def clear(self) -> None:
        """Forget all nodes. This is called when no other node will do."""
        self._until.clear()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The sorted names of the nodes."""
        return tuple(sorted(self._until))
