"""A stopper ends submissions step by step.

A job is first asked to drain, then to hand over its rollouts at once, and is finally cancelled.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from rollyard_drivers.reconcile.plan import Stop

from rollyard_slurm.submissions.home_submissions import HomeSubmissions, jobs_of
from rollyard_slurm.submissions.submission import Submission

CANCEL_AGAIN_SECONDS: Final = 30.0
"""The time after which a job that scancel has not ended is cancelled again, in seconds."""
HAND_OVER_SECONDS: Final = 6.0
"""The time that a stage worker has to hand over its rollouts after the second signal, in seconds."""


class Stopper:
    """Stops submissions over several passes. It uses few commands, each of which serves many jobs."""

    def __init__(self, submissions: HomeSubmissions) -> None:
        self._submissions = submissions

    def stop(self, stop: Stop) -> None:
        """Begin to stop a workload, and forget a workload that has ended.

        The job is cancelled when the grace of the stop is over.
        """
        submission = self._submissions.named().get(stop.name)
        if submission is None:
            return
        group = self._submissions.groups()[submission.workload.name]
        # A workload is stopped together with the submissions that were to succeed it.
        ending = [submission, *group.successors] if submission is group.front else [submission]
        now = datetime.now(UTC)
        for each in ending:
            if not each.living or each.refused:
                self._submissions.forget(each)
            elif each.stop_by is None:
                self._submissions.health_checks.pause(each)
                each.stop_by = now + timedelta(seconds=stop.grace_seconds)
                self._submissions.save(each)

    def stop_kind(self, kind: str, grace_seconds: float, now: datetime) -> None:
        """Begin to stop every workload of one kind.

        Args:
            kind: The kind, `stage-worker` or `backend`.
            grace_seconds: The time until the jobs are cancelled, in seconds.
            now: The present time.
        """
        for submission in self._submissions:
            if submission.workload.kind != kind:
                continue
            if not submission.living or submission.refused:
                self._submissions.forget(submission)
                continue
            by = now + timedelta(seconds=grace_seconds)
            submission.stop_by = by if submission.stop_by is None else min(by, submission.stop_by)
            self._submissions.save(submission)

    async def proceed(self, now: datetime) -> None:
        """Send the signals that are due, and cancel the jobs whose grace is over.

        Raises:
            SlurmError: Slurm does not answer.
        """
        drain: list[Submission] = []
        insist: list[Submission] = []
        cancel: list[Submission] = []
        for submission in self._submissions:
            if submission.stop_by is None or not submission.living or submission.job is None:
                continue
            left = (submission.stop_by - now).total_seconds()
            if submission.waits or left <= 0:
                if _may_cancel(submission, now):
                    cancel.append(submission)
            elif not submission.drained:
                drain.append(submission)
            elif (
                left <= HAND_OVER_SECONDS
                and not submission.insisted
                and submission.workload.kind == "stage-worker"
            ):
                insist.append(submission)
        if cancel:
            await self._submissions.calls.cancel(jobs_of(cancel))
            for submission in cancel:
                submission.cancelled_at = now
        if drain:
            await self._submissions.calls.signal(jobs_of(drain), "USR1")
            for submission in drain:
                submission.drained = True
        if insist:
            await self._submissions.calls.signal(jobs_of(insist), "USR2")
            for submission in insist:
                submission.insisted = True
        if cancel or drain or insist:
            self._submissions.changed = True


def _may_cancel(submission: Submission, now: datetime) -> bool:
    """Return whether a job has not been cancelled yet, or so long ago that it may be cancelled again."""
    return (
        submission.cancelled_at is None
        or (now - submission.cancelled_at).total_seconds() > CANCEL_AGAIN_SECONDS
    )
