"""Slurm by slurmrestd: the same calls as by Slurm's commands, where a site has it.

A slurmrestd of Slurm 22.05 cannot signal a batch script alone: its `DELETE /job/N?signal=` reaches every
process of the job, sandboxes too. So a script that is submitted to one looks every two seconds into a
file of its own on the shared home, into which the bridge writes the signals' names, and itself looks for
the end of its time, of which such a slurmrestd cannot be asked to warn the script.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollyard_slurm.addresses import is_loopback, toward
from rollyard_slurm.calls.call_counts import Load
from rollyard_slurm.calls.command_line import CommandLine, Commands
from rollyard_slurm.calls.slurmrestd import Answer, Server
from rollyard_slurm.errors import SlurmAway, SlurmError, SubmitRefused
from rollyard_slurm.profile import SIGNAL_SECONDS, RestProfile
from rollyard_slurm.readers import command_output, job_json, reasons
from rollyard_slurm.scripts import job_fields
from rollyard_slurm.scripts.batch import Batch
from rollyard_slurm.scripts.shell import Assign, Code, render
from rollyard_slurm.submissions.submission import PENDING_STATES

AT_ONCE = 8
"""Jobs that are signalled or cancelled by one call each."""
UNKNOWN_JOB = 2017
FOLDER = "signals"
"""In the home: a file for each job that looks into one."""


def slurm(
    rest: RestProfile | None, timeout: float, env: Mapping[str, str], home: Path, keeps: bool = True
) -> Commands:
    """Slurm as a profile wants it asked: by slurmrestd, else by its commands."""
    return CommandLine(timeout, env) if rest is None else RestCalls(rest, timeout, env, home, keeps)


class RestCalls:
    """submit, queue, details, signal and cancel by slurmrestd, each with a time limit.

    Args:
        timeout: seconds for one call.
        env: environment of the jobs.
        home: on storage that the nodes share.
        keeps: the files of jobs that look into one; not for who only looks.
    """

    def __init__(
        self, wanted: RestProfile, timeout: float, env: Mapping[str, str], home: Path, keeps: bool = True
    ) -> None:
        self._keeps = keeps
        self.load = Load()
        self.server = Server(wanted, timeout, self.load)
        kept = {name: value for name, value in env.items() if name != "SLURM_JWT"}
        self._env = {**kept, "SLURM_SUBMIT_DIR": str(home), "SLURM_SUBMIT_HOST": socket.gethostname()}
        # Else what a job prints is for everybody to read.
        self._env["SLURM_UMASK"] = "0077"
        self._folder = home / FOLDER
        self._told_left: set[int] = set()

    async def fields(self, batch: Batch) -> dict[str, Any]:
        """What a script is submitted with; its `#SBATCH` lines are there for people alone.

        Raises:
            SlurmAway: slurmrestd does not answer.
        """
        options = [*batch.options, *job_fields.further(batch.further)]
        api = await self.server.api()
        between = () if api.signals_batch else self._watch(dict(options))
        job = job_fields.fields(options, self._env, api.version)
        return {"script": batch.text(between), "job": job}

    async def submit(self, script: Batch) -> int:
        try:
            body = await self.fields(script)
        except ValueError as error:
            raise SubmitRefused(str(error), False, by="slurmrestd") from error
        self._folder.mkdir(mode=0o700, exist_ok=True)
        answer = await self.server.ask("POST", "/job/submit", "submit", body=body)
        job = job_json.submitted(answer.document)
        if job is not None:
            return job  # with a complaint beside it, it waits for its reason
        words = answer.words or f"HTTP status {answer.status}"
        raise SubmitRefused(words, reasons.is_limit(words), by="slurmrestd")

    async def queue(self) -> list[command_output.QueuedJob]:
        now = await self._now()
        document = _good(await self.server.ask("GET", "/jobs", "jobs"), "jobs")
        try:
            # Everybody's jobs: on a large cluster that takes its time.
            listed = await asyncio.to_thread(job_json.queue, document, os.getuid(), now)
        except command_output.Unreadable as error:
            raise SlurmAway(str(error)) from error
        if self._keeps:
            # A home that is full, or away, is no reason not to see the jobs.
            with contextlib.suppress(OSError):
                self._keep_files(listed)
        return listed

    async def details(self, job: int) -> command_output.JobDetails | None:
        now = await self._now()
        answer = await self.server.ask("GET", f"/job/{job}", "job")
        if UNKNOWN_JOB in answer.numbers:
            return None
        try:
            return job_json.details(_good(answer, "job"), job, now)
        except command_output.Unreadable as error:
            raise SlurmAway(str(error)) from error

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        if (await self.server.api()).signals_batch:
            await self._delete(jobs, {"signal": name, "flags": "BATCH_JOB"})
            return
        for job in jobs:
            self._tell(job, name)

    async def cancel(self, jobs: Sequence[int]) -> None:
        await self._delete(jobs, {})

    async def address(self) -> str:
        """The address of this host by which the nodes reach it.

        Raises:
            SlurmError: slurmrestd does not answer, or no address is found.
        """
        nodes = job_json.addresses(_good(await self.server.ask("GET", "/nodes", "nodes"), "nodes"))
        found = toward(nodes[:1])
        if not found or (is_loopback(found) and not all(is_loopback(node) for node in nodes)):
            found = toward([node for node in nodes if not is_loopback(node)][:1]) or found
        if not found:
            raise SlurmError(
                "the address by which the nodes reach this host cannot be told; give it with --listen ADDRESS"
            )
        return found

    async def _now(self) -> float:
        return (await self.server.api()).now()

    async def _delete(self, jobs: Sequence[int], query: Mapping[str, str]) -> None:
        name = "signal" if query else "cancel"
        places = asyncio.Semaphore(AT_ONCE)

        async def one(job: int) -> None:
            # One that has ended is no trouble, as with scancel.
            async with places:
                await self.server.ask("DELETE", f"/job/{job}", name, query)

        ended = await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True)
        for trouble in ended:
            if isinstance(trouble, BaseException):
                raise trouble

    # What a slurmrestd that cannot signal a batch script makes necessary

    def _watch(self, options: Mapping[str, str | None]) -> tuple[str, ...]:
        """Lines by which a script hears of signals, and of the end of its time."""
        early = (options.get("signal") or "").rpartition("@")[2] or str(SIGNAL_SECONDS)
        limit = command_output.seconds(options.get("time") or "")
        end = "" if limit is None else str(max(1, int(limit) - int(early)))
        return (
            "# slurmrestd cannot signal this script alone: what it should hear stands in a file.",
            *render([Assign("told", (str(self._folder), Code('/"$SLURM_JOB_ID"')))]),
            ': >"$told"',
            "(",
            f"  exec 9>&-; heard=0 end={end}",
            '  while sleep 2 && kill -0 "$$" 2>/dev/null; do',
            '    mapfile -t lines 2>/dev/null <"$told" || lines=()',
            '    while [ "$heard" -lt "${#lines[@]}" ]; do',
            "      set -- ${lines[heard]}; heard=$((heard + 1))",
            '      case "$1" in',
            '        USR1|USR2) kill -s "$1" "$$" ;;',
            f"        left) end=$((SECONDS + ${{2:-0}} - {early})) ;;",
            "      esac",
            "    done",
            '    [ -z "$end" ] || [ "$SECONDS" -lt "$end" ] || { kill -s USR1 "$$"; end=; }',
            "  done",
            ") 2>/dev/null &",
        )

    def _tell(self, job: int, words: str) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # Written in place: on NFS another file of that name may be seen only much later.
        with (self._folder / str(job)).open("a") as file:
            file.write(words + "\n")

    def _keep_files(self, listed: Sequence[command_output.QueuedJob]) -> None:
        """Tells running jobs what is left of their time, once; removes what jobs that ended have left."""
        there = {int(path.name) for path in self._folder.iterdir() if path.name.isdigit()}
        for job in listed:
            if job.id not in there:
                self._told_left.discard(job.id)
            elif job.state in PENDING_STATES:
                # Slurm starts it anew: its script, and nobody before it, makes another file.
                (self._folder / str(job.id)).unlink(missing_ok=True)
                self._told_left.discard(job.id)
            elif job.state == "RUNNING" and job.left is not None and job.id not in self._told_left:
                self._tell(job.id, f"left {job.left:.0f}")
                self._told_left.add(job.id)
        known = {job.id for job in listed}
        self._told_left &= known
        for gone in there - known:
            (self._folder / str(gone)).unlink(missing_ok=True)


def _good(answer: Answer, name: str) -> Any:
    if answer.status != 200 or any(answer.numbers):
        raise SlurmAway(f"slurmrestd ({name}): {answer.words or f'HTTP status {answer.status}'}")
    return answer.document
