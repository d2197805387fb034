"""Calls to Slurm through slurmrestd, for sites that have it.

A slurmrestd of Slurm 22.05 cannot signal a batch script alone: its `DELETE /job/N?signal=` reaches every
process of the job, including sandboxes. Therefore each script has a file of its own on the shared home. The
bridge writes the names of signals into this file, and the script reads it every two seconds. The script also
watches for the end of its time by itself, because such a slurmrestd cannot be asked to warn it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollyard_slurm.addresses import is_loopback, required, toward
from rollyard_slurm.calls.command_line import SlurmCommands, environment
from rollyard_slurm.calls.protocol import CallCounts
from rollyard_slurm.calls.slurmrestd import RestAnswer, SlurmrestdClient
from rollyard_slurm.errors import SlurmUnavailable, SubmitRefused
from rollyard_slurm.profile import SIGNAL_SECONDS, RestProfile
from rollyard_slurm.readers import command_output, job_json, reasons
from rollyard_slurm.readers.jobs import PENDING_STATES, JobDetails, QueuedJob
from rollyard_slurm.scripts import job_fields
from rollyard_slurm.scripts.batch import BatchScript
from rollyard_slurm.scripts.shell import Assign, Code, render

AT_ONCE: Final = 8
"""The number of calls that are made at the same time, where each call signals or cancels one job."""
UNKNOWN_JOB: Final = 2017
"""The error number that Slurm gives for a job that it does not know."""
FOLDER: Final = "signals"
"""The name of the folder in the home that holds the files from which jobs read their signals."""
_NODE: Final = re.compile(r"[\w.-]+")


def slurm_calls(
    rest: RestProfile | None, timeout: float, home: Path, pass_env: Iterable[str] = (), keeps: bool = True
) -> SlurmCommands | RestCalls:
    """Return calls to Slurm that use slurmrestd if the profile names one, and Slurm's commands otherwise.

    Args:
        rest: The part of the profile that names a slurmrestd.
        timeout: The time limit of one call or command, in seconds.
        home: The home, on storage that the nodes share.
        pass_env: The names of variables that commands and jobs inherit in addition to the usual ones.
        keeps: Whether to maintain the files from which jobs read their signals.
    """
    env = environment(os.environ, pass_env)
    return SlurmCommands(timeout, env) if rest is None else RestCalls(rest, timeout, env, home, keeps)


class RestCalls:
    """Calls Slurm through slurmrestd. Each call has a time limit.

    Args:
        profile: The address and the credentials of slurmrestd.
        timeout: The time limit of one call, in seconds.
        env: The environment of the jobs.
        home: The home, on storage that the nodes share.
        keeps: Whether to maintain the files that jobs read. A program that only shows the queue does not.
    """

    def __init__(
        self, profile: RestProfile, timeout: float, env: Mapping[str, str], home: Path, keeps: bool = True
    ) -> None:
        self._keeps = keeps
        self.counts = CallCounts()
        self.server = SlurmrestdClient(profile, timeout, self.counts)
        passed = {name: value for name, value in env.items() if name != "SLURM_JWT"}
        self._env = {**passed, "SLURM_SUBMIT_DIR": str(home), "SLURM_SUBMIT_HOST": socket.gethostname()}
        # Without this umask, every user could read the output of a job.
        self._env["SLURM_UMASK"] = "0077"
        self._folder = home / FOLDER
        self._left_written: set[int] = set()

    async def fields(self, batch: BatchScript) -> dict[str, Any]:
        """Return the body of the request that submits a job.

        The `#SBATCH` lines of its script have no effect. They are there only for people who read the script.

        Raises:
            SlurmUnavailable: slurmrestd does not answer.
        """
        options = [*batch.options, *job_fields.sbatch_options(batch.further)]
        api = await self.server.api()
        between = () if api.signals_batch else self._watch(dict(options))
        job = job_fields.fields(options, self._env, api.version)
        return {"script": batch.text(between), "job": job}

    async def submit(self, script: BatchScript) -> int:
        """Submit a batch script to slurmrestd, and return the job's number."""
        try:
            body = await self.fields(script)
        except ValueError as error:
            raise SubmitRefused(str(error), False, by="slurmrestd") from error
        self._folder.mkdir(mode=0o700, exist_ok=True)
        answer = await self.server.ask("POST", "/job/submit", "submit", body=body)
        job = job_json.submitted(answer.document)
        if job is not None:
            return job  # If Slurm also gave an error, it is why the job is pending.
        words = answer.words or f"HTTP status {answer.status}"
        raise SubmitRefused(words, reasons.is_limit(words), by="slurmrestd")

    async def queue(self) -> list[QueuedJob]:
        """Return the user's jobs, as slurmrestd lists them."""
        now = await self._now()
        document = _good(await self.server.ask("GET", "/jobs", "jobs"), "jobs")
        # The answer lists the jobs of all users. On a large cluster, reading it takes a while.
        listed = await asyncio.to_thread(job_json.queue, document, os.getuid(), now)
        if self._keeps:
            # The list of jobs is useful even if the home is full or does not answer.
            with contextlib.suppress(OSError):
                self._keep_files(listed)
        return listed

    async def details(self, job: int) -> JobDetails | None:
        """Return what slurmrestd knows of a job, or None if it knows nothing any more."""
        now = await self._now()
        answer = await self.server.ask("GET", f"/job/{job}", "job")
        if UNKNOWN_JOB in answer.numbers:
            return None
        return job_json.details(_good(answer, "job"), job, now)

    async def nodes_respond(self, nodes: str) -> bool:
        """Return whether slurmrestd shows this node as usable. Lists of several nodes count as unusable."""
        if not _NODE.fullmatch(nodes):
            return False
        answer = await self.server.ask("GET", f"/node/{nodes}", "node")
        return job_json.nodes_respond(_good(answer, "node"))

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        """Send a signal to the batch scripts of jobs."""
        if (await self.server.api()).signals_batch:
            await self._delete(jobs, {"signal": name, "flags": "BATCH_JOB"})
            return
        for job in jobs:
            self._write(job, name)

    async def cancel(self, jobs: Sequence[int]) -> None:
        """Cancel jobs."""
        await self._delete(jobs, {})

    async def address(self) -> str:
        """Return the address of this host by which the nodes reach it.

        Raises:
            SlurmError: slurmrestd does not answer, or no address is found.
        """
        nodes = job_json.addresses(_good(await self.server.ask("GET", "/nodes", "nodes"), "nodes"))
        address = toward(nodes[:1])
        if not address or (is_loopback(address) and not all(is_loopback(node) for node in nodes)):
            address = toward([node for node in nodes if not is_loopback(node)][:1]) or address
        return required(address)

    async def _now(self) -> float:
        """Return the present time on the controller's clock, in seconds since the epoch."""
        return (await self.server.api()).now()

    async def _delete(self, jobs: Sequence[int], query: Mapping[str, str]) -> None:
        """Send the signal that a query names to each job, or cancel each job if the query is empty."""
        name = "signal" if query else "cancel"
        places = asyncio.Semaphore(AT_ONCE)

        async def one(job: int) -> None:
            # As with scancel, a job that has ended does not count as an error.
            async with places:
                await self.server.ask("DELETE", f"/job/{job}", name, query)

        ended = await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True)
        for trouble in ended:
            if isinstance(trouble, BaseException):
                raise trouble

    # These methods handle the files of jobs if slurmrestd cannot signal a batch script alone.

    def _watch(self, options: Mapping[str, str | None]) -> tuple[str, ...]:
        """Return the lines of a script that receive signals and watch for the end of its time."""
        early = (options.get("signal") or "").rpartition("@")[2] or str(SIGNAL_SECONDS)
        limit = command_output.duration_seconds(options.get("time") or "")
        end = "" if limit is None else str(max(1, int(limit) - int(early)))
        return (
            "# slurmrestd cannot signal this script alone: the names of signals are written into a file.",
            *render([Assign("signals", (str(self._folder), Code('/"$SLURM_JOB_ID"')))]),
            ': >"$signals"',
            "(",
            f"  exec 9>&-; heard=0 end={end}",
            '  while sleep 2 && kill -0 "$$" 2>/dev/null; do',
            '    mapfile -t lines 2>/dev/null <"$signals" || lines=()',
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

    def _write(self, job: int, words: str) -> None:
        """Append a line to the file from which a job reads."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # The file is written in place, because on NFS a new file of the same name may appear only much later.
        with (self._folder / str(job)).open("a") as file:
            file.write(words + "\n")

    def _keep_files(self, listed: Sequence[QueuedJob]) -> None:
        """Maintain the files from which jobs read.

        The time that a running job has left is written into its file once. Files of ended jobs are removed.
        """
        there = {int(path.name) for path in self._folder.iterdir() if path.name.isdigit()}
        for job in listed:
            if job.id not in there:
                self._left_written.discard(job.id)
            elif job.state in PENDING_STATES:
                # Slurm will start the job again. Then its script makes a new file, and nothing else does.
                (self._folder / str(job.id)).unlink(missing_ok=True)
                self._left_written.discard(job.id)
            elif job.state == "RUNNING" and job.left is not None and job.id not in self._left_written:
                self._write(job.id, f"left {job.left:.0f}")
                self._left_written.add(job.id)
        known = {job.id for job in listed}
        self._left_written &= known
        for ended in there - known:
            (self._folder / str(ended)).unlink(missing_ok=True)


def _good(answer: RestAnswer, name: str) -> Any:
    """Return the document of an answer without errors.

    Raises:
        SlurmUnavailable: The answer reports an error.
    """
    if answer.status != 200 or any(answer.numbers):
        raise SlurmUnavailable(f"slurmrestd ({name}): {answer.words or f'HTTP status {answer.status}'}")
    return answer.document
