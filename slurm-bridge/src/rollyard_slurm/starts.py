"""How submissions begin and are told to end: as batch jobs, or as steps of allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollyard_drivers.host.processes import is_alive
from rollyard_drivers.reconcile.plan import Workload

from rollyard_slurm.allocations import MOST, Allocations
from rollyard_slurm.calls.command_line import Commands
from rollyard_slurm.scripts.batch import Batch, Site
from rollyard_slurm.submissions.submission import Submission


class Starts:
    """Hands submissions in.

    Args:
        allocate: None: all are batch jobs.
        save: writes a submission's record.
    """

    def __init__(
        self,
        site: Site,
        commands: Commands,
        allocate: Allocations | None,
        save: Callable[[Submission], None],
    ) -> None:
        self._site = site
        self._commands = commands
        self._allocate = allocate
        self._save = save
        self._stepless: set[str] = set()

    def may_allocate(self, workload: Workload, beside: Iterable[Submission]) -> bool:
        """Whether a workload is tried as an allocation's step first."""
        if self._allocate is None or self._site.profile.of(workload.kind).start != "salloc":
            return False
        return sum(one.allocated and one.living for one in beside) < MOST

    async def hand_in(self, one: Submission, script: Batch) -> int:
        """By salloc where it is wanted and goes at once, else as a batch job; the job's number.

        Raises:
            SubmitRefused, SlurmAway, SlurmError, OSError: there is no job, or none that is known of.
        """
        if one.allocated and self._allocate is not None:
            log = self._site.logs / one.workload.name
            granted = await self._allocate.allocate(one.launch, script.text(), str(log))
            if granted is not None:
                one.launcher = granted.launcher
                return granted.job
            one.allocated = False
            self._save(one)
        return await self._commands.submit(script)

    async def stepless(self, submissions: Iterable[Submission]) -> list[Submission]:
        """Allocations that nothing runs in: their salloc was killed before it began a step, or after.

        Only what is so at two calls counts: salloc may have released one since squeue was asked.
        """
        if self._allocate is None:
            return []
        alone = [one for one in submissions if one.allocated and one.running and not one.stopping]
        alone = [one for one in alone if one.launcher is None or not is_alive(one.launcher)]
        found = await self._allocate.steps(jobs_of(alone)) if alone else set()
        empty = [one for one in alone if one.job not in found]
        before, self._stepless = self._stepless, {one.launch for one in empty}
        return [one for one in empty if one.launch in before]

    @property
    def suspects(self) -> bool:
        """Something was found empty once: worth another look soon."""
        return bool(self._stepless)

    async def signal(self, submissions: Sequence[Submission], name: str) -> None:
        """USR1 or USR2 to their scripts."""
        batch = [one for one in submissions if not one.allocated]
        steps = [one for one in submissions if one.allocated]
        if batch:
            await self._commands.signal(jobs_of(batch), name)
        if steps and self._allocate is not None:
            await self._allocate.signal(jobs_of(steps), name)

    def words(self, one: Submission) -> str:
        """What kept an allocation's script from running."""
        return self._allocate.words(one.launch) if one.allocated and self._allocate is not None else ""

    def forget(self, one: Submission) -> None:
        """Removes the files of an allocation."""
        if one.allocated and self._allocate is not None:
            self._allocate.forget(one.launch)


def jobs_of(submissions: Iterable[Submission]) -> list[int]:
    """Their numbers."""
    return [one.job for one in submissions if one.job is not None]
