"""Submissions: one sbatch job each, wanted by a workload, and kept in a file over restarts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollyard_drivers.health.backend import Health
from rollyard_drivers.host.home import read_json, write_json
from rollyard_drivers.host.processes import Identity
from rollyard_drivers.reconcile.plan import ObservedWorkload, Owner, Workload

from rollyard_slurm.readers import reasons
from rollyard_slurm.readers.command_output import QueuedJob
from rollyard_slurm.scheduling.time_limits import Ending

PENDING_STATES = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
SUSPENDED_STATES = frozenset({"SUSPENDED", "STOPPED"})


@dataclass(slots=True)
class Submission:
    """One try to have a workload run by Slurm."""

    launch: str
    """Its own for good: in the job's comment, and in the names of its files."""
    workload: Workload
    restarts: int
    submitted_at: datetime
    last_end: str = ""
    """How the one before ended, as the launch said."""
    avoided: tuple[str, ...] = ()
    """Nodes that it asked Slurm to leave out, because workers could not use them."""
    job: int | None = None
    """None: refused, or sbatch has not said."""
    allocated: bool = False
    """A step of an allocation, and no batch job."""
    launcher: Identity | None = None
    """Of an allocation: the salloc that will release it, as far as it is known."""
    unsure_until: datetime | None = None
    """sbatch did not answer: if no job of this launch is seen by then, there is none."""
    refused: str = ""
    """Why there is no job."""
    blocked: bool = False
    """Refused, and not for a limit or an outage: somebody has to change something."""
    retry_at: datetime | None = None
    seen: QueuedJob | None = None
    """As squeue listed it last."""
    started_at: datetime | None = None
    """Since when it runs."""
    ending: Ending | None = None
    ended_at: datetime | None = None
    stop_by: datetime | None = None
    """It is being stopped: then at the latest it is cancelled."""
    drained: bool = False
    insisted: bool = False
    cancelled_at: datetime | None = None
    draining_since: datetime | None = None
    retired: bool = False
    """A successor has taken its place."""
    health: Health = field(default_factory=Health)
    url: str = ""
    """Backends: where the probe looks."""
    probe: asyncio.Task[None] | None = None
    trouble: str = ""
    """Workers: why it runs and takes no Init work, in its own words."""

    @property
    def living(self) -> bool:
        """It has a job that has not ended, or may have one, or is tried again."""
        return self.ending is None and not self.blocked

    @property
    def stopping(self) -> bool:
        return self.stop_by is not None and self.ending is None

    @property
    def running(self) -> bool:
        return self.ending is None and self.seen is not None and self.seen.state == "RUNNING"

    @property
    def serving(self) -> bool:
        """Running, and of use: its predecessor may go."""
        return self.running and (self.workload.kind == "stage-worker" or self.health.ready)

    def observed(self, name: str) -> ObservedWorkload:
        """As reconcile sees it."""
        ending, seen, health = self.ending, self.seen, self.health
        backend = self.workload.kind == "backend"
        state, message, pending, blocked = self._state()
        return ObservedWorkload(
            name=name,
            spec_hash=self.workload.spec_hash,
            state=state,
            started_at=self.started_at or self.submitted_at,
            restarts=self.restarts,
            last_end=self.last_end,
            exit_code=None if ending is None else ending.code,
            exited_at=self.ended_at if ending is not None else self.submitted_at,
            ready=health.ready if backend else True,
            unready_since=health.unready_since,
            url=self.url if seen is not None and seen.state == "RUNNING" else "",
            policy_version=health.policy_version,
            message=message,
            trouble=self.trouble if state == "running" else "",
            blocked=blocked,
            pending=pending,
            draining_since=self.draining_since,
        )

    def _state(self) -> tuple[Any, str, bool, bool]:
        """State, message, pending, blocked."""
        seen = self.seen
        if self.ending is not None:
            return "exited", self.ending.message, False, False
        if self.blocked:
            return "exited", self.refused, False, True
        if self.stop_by is not None:
            return "stopping", "", False, False
        if self.refused:
            return "starting", self.refused, True, False
        if self.job is None:
            return "starting", "sbatch did not answer; whether it took the job will be seen", True, False
        if seen is None:
            return "starting", f"Slurm job {self.job} was submitted", True, False
        if seen.state in PENDING_STATES:
            return "starting", reasons.waits(seen), True, reasons.is_blocked(seen)
        if seen.state in SUSPENDED_STATES:
            return "starting", f"Slurm has suspended job {self.job}", True, False
        if seen.state == "COMPLETING":
            return "stopping", "", False, False
        if self.workload.kind == "backend":
            return ("running" if self.health.warmed_up else "starting"), self.health.message, False, False
        return "running", "", False, False


def fresh(launch: str, workload: Workload, restarts: int, now: datetime, last_end: str = "") -> Submission:
    """A submission that is about to be made."""
    return Submission(
        launch=launch, workload=workload, restarts=restarts, submitted_at=now, last_end=last_end
    )


