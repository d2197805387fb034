"""Slurm as the bridge asks it: a protocol, and its implementation by Slurm's own commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rollyard_slurm.calls.call_counts import Load
from rollyard_slurm.errors import SlurmAway, SlurmError, SubmitRefused
from rollyard_slurm.readers import command_output, reasons
from rollyard_slurm.scripts.batch import Batch

PASSED = ("PATH", "HOME", "LANG", "TZ", "SLURM_CONF", "TMPDIR", "LD_LIBRARY_PATH", "KRB5CCNAME")
"""What commands, and so jobs, inherit of the bridge's environment. Never SBATCH_*, which would
overrule the scripts, and never tokens."""
DETAILS_AT_ONCE = 4


class Commands(Protocol):
    """What the bridge wants of Slurm. Each call may raise SlurmAway."""

    async def submit(self, script: Batch) -> int:
        """Submits a batch script; the job's number.

        Raises:
            SubmitRefused: Slurm does not take it.
        """
        ...

    async def queue(self) -> list[command_output.QueuedJob]:
        """Every job of this user that has not ended."""
        ...

    async def details(self, job: int) -> command_output.JobDetails | None:
        """One job, which may have ended; None: Slurm does not know it (any more)."""
        ...

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        """A signal to the batch scripts alone; nothing where a job has ended."""
        ...

    async def cancel(self, jobs: Sequence[int]) -> None:
        """Ends jobs, pending ones too; nothing where a job has ended."""
        ...


def environment(env: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """What Slurm's commands, and by them the jobs, get of `env`."""
    user = pwd.getpwuid(os.getuid())
    names = {*PASSED, *more}
    kept = {name: value for name, value in env.items() if name in names or name.startswith("LC_")}
    return {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, **kept}


class CommandLine:
    """sbatch, squeue, scontrol, scancel and sacct, each with a time limit.

    Args:
        timeout: seconds for one command.
        env: environment of the commands.
        programs: folder of the programs; empty: they are on PATH.
    """

    def __init__(self, timeout: float, env: Mapping[str, str], programs: str = "") -> None:
        self._timeout = timeout
        self._env = dict(env)
        self._programs = programs
        self._accounting = True
        self.load = Load()

    def _program(self, name: str) -> str:
        return os.path.join(self._programs, name) if self._programs else name

    async def _run(self, name: str, *arguments: str, text: str = "") -> tuple[int, str, str]:
        began = time.monotonic()
        self.load.runs[name] = self.load.runs.get(name, 0) + 1
        try:
            process = await asyncio.create_subprocess_exec(
                self._program(name),
                *arguments,
                stdin=asyncio.subprocess.PIPE if text else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._env,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise SlurmError(f"there is no program {name!r} on PATH: is this a Slurm login node?") from error
        except OSError as error:
            raise SlurmAway(f"{name} cannot be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(self._timeout):
                out, err = await process.communicate(text.encode() if text else None)
        except TimeoutError:
            raise SlurmAway(f"{name} did not answer within {self._timeout:g} s", unsure=True) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                # One that hangs in the kernel is left to itself: nothing waits for it here.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await process.wait()
            self.load.seconds += time.monotonic() - began
        assert process.returncode is not None
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")

    async def _ask(self, name: str, *arguments: str) -> str:
        code, out, err = await self._run(name, *arguments)
        if code != 0:
            words = reasons.shorter(err) or f"exit status {code}"
            raise SlurmAway(f"{name}: {words}", reasons.is_unsure(err))
        return out

    async def submit(self, script: Batch) -> int:
        code, out, err = await self._run("sbatch", "--parsable", text=script.text())
        words = reasons.shorter(err)
        if code != 0 and reasons.is_away(err):
            raise SlurmAway(f"sbatch: {words}", reasons.is_unsure(err))
        if code != 0:
            raise SubmitRefused(words or f"sbatch ended with exit status {code}", reasons.is_limit(err))
        try:
            return command_output.submitted(out)
        except command_output.Unreadable as error:
            raise SlurmAway(str(error), unsure=True) from error

    async def queue(self) -> list[command_output.QueuedJob]:
        user = pwd.getpwuid(os.getuid()).pw_name
        out = await self._ask("squeue", "--noheader", "--all", "-u", user, "-o", command_output.QUEUE_FORMAT)
        try:
            return command_output.queue(out)
        except command_output.Unreadable as error:
            raise SlurmAway(str(error)) from error

    async def details(self, job: int) -> command_output.JobDetails | None:
        code, out, err = await self._run("scontrol", "show", "job", str(job))
        if code == 0:
            try:
                return command_output.details(out)
            except command_output.Unreadable as error:
                raise SlurmAway(str(error)) from error
        if not re.search(r"invalid job id", err + out, re.IGNORECASE):
            raise SlurmAway(f"scontrol: {reasons.shorter(err) or f'exit status {code}'}")
        return await self._accounted(job)

    async def _accounted(self, job: int) -> command_output.JobDetails | None:
        """The controller has forgotten it; where the site keeps accounts, they still know it."""
        if not self._accounting:
            return None
        fields = ("-X", "-n", "-P", "-o", command_output.ACCOUNTING_FORMAT)
        code, out, err = await self._run("sacct", "-j", str(job), *fields)
        if code != 0:
            self._accounting = "disabled" not in err.lower()
            return None
        return command_output.accounted(out).get(job)

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        await self._tell("--batch", f"--signal={name}", *map(str, jobs))

    async def cancel(self, jobs: Sequence[int]) -> None:
        await self._tell(*map(str, jobs))

    async def _tell(self, *arguments: str) -> None:
        # scancel fails where one job of several has ended, and does the others all the same.
        code, _, err = await self._run("scancel", *arguments)
        if code != 0 and reasons.is_away(err):
            raise SlurmAway(f"scancel: {reasons.shorter(err)}")
