"""The submissions of one home, in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

import httpx
from rollyard_drivers.reconcile.plan import Owner, Workload

from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.backend_health import BackendHealthChecks
from rollyard_slurm.submissions.group import SubmissionGroup
from rollyard_slurm.submissions.records import Records
from rollyard_slurm.submissions.submission import Submission


class HomeSubmissions:
    """The submissions of one home. The first ones are those that an earlier bridge has left.

    Args:
        wake: A function that is called when a backend becomes ready or stops being ready.
    """

    def __init__(self, site: Site, http: httpx.AsyncClient, wake: Callable[[], None]) -> None:
        self._site = site
        self._wake = wake
        self._records = Records(site.home / "submissions")
        self._all: list[Submission] = self._records.load()
        self.health_checks = BackendHealthChecks(site, http, self._health_changed)
        self.changed = True
        """Whether something was done or seen after which Slurm should be polled soon."""

    def __iter__(self) -> Iterator[Submission]:
        """Iterate over the present submissions, oldest first.

        Submissions may be forgotten during the iteration.
        """
        return iter(list(self._all))

    def add(self, one: Submission) -> None:
        """Add a submission that has no record on disk yet."""
        self._all.append(one)

    def save(self, one: Submission) -> None:
        """Write the record of a submission.

        Raises:
            OSError: The home cannot be written.
        """
        self._records.save(one)

    def give(self, one: Submission, workload: Workload, now: datetime) -> None:
        """Make a worker that stands ready the worker of a RolloutJob.

        From now on its record says so. No other RolloutJob takes it, whatever becomes of the bridge.

        Raises:
            OSError: The home cannot be written. The worker still stands ready.
        """
        before = one.workload, one.submitted_at, one.started_at
        one.ready, one.workload = one.workload.name, workload
        one.submitted_at = one.started_at = now
        try:
            self._records.save(one)
        except OSError:
            one.ready = ""
            one.workload, one.submitted_at, one.started_at = before
            raise
        # The submissions of a workload are in the order in which they became its submissions.
        self._all.remove(one)
        self._all.append(one)

    def remove_record(self, one: Submission) -> None:
        """Remove the record of a submission for which Slurm made no job."""
        self._records.forget(one)

    def forget(self, one: Submission) -> None:
        """Remove a submission and its files."""
        self.health_checks.end(one)
        if one.job is not None:
            self._site.trouble_file(one.submitted_as, one.job).unlink(missing_ok=True)
        if one in self._all:
            self._all.remove(one)
        self._records.forget(one)
        if all(other.workload.owner != one.workload.owner for other in self._all):
            self._site.token_file(one.workload).unlink(missing_ok=True)
        if one.ready:
            self._site.ready_token_file(one.workload.owner.namespace, one.ready).unlink(missing_ok=True)

    @property
    def owners(self) -> set[Owner]:
        """The jobs and pools that have at least one submission."""
        return {one.workload.owner for one in self._all if not one.standing}

    def groups(self) -> dict[str, SubmissionGroup]:
        """Return the groups of submissions, keyed by the names of their workloads."""
        groups: dict[str, list[Submission]] = {}
        for one in self._all:
            groups.setdefault(one.workload.name, []).append(one)
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
            named |= {f"{name}-j{one.job}": one for one in group.predecessors if one is not front}
        return named

    def retire_predecessors(self) -> None:
        """Mark each submission whose successor serves as retired."""
        for group in self.groups().values():
            front = group.front
            for one in group.predecessors:
                if front.serving and not one.retired:
                    one.retired = True
                    self.save(one)

    def _health_changed(self, one: Submission) -> None:
        self.retire_predecessors()
        self.save(one)
        self._wake()

    async def close(self) -> None:
        """End the health checks. The Slurm jobs continue to run."""
        await self.health_checks.close(self._all)


def jobs_of(submissions: Iterable[Submission]) -> list[int]:
    """Return the numbers of the Slurm jobs of some submissions, without those that have no job."""
    return [one.job for one in submissions if one.job is not None]
