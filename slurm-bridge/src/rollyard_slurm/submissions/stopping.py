"""A stopper ends submissions step by step.

A job is first asked to drain, then to hand over its rollouts at once, and is finally cancelled.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from rollyard_drivers.reconcile.plan import Stop

from rollyard_slurm.calls.protocol import SlurmCalls
from rollyard_slurm.submissions.home_submissions import HomeSubmissions, jobs_of
from rollyard_slurm.submissions.submission import Submission

CANCEL_AGAIN_SECONDS = 30.0
"""The time after which a job that scancel has not ended is cancelled again, in seconds."""
HAND_OVER_SECONDS = 6.0
"""The time that a stage worker has to hand over its rollouts after the second signal, in seconds."""


class Stopper:
    """Stops submissions over several passes. It uses few commands, each of which serves many jobs."""

    def __init__(self, calls: SlurmCalls, submissions: HomeSubmissions) -> None:
        self._calls = calls
        self._submissions = submissions

    def stop(self, stop: Stop) -> None:
        """Begin to stop a workload, and forget a workload that has ended.

        The job is cancelled when the grace of the stop is over.
        """
        one = self._submissions.named().get(stop.name)
        if one is None:
            return
        group = self._submissions.groups()[one.workload.name]
        # A workload is stopped together with the submissions that were to succeed it.
        ending = [one, *group.successors] if one is group.front else [one]
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
        for one in self._submissions:
            if one.workload.kind != kind:
                continue
            if not one.living or one.refused:
                self._submissions.forget(one)
                continue
            by = now + timedelta(seconds=grace_seconds)
            one.stop_by = by if one.stop_by is None else min(by, one.stop_by)
            self._submissions.save(one)

    async def proceed(self, now: datetime) -> None:
        """Send the signals that are due, and cancel the jobs whose grace is over.

        Raises:
            SlurmError: Slurm does not answer.
        """
        drain: list[Submission] = []
        insist: list[Submission] = []
        cancel: list[Submission] = []
        for one in self._submissions:
            if one.stop_by is None or not one.living or one.job is None:
                continue
            left = (one.stop_by - now).total_seconds()
            if one.waits or left <= 0:
                if _may_cancel(one, now):
                    cancel.append(one)
            elif not one.drained:
                drain.append(one)
            elif left <= HAND_OVER_SECONDS and not one.insisted and one.workload.kind == "stage-worker":
                insist.append(one)
        if cancel:
            await self._calls.cancel(jobs_of(cancel))
            for one in cancel:
                one.cancelled_at = now
        if drain:
            await self._calls.signal(jobs_of(drain), "USR1")
            for one in drain:
                one.drained = True
        if insist:
            await self._calls.signal(jobs_of(insist), "USR2")
            for one in insist:
                one.insisted = True
        if cancel or drain or insist:
            self._submissions.changed = True


def _may_cancel(one: Submission, now: datetime) -> bool:
    """Return whether a job has not been cancelled yet, or so long ago that it may be cancelled again."""
    return one.cancelled_at is None or (now - one.cancelled_at).total_seconds() > CANCEL_AGAIN_SECONDS