class Records:
    """The submissions of a home on disk: one file each, written before sbatch is run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[Submission]:
        """Those of the last run, oldest first. A file that cannot be read is put aside."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in sorted(self._folder.glob("*.json")):
            document = read_json(path)
            try:
                found.append(_from_json(document or {}))
            except (KeyError, TypeError, ValueError):
                path.rename(path.with_suffix(".unreadable"))
        return sorted(found, key=lambda one: one.submitted_at)

    def save(self, one: Submission) -> None:
        """Writes it whole or not at all.

        Raises:
            OSError: the home cannot be written.
        """
        write_json(self._folder / f"{one.launch}.json", _to_json(one))

    def forget(self, one: Submission) -> None:
        """Nothing is left of it."""
        (self._folder / f"{one.launch}.json").unlink(missing_ok=True)


def _time(value: datetime | None) -> str | None:
    return None if value is None else value.isoformat()


def _when(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text).astimezone(UTC)


def _to_json(one: Submission) -> dict[str, Any]:
    workload, owner, ending = one.workload, one.workload.owner, one.ending
    return {
        "launch": one.launch,
        "job": one.job,
        "allocated": one.allocated,
        "launcher": None if one.launcher is None else one.launcher.to_json(),
        "restarts": one.restarts,
        "lastEnd": one.last_end,
        "submittedAt": _time(one.submitted_at),
        "unsureUntil": _time(one.unsure_until),
        "startedAt": _time(one.started_at),
        "stopBy": _time(one.stop_by),
        "drainingSince": _time(one.draining_since),
        "retired": one.retired,
        "url": one.url if one.health.warmed_up else "",
        "ending": None
        if ending is None
        else {"code": ending.code, "message": ending.message, "at": _time(one.ended_at)},
        "workload": {
            "name": workload.name,
            "kind": workload.kind,
            "owner": [owner.kind, owner.namespace, owner.name, owner.uid],
            "index": workload.index,
            "stages": workload.stages,
            "concurrency": workload.concurrency,
            "engine": workload.engine,
            "model": workload.model,
            "command": workload.command,
            "args": workload.args,
            "env": workload.env,
            "gpus": workload.gpus,
            "madeOf": workload.made_of,
        },
    }


def _from_json(document: dict[str, Any]) -> Submission:
    stored = document["workload"]
    workload = Workload(
        name=stored["name"],
        kind=stored["kind"],
        owner=Owner(*stored["owner"]),
        index=stored["index"],
        stages=tuple(stored["stages"]),
        concurrency=tuple((stage, number) for stage, number in stored["concurrency"]),
        engine=stored["engine"],
        model=stored["model"],
        command=tuple(stored["command"]),
        args=tuple(stored["args"]),
        env=tuple((name, value) for name, value in stored["env"]),
        gpus=stored["gpus"],
        made_of=stored["madeOf"],
    )
    submitted = _when(document["submittedAt"])
    if submitted is None:
        raise ValueError("submittedAt")
    one = fresh(document["launch"], workload, document["restarts"], submitted)
    one.last_end = str(document.get("lastEnd", ""))  # an earlier version wrote none
    one.job = document["job"]
    one.allocated = bool(document.get("allocated"))
    one.launcher = Identity.from_json(document.get("launcher") or {})
    one.unsure_until = _when(document["unsureUntil"])
    one.started_at = _when(document["startedAt"])
    one.stop_by = _when(document["stopBy"])
    one.draining_since = _when(document["drainingSince"])
    one.retired = document["retired"]
    one.url = document["url"]
    if one.url:
        # It served when the bridge ended: it counts as serving until its checks say otherwise.
        one.health = Health(url=one.url, ready=True, warmed_up=True, message="")
    ending = document["ending"]
    if ending is not None:
        one.ending = Ending(ending["code"], ending["message"], False)
        one.ended_at = _when(ending["at"])
    return one


class Group:
    """The submissions of one workload, oldest first: at most one of them goes by the workload's name."""

    def __init__(self, members: list[Submission]) -> None:
        self.members = members

    @property
    def front(self) -> Submission:
        """The newest that serves; without one, the oldest that will; else what is ending, or has ended."""
        staying = [one for one in self.members if one.living and not one.stopping and not one.retired]
        serving = [one for one in staying if one.serving]
        if serving:
            return serving[-1]
        # One that runs (a backend that is not healthy just now) before one that only waits.
        running = [one for one in staying if one.running]
        if running or staying:
            return (running or staying)[0]
        own = [one for one in self.members if not one.retired] or self.members
        living = [one for one in own if one.living]
        return (living or own)[-1]

    @property
    def successors(self) -> list[Submission]:
        """Living ones that were submitted after the front."""
        place = self.members.index(self.front)
        return [one for one in self.members[place + 1 :] if one.living]

    @property
    def predecessors(self) -> list[Submission]:
        """Living ones whose place the front has taken."""
        place = self.members.index(self.front)
        return [one for one in self.members[:place] if one.living]
