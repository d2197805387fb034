"""Carries plans out with sbatch jobs, and says what is seen of them.

Nothing is known but by what squeue says: a job that a file of ours knows and squeue does not is
asked about one by one. While Slurm does not answer, everything counts as it was last seen.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from rollyard_drivers.host.log_file import telling_line
from rollyard_drivers.reconcile.plan import Launch, ObservedWorkload, Owner, Plan, Stop
from rollyard_drivers.reconcile.replacements import Replacements

from rollyard_slurm.calls.command_line import Commands
from rollyard_slurm.errors import SlurmAway, SlurmError, SubmitRefused
from rollyard_slurm.private_files import write_private
from rollyard_slurm.readers import job_identity
from rollyard_slurm.readers.command_output import QueuedJob
from rollyard_slurm.scheduling import time_limits
from rollyard_slurm.scheduling.avoided_nodes import Avoided
from rollyard_slurm.scripts.batch import NODE_UNUSABLE, Site, batch_script
from rollyard_slurm.submissions.backend_health import Watches
from rollyard_slurm.submissions.group import Group
from rollyard_slurm.submissions.records import Records
from rollyard_slurm.submissions.submission import Submission, fresh

UNSURE_SECONDS = 90.0
"""A job that sbatch may have handed in before it was cut off has shown itself by then."""
RETRY_SECONDS = 15.0
"""Between two tries after a site's limit refused a job."""
CANCEL_AGAIN_SECONDS = 30.0
HAND_OVER_SECONDS = 6.0
"""After a second signal a stage worker hands over what it holds at once."""
SUCCESSOR_AGAIN_SECONDS = 60.0
"""After a successor failed."""
SUBMITTED_AT_ONCE = 32
"""Jobs handed in in one turn; the others follow in the next ones."""
ENDS_AT_ONCE = 16
"""Jobs that vanished and are asked about in one turn."""


