"""Calls to Slurm that run its own commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rollyard_slurm.addresses import controller, is_loopback, required, toward
from rollyard_slurm.calls.protocol import CallCounts
from rollyard_slurm.errors import SlurmError, SlurmUnavailable, SubmitRefused
from rollyard_slurm.readers import command_output, reasons
from rollyard_slurm.readers.jobs import JobDetails, QueuedJob
from rollyard_slurm.scripts.batch import BatchScript

PASSED: Final = ("PATH", "HOME", "LANG", "TZ", "SLURM_CONF", "TMPDIR", "LD_LIBRARY_PATH", "KRB5CCNAME")
"""The variables that Slurm's commands, and through them the jobs, inherit from the bridge's environment.

Tokens are not among them, and neither are the SBATCH_* variables, which would override the scripts.
"""


def environment(env: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of Slurm's commands, which the jobs inherit from them.

    Args:
        env: The environment of the bridge.
        more: The names of further variables that are inherited.
    """
    user = pwd.getpwuid(os.getuid())
    names = {*PASSED, *more}
    passed = {name: value for name, value in env.items() if name in names or name.startswith("LC_")}
    return {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, **passed}


class SlurmCommands:
    """Calls Slurm by sbatch, squeue, scontrol, scancel and sacct. Each command has a time limit.

    Args:
        timeout: The time limit of one command, in seconds.
        env: The environment of the commands.
        programs: The folder of the programs. If it is empty, the programs are found on PATH.
    """

    def __init__(self, timeout: float, env: Mapping[str, str], programs: str = "") -> None:
        self._timeout = timeout
        self._env = dict(env)
        self._programs = programs
        self._accounting = True
        self.counts = CallCounts()

    def _program(self, name: str) -> str:
        return os.path.join(self._programs, name) if self._programs else name

    async def _run(self, name: str, *arguments: str, text: str = "") -> tuple[int, str, str]:
        """Run a command, and return its exit status, its output and its error output.

        Args:
            name: The name of the program.
            arguments: The arguments of the program.
            text: The text for its standard input.

        Raises:
            SlurmError: The program does not exist.
            SlurmUnavailable: The program cannot be started, or did not end within the time limit.
        """
        began = time.monotonic()
        self.counts.count(name)
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
            raise SlurmUnavailable(f"{name} cannot be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(self._timeout):
                out, err = await process.communicate(text.encode() if text else None)
        except TimeoutError:
            raise SlurmUnavailable(f"{name} did not answer within {self._timeout:g} s", unsure=True) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                # A process that hangs in the kernel cannot end. It is left alone, and nothing waits for it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await process.wait()
            self.counts.seconds += time.monotonic() - began
        assert process.returncode is not None
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")

    async def _ask(self, name: str, *arguments: str) -> str:
        """Run a command, and return its output.

        Raises:
            SlurmUnavailable: The command failed.
        """
        code, out, err = await self._run(name, *arguments)
        if code != 0:
            words = reasons.shorter(err) or f"exit status {code}"
            raise SlurmUnavailable(f"{name}: {words}", reasons.is_unsure(err))
        return out

    async def submit(self, script: BatchScript) -> int:
        """Submit a batch script with sbatch, and return the job's number."""
        code, out, err = await self._run("sbatch", "--parsable", text=script.text())
        words = reasons.shorter(err)
        if code != 0 and reasons.is_unavailable(err):
            raise SlurmUnavailable(f"sbatch: {words}", reasons.is_unsure(err))
        if code != 0:
            raise SubmitRefused(words or f"sbatch ended with exit status {code}", reasons.is_limit(err))
        return command_output.submitted(out)

    async def queue(self) -> list[QueuedJob]:
        """Return the user's jobs, as squeue lists them."""
        user = pwd.getpwuid(os.getuid()).pw_name
        arguments = ("--noheader", "--all", "-u", user, "-o", command_output.QUEUE_FORMAT)
        return command_output.queue(await self._ask("squeue", *arguments))

    async def details(self, job: int) -> JobDetails | None:
        """Return what scontrol knows of a job, or None if it knows nothing any more."""
        code, out, err = await self._run("scontrol", "show", "job", str(job))
        if code == 0:
            return command_output.details(out)
        if not re.search(r"invalid job id", err + out, re.IGNORECASE):
            raise SlurmUnavailable(f"scontrol: {reasons.shorter(err) or f'exit status {code}'}")
        return await self._accounted(job)

    async def _accounted(self, job: int) -> JobDetails | None:
        """Ask the accounting of the site, which may know a job that the controller has forgotten.

        The accounting is not asked again after it has answered that it is disabled.
        """
        if not self._accounting:
            return None
        fields = ("-X", "-n", "-P", "-o", command_output.ACCOUNTING_FORMAT)
        code, out, err = await self._run("sacct", "-j", str(job), *fields)
        if code != 0:
            self._accounting = "disabled" not in err.lower()
            return None
        return command_output.accounted(out).get(job)

    async def nodes_respond(self, nodes: str) -> bool:
        """Return whether sinfo lists all of these nodes as usable."""
        arguments = ("--noheader", "--all", "--Node", "--nodes", nodes, "--format", "%T")
        return command_output.nodes_respond(await self._ask("sinfo", *arguments))

    async def address(self) -> str:
        """Return the address of this host from which it reaches the controller and the nodes.

        Raises:
            SlurmError: Slurm does not answer, or no address is found.
        """
        config = await self._ask("scontrol", "show", "config")
        address = await asyncio.to_thread(toward, [controller(config)])
        if not address or is_loopback(address):
            # The controller runs on this host. Therefore the route to a node decides.
            nodes = (await self._ask("sinfo", "--noheader", "--format=%o")).split()
            address = await asyncio.to_thread(toward, nodes[:1]) or address
        return required(address)

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        """Send a signal to the batch scripts of jobs."""
        await self._scancel("--batch", f"--signal={name}", *map(str, jobs))

    async def cancel(self, jobs: Sequence[int]) -> None:
        """Cancel jobs."""
        await self._scancel(*map(str, jobs))

    async def _scancel(self, *arguments: str) -> None:
        # scancel fails if one of several jobs has ended, but it still signals or cancels the others.
        code, _, err = await self._run("scancel", *arguments)
        if code != 0 and reasons.is_unavailable(err):
            raise SlurmUnavailable(f"scancel: {reasons.shorter(err)}")
