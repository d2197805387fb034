"""Processes that stand ready, so that a worker, a backend or a control plane starts without its imports.

Python needs most of a second to import any of these programs. A ready process has imported its program and
waits for the arguments (see `ready_process`). Each one runs a single program and is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollyard_process.backoff import Backoff

from rollyard_drivers.host import ready_process
from rollyard_drivers.host.child import Child, Folders

REFILL_SECONDS: Final = 1.0
"""The time between the use of a ready process and the start of the next one, in seconds. The program that
was just started needs the processor more."""
_AGAIN: Final = Backoff(first=2.0, longest=120.0)
"""The pauses after ready processes that ended although nobody used them."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program for which processes stand ready."""

    name: str
    """The package, such as `rollyard_pipeline`. Its `__main__` has the function `main(arguments)`."""
    modules: tuple[str, ...] = ()
    """Further modules that the program imports only when it needs them."""
    count: int = 1
    """The number of processes that stand ready."""
    options: tuple[str, ...] = ()
    """The options of the program's `stand_ready`, which prepares what every job of this machine needs. With
    none, a ready process only imports."""
    first_after: float = 0.0
    """The seconds before the first one is started, unless the program is started a second time before that. A
    process that only replaces one that dies can wait until what has just begun needs the processor less."""
    second_after: float = 0.0
    """The same for the one that follows the first use."""


@dataclass(slots=True)
class _Pool:
    program: Program
    ready: list[Child] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    repeated: asyncio.Event = field(default_factory=asyncio.Event)
    failures: int = 0
    started: int = 0
    runs: int = 0


class ReadyProcesses:
    """The ready processes of one supervisor, by program.

    Args:
        folders: The folders of log files and pid files.
        programs: The programs for which processes stand ready.
    """

    def __init__(self, folders: Folders, programs: Sequence[Program]) -> None:
        self._folders = folders
        self._pools = {program.name: _Pool(program) for program in programs if program.count > 0}

    async def start(
        self,
        program: str,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        on_exit: Callable[[], None] = lambda: None,
    ) -> Child:
        """Start a program and return the child. A ready process is used if there is one.

        Args:
            program: The package of the program.
            name: The name of the log file and of the pid file.
            arguments: The arguments of the program.
            env: Variables for the program. A ready process has been started without any, so with variables
                a fresh process is started.
            on_exit: Called once, when the process has ended.

        Raises:
            OSError: The process cannot be started, or its log cannot be opened.
        """
        pool = self._pools.get(program)
        if pool is not None:
            pool.runs += 1
            if pool.runs > 1:
                pool.repeated.set()
        while pool is not None and pool.ready and not env:
            child = pool.ready.pop(0)
            if child.exit_code is None and await child.hand_over(name, arguments, self._folders, on_exit):
                pool.failures = 0
                pool.changed.set()
                return child
        return await Child.start(name, ["-m", program, *arguments], self._folders, env=env, on_exit=on_exit)

    async def keep(self) -> None:
        """Keep the processes ready until this task is cancelled, and then end those that nobody uses."""
        try:
            async with asyncio.TaskGroup() as group:
                for pool in self._pools.values():
                    group.create_task(self._fill(pool), name=f"ready {pool.program.name}")
        finally:
            left = [child for pool in self._pools.values() for child in pool.ready]
            for pool in self._pools.values():
                pool.ready.clear()
            await asyncio.gather(*(child.stop(1.0) for child in left))

    async def _fill(self, pool: _Pool) -> None:
        program = pool.program
        options = ["--", *program.options] if program.options else []
        await _quiet(pool, program.first_after)
        while True:
            pool.changed.clear()
            if _ended(pool):
                pool.ready = [child for child in pool.ready if child.exit_code is None]
                pool.failures += 1
                await asyncio.sleep(_AGAIN.pause(pool.failures))
                continue
            if len(pool.ready) >= program.count:
                await pool.changed.wait()
                if pool.runs == 1 and not _ended(pool):
                    await _quiet(pool, program.second_after)
                await asyncio.sleep(REFILL_SECONDS)
                continue
            pool.started += 1
            try:
                child = await Child.start(
                    f"ready-{program.name}-{pool.started % (program.count + 1)}",
                    ["-m", ready_process.MODULE, program.name, *program.modules, *options],
                    self._folders,
                    on_exit=pool.changed.set,
                    waits=True,
                )
            except OSError:
                pool.failures += 1
                await asyncio.sleep(_AGAIN.pause(pool.failures))
            else:
                pool.ready.append(child)


def _ended(pool: _Pool) -> bool:
    """Return whether a ready process has ended although nobody used it."""
    return any(child.exit_code is not None for child in pool.ready)


async def _quiet(pool: _Pool, seconds: float) -> None:
    """Wait for a time, or until the program is started for the second time."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(pool.repeated.wait(), seconds)
