"""The quickstart while its processes are killed one after the other, beside a run that nothing disturbs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
from rollyard_testing.faults.ledger import Ledger
from rollyard_testing.faults.listing import Process
from rollyard_testing.faults.yard import Yard, a_yard

from rollyard_bench.first_token import quickstart, wait_for_backend
from rollyard_bench.processes import ProgramFailed, needed
from rollyard_bench.results import Baseline, Measurement, Settings

VICTIMS: Final = ("control-plane", "worker", "backend", "bwrap", "exec server")
"""The processes that are killed. The supervisor is never among them."""
SEED: Final = 20
LEASE_SECONDS: Final = "15"
"""As `rollyard up` sets it by default."""
END_SECONDS: Final = 480.0
LOOK_SECONDS: Final = 0.5
FIND_SECONDS: Final = 1.0
"""How long a kill waits for a process of its kind."""


@dataclass(slots=True)
class Outcome:
    """One run from the submission until the job is finished."""

    seconds: float
    rollouts: int
    succeeded: int
    kills: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    """Kills for which no process of the kind was there in time."""

    @property
    def throughput(self) -> float:
        """Rollouts with a reward, per second."""
        return self.succeeded / self.seconds

    def text(self) -> str:
        """Return the run in words."""
        killed = ", ".join(f"{self.kills[kind]} {kind}" for kind in VICTIMS)
        kills = (
            f"; {self.kills.total()} kills ({killed}), {self.missed} found no victim" if self.kills else ""
        )
        failed = self.rollouts - self.succeeded
        return f"{self.rollouts} rollouts in {self.seconds:.1f} s, {failed} without a reward{kills}"


def _program(process: Process) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


def _victims(yard: Yard, kind: str) -> list[Process]:
    """Return the processes of a kind that work for the job. A sandbox in the warm pool does not count."""
    there = yard.processes()
    if kind in ("control-plane", "worker", "backend"):
        return [one for one in there if one.kind == kind]
    used = set(yard.in_use())
    inside = [one for one in there if one.kind == "sandbox" and one.sandbox in used]
    if kind == "bwrap":
        # Process 1 of a sandbox that was forked from a template ends it as its bwrap would.
        return [one for one in inside if _program(one) in ("bwrap", "init")]
    return [one for one in inside if _program(one).startswith(("python", "loader"))]


def _kill(yard: Yard, kind: str, rng: random.Random) -> bool:
    """kill -9 of one process of the kind, as soon as there is one; whether one was found in time."""
    deadline = time.monotonic() + FIND_SECONDS
    while time.monotonic() < deadline:
        there = sorted(_victims(yard, kind), key=lambda one: one.pid)
        if there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(there).pid, signal.SIGKILL)
                return True
        time.sleep(0.05)
    return False


class Follower:
    """A trainer that reads results as they come, through every restart of the control plane."""

    def __init__(self, yard: Yard, name: str) -> None:
        self._yard = yard
        self._name = name
        self.ledger = Ledger()

    def look(self) -> bool:
        """Read what is new; whether the control plane says that the job is finished."""
        with contextlib.suppress(OSError, KeyError, ValueError, httpx.HTTPError), self._yard.http() as http:
            self.ledger.read(http, self._name)
            answer = http.get(f"/v1/rolloutjobs/{self._name}").raise_for_status()
            conditions = answer.json()["status"].get("conditions", [])
            return any(one["type"] == "Finished" and one["status"] == "True" for one in conditions)
        return False

    def judge(self, expected: set[tuple[str, int]]) -> None:
        """Raise ProgramFailed if a result was lost, doubled or changed."""
        whole = Ledger()
        with self._yard.http() as http:
            self.ledger.read(http, self._name)
            whole.read(http, self._name)
        problems = [*self.ledger.judge(expected), *whole.judge(expected)]
        if self.ledger.seen != whole.seen:
            problems.append("a second reader saw other results")
        if problems:
            raise ProgramFailed(f"{len(problems)} problems: {'; '.join(problems[:5])}"[:900])


def _play(samples: int, every: float) -> Outcome:
    """Run the job, with a kill every so many seconds; none for `math.inf`.

    Raises:
        ProgramFailed: The job did not finish in time, or a result was lost or doubled.
    """
    job = quickstart(samples)
    tasks = job["spec"]["tasks"]["inline"]
    expected = {(task["id"], sample) for task in tasks for sample in range(samples)}
    rng = random.Random(SEED)
    with a_yard("--lease-seconds", LEASE_SECONDS) as yard:
        yard.start()
        follower = Follower(yard, job["metadata"]["name"])
        with yard.http() as http:
            # The quiet run and the others begin on the same yard.
            wait_for_backend(http)
            begin = time.monotonic()
            http.post("/v1/rolloutjobs", json=job).raise_for_status()
        outcome = Outcome(0.0, len(expected), 0)
        due = begin + every
        while not follower.look():
            if time.monotonic() > begin + END_SECONDS:
                raise ProgramFailed(
                    f"{len(follower.ledger.seen)} of {len(expected)} rollouts ended in {END_SECONDS:.0f} s"
                )
            time.sleep(min(LOOK_SECONDS, max(0.0, due - time.monotonic())))
            if time.monotonic() >= due:
                due += every
                kind = rng.choice(VICTIMS)
                if _kill(yard, kind, rng):
                    outcome.kills[kind] += 1
                else:
                    outcome.missed += 1
        outcome.seconds = time.monotonic() - begin
        follower.judge(expected)
        outcome.succeeded = sum(one["status"] == "succeeded" for one in follower.ledger.seen.values())
        yard.stop()
    return outcome


async def measure(settings: Settings) -> list[Measurement]:
    """Measure a quiet run, then one with a kill every four seconds and one with a kill every two."""
    needed("bwrap", "bubblewrap")
    samples = 3 if settings.quick else 8
    quiet = await asyncio.to_thread(_play, samples, math.inf)
    measured = []
    for figure, every in (("fire_every_4_s", 4.0), ("fire_every_2_s", 2.0)):
        burning = await asyncio.to_thread(_play, samples, every)
        how = (
            f"the quickstart, a kill -9 every {every:g} s, victims drawn evenly among {', '.join(VICTIMS)} "
            f"with seed {SEED}; every rollout was delivered exactly once; {burning.text()}; quiet: "
            f"{quiet.text()}"
        )
        baseline = Baseline("the same run without kills", quiet.throughput)
        measured.append(Measurement(figure, burning.throughput, baseline, how))
    return measured