class Fleet:
    """The submissions of one home.

    Args:
        wake: called when something happened that a turn should look at.
        say: told what an operator of the bridge should know, once for each change.
    """

    def __init__(
        self,
        site: Site,
        commands: Commands,
        http: httpx.AsyncClient,
        worker_token: Callable[[Owner], str],
        wake: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._site = site
        self._commands = commands
        self._watches = Watches(site, http, self._health_changed)
        self._worker_token = worker_token
        self._wake = wake
        self._say = say
        self._records = Records(site.home / "submissions")
        self._all: list[Submission] = self._records.load()
        self._replaced = Replacements()
        self._away = ""
        self._limit = ""
        self._successor_after: dict[str, datetime] = {}
        self._avoided = Avoided()
        self._signature: frozenset[tuple[object, ...]] = frozenset()
        self._strangers: set[int] = set()
        self._handed_in = 0
        self.known = False
        """Slurm has been asked successfully since the start: nothing is handed in before."""
        self.changed = True
        """Something was done, or seen, that makes another look worth while soon."""

    # What is seen

    @property
    def away(self) -> str:
        """Why Slurm does not answer; empty: it does."""
        return self._away

    @property
    def ready(self) -> bool:
        """Whether plans may be made: what was found on disk has been looked at, or there was nothing."""
        return self.known or all(one.refused for one in self._all)

    @property
    def jobs(self) -> list[Submission]:
        """Every submission that has, or may have, a job that has not ended."""
        return [one for one in self._all if one.living]

    def owners(self) -> set[Owner]:
        """Whose workloads there are."""
        return {one.workload.owner for one in self._all}

    def _groups(self) -> dict[str, Group]:
        groups: dict[str, list[Submission]] = {}
        for one in self._all:
            groups.setdefault(one.workload.name, []).append(one)
        return {name: Group(members) for name, members in groups.items()}

    def _named(self) -> dict[str, Submission]:
        """Submissions by the names that reconcile knows them by."""
        named = {}
        for name, group in self._groups().items():
            front = group.front
            named[name] = front
            named |= {f"{name}-j{one.job}": one for one in group.predecessors if one is not front}
        return named

    def observed(self, owner: Owner) -> tuple[ObservedWorkload, ...]:
        """What is seen of an owner's workloads; a job whose successor serves goes by a name of its own."""
        return tuple(one.observed(name) for name, one in self._named().items() if one.workload.owner == owner)

    async def look(self, now: datetime) -> None:
        """Asks Slurm about everything. Where it does not answer, all stays as it was."""
        try:
            listed = await self._commands.queue()
            self._match(listed, now)
            await self._ends({job.id for job in listed}, now)
            await self._drop_strangers(listed)
        except SlurmAway as trouble:
            self._slurm_away(str(trouble))
            return
        except SlurmError as error:
            self._slurm_away(str(error))
            return
        if self._away:
            self._say(f"Slurm answers again (it did not: {self._away})")
        self._away = ""
        self.known = True
        signature = frozenset((job.id, job.state, job.reason) for job in listed)
        self.changed = self.changed or signature != self._signature
        self._signature = signature
        self._avoided.pass_time(now)
        self._read_troubles()
        self._settle()

    def _slurm_away(self, why: str) -> None:
        if why != self._away:
            self._say(f"Slurm does not answer, everything counts as last seen: {why}")
        self._away = why

    def _match(self, listed: list[QueuedJob], now: datetime) -> None:
        by_id = {job.id: job for job in listed}
        by_launch = {}
        for job in listed:
            who = job_identity.parse(job.comment)
            if who is not None and who.instance == self._site.instance:
                by_launch[who.launch] = job
        for one in list(self._all):
            if not one.living or one.refused:
                continue
            seen = by_launch.get(one.launch) if one.job is None else by_id.get(one.job)
            if seen is None:
                if one.job is None and (one.unsure_until is None or now >= one.unsure_until):
                    self._forget(one)  # sbatch did not hand it in
                continue
            before = one.seen
            one.seen = seen
            if one.job is None or before is None or before.state != seen.state:
                one.job, one.unsure_until = seen.id, None
                running = seen.state == "RUNNING"
                one.started_at = (one.started_at or now - timedelta(seconds=seen.used)) if running else None
                if not running and before is not None and before.state == "RUNNING":
                    self._watches.end(one)
                self._records.save(one)

    async def _ends(self, listed: set[int], now: datetime) -> None:
        """What became of jobs that squeue does not list any more."""
        gone = [one for one in self._all if one.living and one.job is not None and one.job not in listed]
        for one in gone[:ENDS_AT_ONCE]:
            assert one.job is not None
            known = await self._commands.details(one.job)
            if known is not None and known.live:
                continue  # requeued, or listed again in a moment
            wanted = self._site.profile.of(one.workload.kind)
            end = time_limits.FORGOTTEN if known is None else time_limits.ending(known, wanted)
            message = end.message
            if not message and end.code:
                message = telling_line(self._site.log(one.workload, one.job))
            if end.code == NODE_UNUSABLE and one.seen is not None:
                self._avoided.note(one.seen.nodes, now)
            self._end(one, time_limits.Ending(end.code, message, end.expected), now)

    def _end(self, one: Submission, end: time_limits.Ending, now: datetime) -> None:
        self._watches.end(one)
        self.changed = True
        front = self._groups()[one.workload.name].front
        one.ending, one.ended_at = end, now
        if one is not front or end.expected or one.stop_by is not None or one.retired:
            # A place that others have taken, or that the next plan gives anew at once.
            if one is not front and not end.expected and not one.retired:
                self._successor_after[one.workload.name] = now + timedelta(seconds=SUCCESSOR_AGAIN_SECONDS)
            self._forget(one)
        else:
            self._records.save(one)

    async def _drop_strangers(self, listed: list[QueuedJob]) -> None:
        """Cancels jobs of this home that no record knows: sbatch handed them in after all."""
        mine = {one.job for one in self._all if one.job is not None}
        strangers = []
        for job in listed:
            who = job_identity.parse(job.comment)
            if who is None or who.instance != self._site.instance or job.id in mine:
                continue
            if job.state != "COMPLETING" and job.id not in self._strangers:
                strangers.append(job.id)
        if strangers:
            self._say(f"cancelled Slurm jobs of this home that nothing wants: {strangers}")
            await self._commands.cancel(strangers)
            self._strangers.update(strangers)

    def _read_troubles(self) -> None:
        """What workers that run say of their nodes."""
        for one in self._all:
            if one.workload.kind == "stage-worker" and one.job is not None:
                file = self._site.trouble_file(one.workload, one.job)
                try:
                    one.trouble = file.read_text()[:500] if one.running else ""
                except FileNotFoundError:
                    one.trouble = ""

    def _settle(self) -> None:
        """Whose place a successor has taken; where backends answer."""
        for group in self._groups().values():
            front = group.front
            for one in group.predecessors:
                if front.serving and not one.retired:
                    one.retired = True
                    self._records.save(one)

    def find_endpoints(self) -> None:
        """Begins to watch backends that have said where they answer."""
        for one in self._all:
            if one.workload.kind == "backend" and one.living and not one.stopping:
                self.changed = self._watches.find(one) or self.changed

    def _health_changed(self, one: Submission) -> None:
        self._settle()
        self._records.save(one)
        self._wake()

    # What is done

    async def carry_out(self, owner: Owner, plan: Plan[Any]) -> None:
        """Starts and stops what the plan of one owner says; stopping goes on over the next turns."""
        for stop in plan.stop:
            self.stop(stop)
        now = datetime.now(UTC)
        for name, one in self._named().items():
            if one.workload.owner == owner:
                since = (one.draining_since or now) if name in plan.drain else None
                if since != one.draining_since:
                    one.draining_since = since
                    self._records.save(one)
        for launch in plan.launch:
            await self._launch(launch, now)

    async def _launch(self, launch: Launch, now: datetime) -> None:
        name = launch.workload.name
        for old in [one for one in self._all if one.workload.name == name]:
            if old.living and not old.retired:
                return  # it came to be since the plan was made
        if self._handed_in >= SUBMITTED_AT_ONCE:
            return  # the next plan says it again
        for old in [one for one in self._all if one.workload.name == name and not one.living]:
            self._forget(old)
        await self._submit(self._replaced.counted(launch), now)
        self._replaced.launched(name)

    async def _submit(self, launch: Launch, now: datetime) -> None:
        one = fresh(secrets.token_hex(6), launch.workload, launch.restarts, now, launch.last_end)
        self._all.append(one)
        await self._try(one, now)

    async def _try(self, one: Submission, now: datetime) -> None:
        """Hands a submission in, if Slurm answers and no limit of the site was met just now."""
        self.changed = True
        if self._away or self._limit or not self.known:
            one.refused = f"not submitted yet: {self._away or self._limit}"
            one.retry_at = now + timedelta(seconds=RETRY_SECONDS if self._limit else 0.0)
            return
        workload = one.workload
        self._handed_in += 1
        one.refused, one.retry_at, one.submitted_at = "", None, now
        one.unsure_until = now + timedelta(seconds=UNSURE_SECONDS)
        who = job_identity.identity(workload, self._site.instance, one.launch, one.restarts)
        try:
            if workload.kind == "stage-worker":
                write_private(self._site.token_file(workload), self._worker_token(workload.owner))
            # Before sbatch: whatever happens to this process, the job is found again.
            self._records.save(one)
            if workload.kind == "stage-worker":
                one.avoided = self._avoided.nodes
            script = batch_script(workload, self._site, who, one.avoided)
            one.job = await self._commands.submit(script)
        except SubmitRefused as refusal:
            self._records.forget(one)
            one.unsure_until = None
            if one.avoided and not refusal.limit:
                self._avoided.clear()
                one.refused, one.retry_at = f"{refusal.by}: {refusal}", now
                return
            one.refused = f"{refusal.by}: {refusal}"
            if refusal.limit:
                self._limit = one.refused
                one.retry_at = now + timedelta(seconds=RETRY_SECONDS)
            else:
                one.blocked = True
            return
        except SlurmAway as trouble:
            self._slurm_away(str(trouble))
            if not trouble.unsure:
                self._records.forget(one)
                one.unsure_until, one.refused, one.retry_at = None, f"not submitted yet: {trouble}", now
            return
        except SlurmError as error:
            self._records.forget(one)
            one.unsure_until, one.refused, one.blocked = None, str(error), True
            return
        except OSError as error:
            one.unsure_until, one.blocked = None, True
            one.refused = f"the home cannot be written: {error.filename}: {error.strerror}"
            return
        one.unsure_until = None
        self._records.save(one)

    def stop(self, stop: Stop) -> None:
        """Ends a workload within its grace, over the next turns; forgets one that has ended."""
        one = self._named().get(stop.name)
        if one is None:
            return
        self._replaced.note(stop)
        group = self._groups()[one.workload.name]
        # Whoever stops a workload stops those that were to follow it.
        ending = [one, *group.successors] if one is group.front else [one]
        now = datetime.now(UTC)
        for each in ending:
            if not each.living or each.refused:
                self._forget(each)
            elif each.stop_by is None:
                self._watches.pause(each)
                each.stop_by = now + timedelta(seconds=stop.grace_seconds)
                self._records.save(each)

    def _forget(self, one: Submission) -> None:
        self._watches.end(one)
        if one.job is not None:
            self._site.trouble_file(one.workload, one.job).unlink(missing_ok=True)
        if one in self._all:
            self._all.remove(one)
        self._records.forget(one)
        if all(other.workload.owner != one.workload.owner for other in self._all):
            self._site.token_file(one.workload).unlink(missing_ok=True)

    async def act(self, now: datetime) -> None:
        """What time calls for: tries again, successors, signals. Few commands, each for many jobs."""
        self._limit, self._handed_in = "", 0
        try:
            await self._end_stopping(now)
        except SlurmError as trouble:
            self._slurm_away(str(trouble))
        if self._away:
            return
        for one in list(self._all):
            if one.refused and not one.blocked and one.retry_at is not None and now >= one.retry_at:
                await self._try(one, now)
        for name, group in self._groups().items():
            if self._wants_successor(name, group, now):
                front = group.front
                self._say(f"{name}: the time limit of Slurm job {front.job} is near; its successor queues")
                await self._submit(Launch(front.workload, front.restarts, front.last_end), now)

    def _wants_successor(self, name: str, group: Group, now: datetime) -> bool:
        front = group.front
        if not front.running or front.stopping or group.successors or front.seen is None:
            return False
        after = self._successor_after.get(name)
        if after is not None and now < after:
            return False
        return time_limits.wants_successor(front.seen, self._site.profile.of(front.workload.kind))

    async def _end_stopping(self, now: datetime) -> None:
        drain, insist, cancel = [], [], []
        for one in self._all:
            if one.stop_by is None or not one.living or one.job is None:
                continue
            pending = one.seen is None or one.seen.state != "RUNNING"
            left = (one.stop_by - now).total_seconds()
            again = (
                one.cancelled_at is None or (now - one.cancelled_at).total_seconds() > CANCEL_AGAIN_SECONDS
            )
            if (pending and (one.seen is None or one.seen.state != "COMPLETING")) or left <= 0:
                if again:
                    cancel.append(one)
            elif not one.drained:
                drain.append(one)
            elif left <= HAND_OVER_SECONDS and not one.insisted and one.workload.kind == "stage-worker":
                insist.append(one)
        if cancel:
            await self._commands.cancel(jobs_of(cancel))
            for one in cancel:
                one.cancelled_at = now
        if drain:
            await self._commands.signal(jobs_of(drain), "USR1")
            for one in drain:
                one.drained = True
        if insist:
            await self._commands.signal(jobs_of(insist), "USR2")
            for one in insist:
                one.insisted = True
        self.changed = self.changed or bool(cancel or drain or insist)

    def logs(self) -> set[Path]:
        """The logs of jobs that have not ended."""
        return {self._site.log(one.workload, one.job) for one in self.jobs if one.job is not None}

    # The end

    def stop_kind(self, kind: str, grace_seconds: float, now: datetime) -> None:
        """Begins to end every workload of a kind."""
        for one in list(self._all):
            if one.workload.kind != kind:
                continue
            if not one.living or one.refused:
                self._forget(one)
                continue
            by = now + timedelta(seconds=grace_seconds)
            one.stop_by = by if one.stop_by is None else min(by, one.stop_by)
            self._records.save(one)

    def left(self, kind: str) -> list[Submission]:
        """Those of a kind that have not ended."""
        return [one for one in self._all if one.workload.kind == kind and one.living]

    async def close(self) -> None:
        """Ends the health checks; jobs go on."""
        await self._watches.close(self._all)


def jobs_of(submissions: Iterable[Submission]) -> list[int]:
    """The numbers of their Slurm jobs."""
    return [one.job for one in submissions if one.job is not None]
