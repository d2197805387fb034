"""Stage workers that stand ready in Slurm jobs: they are kept at their number, and given to new RolloutJobs.

A ready worker is a submission whose owner stands for itself. When a RolloutJob takes it, one write of its
record makes it a submission of this RolloutJob, and the offer to the control plane follows. The offer is
repeated until it is answered, also by the next bridge. The bridge may therefore be killed between any two
steps, and no worker is given away twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime, timedelta
from typing import Final

from rollyard_crds.fields.pod_template import PodTemplate
from rollyard_crds.workers import AssignmentOffer
from rollyard_drivers.commands import work_arguments
from rollyard_drivers.loop.driver import StoreTrouble
from rollyard_drivers.reconcile.naming import made_of
from rollyard_drivers.reconcile.plan import Launch, Owner, Stop, Workload
from rollyard_drivers.reconcile.ready_workers import ReadyState, ReadyWorker, choose, plan_ready
from rollyard_process.backoff import Backoff

from rollyard_slurm.options import reconcile_profile
from rollyard_slurm.readers import reasons
from rollyard_slurm.readers.jobs import PENDING_STATES
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.home_submissions import HomeSubmissions
from rollyard_slurm.submissions.stopping import Stopper
from rollyard_slurm.submissions.submission import Submission
from rollyard_slurm.submissions.submitting import Submitter

DEFAULT_NAMESPACE: Final = "default"
"""The namespace in which workers stand ready if the bridge names none."""
STOP_SECONDS: Final = 10.0
"""The time that a ready worker has to end by itself, in seconds."""
YIELD_SECONDS: Final = 30.0
"""No worker stands ready while a worker or backend has been pending for this many seconds."""
REFUSED_SECONDS: Final = 60.0
"""The time in which no ready worker is taken after the control plane has refused an offer, in seconds."""
_PAUSES: Final = Backoff(first=2.0, longest=120.0)


def ready_workload(namespace: str, name: str, site: Site) -> Workload:
    """Return the workload of a worker that stands ready.

    Args:
        namespace: The namespace whose RolloutJobs may take the worker.
        name: The name of the worker, which no other ready worker of the control plane ever has.
        site: The settings that the script of the worker is made from.
    """
    shape = made_of(PodTemplate(), {}, reconcile_profile(site))
    return Workload(name, "stage-worker", Owner("ReadyWorker", namespace, name, ""), made_of=shape)


class ReadyWorkers:
    """The workers of one home that stand ready.

    Args:
        submissions: The submissions of the home.
        stopper: Stops ready workers that are not needed.
        namespaces: The namespaces in which workers stand ready.
    """

    def __init__(self, submissions: HomeSubmissions, stopper: Stopper, namespaces: Collection[str]) -> None:
        self._submissions = submissions
        self._stopper = stopper
        self._namespaces = namespaces
        self._shape = ready_workload("", "", submissions.site).made_of
        self._failures: dict[str, int] = {}
        self._resting: dict[str, datetime] = {}
        self._refused_until: datetime | None = None
        self._trouble = ""

    def take(self, launch: Launch, now: datetime) -> bool:
        """Make a worker that stands ready the worker of a launch, and return whether there was one.

        Only the first start of a worker takes one, and only if the worker was started with all that its own
        script would say.

        Raises:
            OSError: The home cannot be written.
        """
        workload = launch.workload
        if workload.kind != "stage-worker" or launch.restarts:
            return False
        if self._refused_until is not None and now < self._refused_until:
            return False
        fit = {
            submission.launch: submission for submission in self._standing() if not self._is_old(submission)
        }
        observed = [_observed(submission) for submission in fit.values()]
        chosen = choose(observed, workload.owner.namespace, workload.made_of)
        if chosen is None:
            return False
        submission = fit[chosen.uid]
        self._submissions.give(submission, workload, now)
        self._failures.pop(workload.owner.namespace, None)
        self._submissions.say(f"{workload.name}: Slurm job {submission.job}, which stood ready, works for it")
        return True

    async def offer(self, now: datetime, send: Callable[[AssignmentOffer], Awaitable[str]]) -> None:
        """Offer each RolloutJob to the ready workers that it has taken, unless that was answered before.

        A worker whose offer is refused is of no use and is stopped.

        Args:
            now: The present time.
            send: Sends an offer to the control plane, and returns why the worker cannot have the RolloutJob,
                or an empty string. It raises StoreTrouble if the control plane does not answer.
        """
        for submission in self._submissions:
            if (
                not submission.ready
                or submission.offered
                or submission.stopping
                or not submission.living
                or not submission.worker
            ):
                continue
            owner = submission.workload.owner
            arguments = [*work_arguments(submission.workload), "--name", submission.worker]
            offered = AssignmentOffer(
                namespace=owner.namespace,
                worker=submission.ready,
                job=owner.name,
                uid=owner.uid,
                arguments=arguments,
            )
            try:
                refusal = await send(offered)
            except StoreTrouble:
                return  # The next pass offers again.
            submission.offered = True
            if refusal:
                self._refused_until = now + timedelta(seconds=REFUSED_SECONDS)
                self._submissions.say(
                    f"{submission.workload.name}: the worker that stood ready cannot have the job: {refusal}"
                )
                self._stopper.stop(Stop(submission.workload.name, STOP_SECONDS))

    async def keep(self, now: datetime, submitter: Submitter) -> None:
        """Submit and stop ready workers, so that there are as many as the profile says.

        None stands ready while a worker or backend of the home waits for a place.
        """
        count = self._submissions.site.profile.workers.ready
        standing = self._standing()
        if not count and not standing:
            return
        others = [
            submission
            for submission in self._submissions
            if not submission.standing and submission.living and not submission.stopping
        ]
        if any(
            submission.refused and submission.retry_at is not None and submission.retry_at <= now
            for submission in others
        ):
            return  # They are tried first.
        if any(_waits_for_place(submission, now) for submission in others):
            count = 0
        old = [submission for submission in standing if self._is_old(submission)]
        self._resting = {namespace: end for namespace, end in self._resting.items() if end > now}
        observed = [_observed(submission) for submission in standing if submission not in old]
        plan = plan_ready(observed, self._namespaces, count, self._shape, now, self._resting)
        self._tell_failures(standing)
        for namespace in plan.broken:
            self._rest(namespace, now)
        for name in [
            *(submission.workload.name for submission in old),
            *(worker.name for worker in plan.delete),
        ]:
            self._stopper.stop(Stop(name, STOP_SECONDS))
        for namespace, missing in plan.create.items():
            for _ in range(missing):
                # The name is random, because a token is made of it and is never valid for another worker.
                workload = ready_workload(namespace, f"ready-{secrets.token_hex(8)}", self._submissions.site)
                if not await self._submit(workload, submitter, now):
                    break

    async def _submit(self, workload: Workload, submitter: Submitter, now: datetime) -> bool:
        """Submit one ready worker, and return whether another one may be submitted in this pass."""
        submission = await submitter.submit_ready(workload, now)
        if submission is None or not submission.refused or submission.blocked:
            return submission is not None and not submission.blocked
        # RolloutJobs and pools come first where the site limits the number of jobs. It is therefore not
        # submitted again with their next tries.
        self._tell(submission.refused)
        self._rest(workload.owner.namespace, now)
        self._submissions.forget(submission)
        return False

    def _standing(self) -> list[Submission]:
        return [submission for submission in self._submissions if submission.standing]

    def _is_old(self, submission: Submission) -> bool:
        """Return whether a ready worker is so close to its time limit that a worker would be replaced."""
        return submission.living and self._submissions.near_limit(submission)

    def _rest(self, namespace: str, now: datetime) -> None:
        """Submit no ready workers of a namespace for a while, which grows with each failure in a row."""
        self._failures[namespace] = self._failures.get(namespace, 0) + 1
        self._resting[namespace] = now + timedelta(seconds=_PAUSES.pause(self._failures[namespace]))

    def _tell_failures(self, standing: list[Submission]) -> None:
        """Say why ready workers have ended or cannot be submitted."""
        for submission in standing:
            if submission.blocked:
                self._tell(submission.refused)
            elif submission.ending is not None:
                self._tell(
                    submission.ending.message
                    or f"Slurm job {submission.job} ended with {submission.ending.code}"
                )

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._submissions.say(f"ready workers: {trouble}")
        self._trouble = trouble


def _observed(submission: Submission) -> ReadyWorker:
    """Return a worker that stands ready as it is observed."""
    workload = submission.observed(submission.workload.name)
    states: dict[str, ReadyState] = {
        "starting": "starting",
        "running": "running",
        "stopping": "leaving",
        "exited": "ended",
    }
    return ReadyWorker(
        namespace=submission.workload.owner.namespace,
        name=submission.workload.name,
        uid=submission.launch,
        shape=submission.workload.made_of,
        state=states[workload.state],
        created_at=submission.submitted_at,
        pending=True,
    )


def _waits_for_place(submission: Submission, now: datetime) -> bool:
    """Return whether a worker or backend waits for a place that a ready worker might hold."""
    if submission.refused:
        return True
    if (
        submission.seen is None
        or submission.seen.state not in PENDING_STATES
        or reasons.is_blocked(submission.seen)
    ):
        return False
    return (now - submission.submitted_at).total_seconds() > YIELD_SECONDS
