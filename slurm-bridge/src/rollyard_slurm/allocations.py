"""Allocations that Slurm grants at once, each with one job step: a worker's quick start where nodes are free.

`salloc --immediate OPTIONS srun --overlap step.sh` runs on this host in a session of its own, so that the
end of the bridge does not touch it. salloc itself begins the step, and releases the allocation with the
step's exit status once it has ended: to squeue and scontrol it is a job like any other. Should salloc and
srun be killed, the step goes on, and at its end lowers the allocation's time limit to what has passed.

A signal to a step reaches every process in it, sandboxes too. So it is told by signals that are
ignored by whoever does not expect them; `step.sh` tells the script alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rollyard_drivers.host.log_file import telling_line
from rollyard_drivers.host.processes import Identity, identify, is_alive, send

from rollyard_slurm.calls.command_line import CommandLine
from rollyard_slurm.errors import SlurmAway
from rollyard_slurm.readers import reasons
from rollyard_slurm.readers.command_output import JobDetails, QueuedJob

MOST = 64
"""At once: each has a salloc and two processes of srun on this host."""
SIGNALS = {"USR1": "URG", "USR2": "28"}
"""What a step is sent so that its script gets the signal; scancel knows SIGWINCH by its number alone."""
POLL_SECONDS = 0.005
KILL_SECONDS = 1.0
_GRANTED = re.compile(r"Granted job allocation (\d+)")
_BUSY = re.compile(r"unable to allocate resources|immediate execution|busy", re.IGNORECASE)
_STEP = re.compile(r"^(\d+)\.\d+$", re.MULTILINE)
_NOT_SALLOCS = (
    "output",
    "error",
    "open-mode",
    "requeue",
    "no-requeue",
    "export",
    "export-file",
    "ignore-pbs",
)

STEP = """\
#!/bin/bash
# The step of an allocation: what a batch job's own shell would do. step.sh SCRIPT LOG
exec >>"$2-$SLURM_JOB_ID.log" 2>&1 </dev/null
child=
tell() { [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null; }
trap 'tell USR1' URG
trap 'tell USR2' WINCH
trap : TERM
bash "$1" &
child=$!
code=0
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
wait "$child" 2>/dev/null; last=$?
[ "$last" -eq 127 ] || code=$last
# salloc releases the allocation. Where it was killed, Slurm does, and nothing idles until the time limit.
timeout 10 scontrol update "JobId=$SLURM_JOB_ID" "TimeLimit=$((SECONDS / 60 + 2))" </dev/null
exit "$code"
"""


@dataclass(frozen=True, slots=True)
class Granted:
    """An allocation whose step begins."""

    job: int
    launcher: Identity | None
    """salloc; None: it has ended already."""


class Allocations(Protocol):
    """What the bridge wants of Slurm beside batch jobs. Each call may raise SlurmAway."""

    async def allocate(self, launch: str, script: str, log: str) -> Granted | None:
        """Runs a batch script as the step of an allocation; None: Slurm grants none at once.

        Args:
            script: as sbatch takes it.
            log: the path of the output's file, without `-JOB.log`.
        """
        ...

    async def steps(self, jobs: Sequence[int]) -> set[int]:
        """Which of these jobs have a step."""
        ...

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        """USR1 or USR2 to the scripts alone; nothing where a job has ended."""
        ...

    def words(self, launch: str) -> str:
        """What salloc and srun complained of."""
        ...

    def forget(self, launch: str) -> None:
        """Nothing is left of it."""
        ...


def options(script: str) -> list[str]:
    """What salloc is asked for: the `#SBATCH` lines of a script, as far as salloc knows them. Pure.

    As sbatch does, it reads no further than to the first line that is no comment: a later line that looks
    like an option may be a part of somebody's value.

    Raises:
        ValueError: a line has a quote too many.
    """
    found = []
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("#SBATCH "):
            continue
        for word in shlex.split(line.removeprefix("#SBATCH ")):
            name, _, value = word.removeprefix("--").partition("=")
            if name == "signal":
                seconds = value.rpartition("@")[2]
                found.append(f"--signal={SIGNALS['USR1']}@{seconds}")
            elif name not in _NOT_SALLOCS:
                found.append(word)
    return found


def as_granted(seen: QueuedJob, before: QueuedJob | None) -> QueuedJob:
    """A job with the time limit that it was granted with: that a step ends lowers it. Pure."""
    if before is None or before.limit is None or seen.limit is None or seen.limit >= before.limit:
        return seen
    return replace(seen, limit=before.limit, left=max(0.0, before.limit - seen.used))


def details_as_granted(known: JobDetails, seen: QueuedJob | None, words: str) -> JobDetails:
    """An ended job with the time limit that it was granted with, and its end as a batch job's would be. Pure.

    Args:
        words: what srun complained of.
    """
    if known.state == "FAILED" and "out of memory" in words.lower():
        known = replace(known, state="OUT_OF_MEMORY")
    return known if seen is None or seen.limit is None else replace(known, limit=seen.limit)


class Salloc(CommandLine):
    """salloc and srun.

    Args:
        commands: whose time limit, environment and load it shares.
        folder: for scripts and what salloc says, on storage that the nodes share.
        say: told once of each refusal that is not for want of free nodes.
    """

    def __init__(self, commands: CommandLine, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(commands._timeout, commands._env, commands._programs)
        self.load = commands.load
        self._folder = folder
        self._say = say
        self._said: set[str] = set()

    async def allocate(self, launch: str, script: str, log: str) -> Granted | None:
        body, told = self._folder / f"{launch}.sh", self._folder / f"{launch}.out"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            asked = options(script)
        except ValueError:
            return None  # sbatch tells what is wrong
        _write(self._folder / "step.sh", STEP)
        _write(body, script)
        command = [
            *(self._program("salloc"), "--immediate", *asked),
            *(self._program("srun"), "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none"),
            *("--input=none", "bash", str(self._folder / "step.sh"), str(body), log),
        ]
        process = await self._detached(command, told)
        words = await self._answer(process, told)
        granted = _GRANTED.search(words)
        if granted is not None:
            return Granted(int(granted[1]), process)
        self.forget(launch)
        words = reasons.shorter(words)
        if reasons.is_away(words):
            raise SlurmAway(f"salloc: {words}", reasons.is_unsure(words))
        if not _BUSY.search(words) and len(self._said) < MOST and words not in self._said:
            self._said.add(words)
            self._say(f"salloc: {words}: sbatch is used instead")
        return None

    async def _detached(self, command: Sequence[str], told: Path) -> Identity | None:
        """Starts a command that is nobody's child; None: it has ended already."""
        self.load.runs["salloc"] = self.load.runs.get("salloc", 0) + 1
        try:
            shell = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", 'out=$1; shift; "$@" </dev/null >"$out" 2>&1 & echo $!', "sh", str(told)),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env=self._env,
                start_new_session=True,
            )
        except OSError as error:
            raise SlurmAway(f"salloc cannot be started: {error.strerror}") from error
        out, _ = await shell.communicate()
        return identify(int(out)) if out.strip().isdigit() else None

    async def _answer(self, process: Identity | None, told: Path) -> str:
        """What salloc has said once it was granted something, or has ended."""
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    ended = process is None or not is_alive(process)
                    words = told.read_text(errors="replace") if told.exists() else ""
                    if ended or _GRANTED.search(words):
                        return words
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise SlurmAway(f"salloc did not answer within {self._timeout:g} s", unsure=True) from None
        finally:
            if process is not None and not _GRANTED.search(_read(told)):
                await _end(process)

    async def steps(self, jobs: Sequence[int]) -> set[int]:
        wanted = ",".join(map(str, jobs))
        code, out, err = await self._run("squeue", "--noheader", "--steps", f"--jobs={wanted}", "-o", "%i")
        if code != 0 and reasons.is_away(err):
            raise SlurmAway(f"squeue: {reasons.shorter(err)}")
        return {int(job) for job in _STEP.findall(out)}

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        await self._tell(f"--signal={SIGNALS[name]}", *map(str, jobs))

    def words(self, launch: str) -> str:
        return telling_line(self._folder / f"{launch}.out")

    def forget(self, launch: str) -> None:
        for path in (self._folder / f"{launch}.sh", self._folder / f"{launch}.out"):
            path.unlink(missing_ok=True)


async def _end(process: Identity) -> None:
    """TERM, by which salloc gives back what it asked for; then KILL."""
    send(process, signal.SIGTERM)
    for _ in range(round(KILL_SECONDS / POLL_SECONDS)):
        if not is_alive(process):
            return
        await asyncio.sleep(POLL_SECONDS)
    send(process, signal.SIGKILL)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    """Writes a script for the user alone, whole or not at all; nothing if it stands there."""
    if _read(path) == text:
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    scratch.replace(path)
