"""A submitter sends workloads to Slurm.

It submits the workloads that plans launch, those that Slurm refused before, and successors.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from rollyard_drivers.host.downloads import Downloads
from rollyard_drivers.host.errors import CannotStart
from rollyard_drivers.host.private_files import write_private
from rollyard_drivers.reconcile.plan import Launch, Owner, Stop, Workload
from rollyard_drivers.reconcile.workloads import Replacements

from rollyard_slurm.errors import SlurmError, SlurmUnavailable, SubmitRefused
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.batch import batch_script
from rollyard_slurm.submissions.home_submissions import HomeSubmissions, SubmissionGroup
from rollyard_slurm.submissions.submission import Submission

UNSURE_SECONDS: Final = 90.0
"""The time in which a job appears if sbatch submitted it before it was cut off, in seconds."""
RETRY_SECONDS: Final = 15.0
"""The time between two tries after a limit of the site refused a job, in seconds."""
MODEL_SECONDS: Final = 2.0
"""The time between two looks at the download of a model, in seconds."""
SUCCESSOR_AGAIN_SECONDS: Final = 60.0
"""The time between the failure of a successor and the submission of the next one, in seconds."""
SUBMITTED_AT_ONCE: Final = 32
"""The largest number of jobs that are submitted in one pass. The next passes submit the others."""


class Submitter:
    """Submits workloads, and never submits the same one twice.

    Args:
        submissions: The submissions of the home.
        worker_token: A function that returns the token of the workers of a RolloutJob, or of a ready worker.
        take: A function that makes a worker that stands ready the worker of a launch, and returns whether
            there was one.
        downloads: The downloads of models, on the host of the bridge.
    """

    def __init__(
        self,
        submissions: HomeSubmissions,
        worker_token: Callable[[Owner], str],
        take: Callable[[Launch, datetime], bool],
        downloads: Downloads,
    ) -> None:
        self._submissions = submissions
        self._worker_token = worker_token
        self._take = take
        self._downloads = downloads
        self._replaced = Replacements()
        self._successor_after: dict[str, datetime] = {}
        self._limit = ""
        self._submitted = 0

    def begin_turn(self) -> None:
        """Start a new pass: reset the count of submitted jobs, and forget the limit that was met."""
        self._limit, self._submitted = "", 0

    def note_stop(self, stop: Stop) -> None:
        """Note that a workload is being stopped. The stop says whether it is to be launched again."""
        self._replaced.note(stop)

    def successor_failed(self, name: str, now: datetime) -> None:
        """Note that a successor of a workload ended before it took over."""
        self._successor_after[name] = now + timedelta(seconds=SUCCESSOR_AGAIN_SECONDS)

    async def launch(self, launch: Launch, now: datetime) -> None:
        """Submit a workload that a plan launches.

        This does nothing if the workload already exists, because it appeared after the plan was made, or if
        enough jobs were submitted in this pass. In the second case, the next plan launches the workload.
        """
        name = launch.workload.name
        earlier = [submission for submission in self._submissions if submission.workload.name == name]
        if (
            any(submission.living and not submission.retired for submission in earlier)
            or self._submitted >= SUBMITTED_AT_ONCE
        ):
            return
        for old in earlier:
            if not old.living:
                self._submissions.forget(old)
        counted = self._replaced.counted(launch)
        if not self._take(counted, now):
            await self._submit(counted, now)
        self._replaced.launched(name)

    async def retry(self, now: datetime) -> None:
        """Submit the workloads that were refused before and are due for another try."""
        for submission in self._submissions:
            if (
                submission.refused
                and not submission.blocked
                and submission.retry_at is not None
                and now >= submission.retry_at
            ):
                await self._try(submission, now)

    async def submit_successors(self, now: datetime) -> None:
        """Submit successors of the jobs that are close to their time limits."""
        for name, group in self._submissions.groups().items():
            if self._wants_successor(name, group, now):
                front = group.front
                self._submissions.say(
                    f"{name}: the time limit of Slurm job {front.job} is near; its successor queues"
                )
                await self._submit(Launch(front.workload, front.restarts, front.last_end), now)

    def _wants_successor(self, name: str, group: SubmissionGroup, now: datetime) -> bool:
        """Return whether a workload needs a successor now."""
        front = group.front
        if not front.running or front.stopping or front.standing or group.successors:
            return False
        after = self._successor_after.get(name)
        if after is not None and now < after:
            return False
        return self._submissions.near_limit(front)

    async def submit_ready(self, workload: Workload, now: datetime) -> Submission | None:
        """Submit a worker that stands ready, and return the submission, which may have been refused.

        The result is None if enough jobs were submitted in this pass.
        """
        if self._submitted >= SUBMITTED_AT_ONCE:
            return None
        return await self._submit(Launch(workload), now)

    async def _submit(self, launch: Launch, now: datetime) -> Submission:
        """Add a new submission of a workload, submit it, and return it."""
        submission = Submission(secrets.token_hex(6), launch.workload, launch.restarts, now, launch.last_end)
        self._submissions.add(submission)
        await self._try(submission, now)
        return submission

    async def _try(self, submission: Submission, now: datetime) -> None:
        """Submit one workload, if Slurm answers and no limit of the site was met in this pass.

        If it is not submitted, the submission holds the reason.
        """
        self._submissions.changed = True
        trouble = self._submissions.availability.trouble or self._limit
        if trouble or not self._submissions.availability.answered_once:
            submission.refused = f"not submitted yet: {trouble}"
            submission.retry_at = now + timedelta(seconds=RETRY_SECONDS if self._limit else 0.0)
            return
        folder = ""
        if submission.workload.kind == "backend" and submission.workload.engine != "external":
            # Nodes often have no network, and no job needs a token for the hub.
            try:
                model = await self._downloads.folder(submission.workload.model, submission.workload.engine)
            except CannotStart as lack:
                submission.refused, submission.blocked = str(lack), True
                return
            folder = model.path
            if model.waits:
                submission.refused = f"not submitted yet: {model.waits}"
                submission.retry_at = now + timedelta(seconds=MODEL_SECONDS)
                return
        self._submitted += 1
        submission.refused, submission.retry_at, submission.submitted_at = "", None, now
        submission.unsure_until = now + timedelta(seconds=UNSURE_SECONDS)
        try:
            await self._call_sbatch(submission, folder)
        except SubmitRefused as refusal:
            self._submissions.remove_record(submission)
            submission.unsure_until = None
            self._refused(submission, refusal, now)
            return
        except SlurmUnavailable as error:
            self._submissions.availability.lost(str(error))
            if not error.unsure:
                self._submissions.remove_record(submission)
                submission.unsure_until, submission.refused, submission.retry_at = (
                    None,
                    f"not submitted yet: {error}",
                    now,
                )
            return
        except SlurmError as error:
            self._submissions.remove_record(submission)
            submission.unsure_until, submission.refused, submission.blocked = None, str(error), True
            return
        except OSError as error:
            submission.unsure_until, submission.blocked = None, True
            submission.refused = f"the home cannot be written: {error.filename}: {error.strerror}"
            return
        submission.unsure_until = None
        self._submissions.save(submission)

    async def _call_sbatch(self, submission: Submission, folder: str) -> None:
        """Write the files of a submission, and submit its batch script."""
        workload, site = submission.workload, self._submissions.site
        identity = SlurmJobIdentity.of(workload, site.instance, submission.launch, submission.restarts)
        if workload.kind == "stage-worker":
            write_private(site.token_file(workload), self._worker_token(workload.owner))
            submission.avoided = self._submissions.avoided.nodes
        # The record is written before sbatch runs. The job is found again even if this process is killed.
        self._submissions.save(submission)
        script = batch_script(workload, site, identity, submission.avoided, folder)
        submission.job = await self._submissions.calls.submit(script)

    def _refused(self, submission: Submission, refusal: SubmitRefused, now: datetime) -> None:
        """Note that Slurm refused a job, and decide whether and when to try again."""
        submission.refused = f"{refusal.by}: {refusal}"
        if refusal.limit:
            self._limit = submission.refused
            submission.retry_at = now + timedelta(seconds=RETRY_SECONDS)
        elif submission.avoided:
            # Perhaps only the avoided nodes can run the job. It is submitted without `--exclude` at once.
            self._submissions.avoided.clear()
            submission.retry_at = now
        else:
            submission.blocked = True
