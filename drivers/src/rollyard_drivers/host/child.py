"""One subprocess of the local driver: started, watched, logged, and ended within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rollyard_drivers.host import launcher
from rollyard_drivers.host.home import read_json, write_json
from rollyard_drivers.host.log_file import LogFile
from rollyard_drivers.host.processes import (
    ProcessIdentity,
    identify,
    is_alive,
    is_same_boot,
    kill_session,
    send,
)

_CHUNK = 1 << 16
_LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a child's log and pid file go."""

    logs: Path
    pids: Path


class Child:
    """A subprocess in a session of its own that the kernel kills when this process dies.

    Must be started from the main thread: the kernel ties the death signal to the thread.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: LogFile, pid_file: Path) -> None:
        self.name = name
        self.started_at = datetime.now(UTC)
        self.exited_at: datetime | None = None
        self._process = process
        self._log = log
        self._pid_file = pid_file
        self._reader: asyncio.Task[None] | None = None
        self._waiter: asyncio.Task[int] | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        folders: Folders,
        env: Mapping[str, str] | None = None,
        on_exit: Callable[[], None] = lambda: None,
        program: str = sys.executable,
        guarded: bool = False,
    ) -> Child:
        """Starts `program arguments…`; `on_exit` is called once when it has ended.

        Args:
            env: on top of this process's own.
            program: absolute path; default: this Python.
            guarded: it has subprocesses of its own, which must not outlive it: a guard beside it ends
                them all, also when this process is killed.

        Raises:
            OSError: the process cannot be started, or its log cannot be opened.
        """
        log = LogFile(folders.logs / f"{name}.log")
        command = [*(["--guard"] if guarded else []), program, *arguments]
        # The pipe is our own: with asyncio's, the process counts as running until the last of its
        # descendants closes it, and an orphan that outlives a killed server never does.
        read, write = os.pipe()
        stream = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read, "rb", buffering=0)
        )
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-IS",
                str(launcher.__file__),
                str(os.getpid()),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        except BaseException:
            pipe.close()
            log.close()
            raise
        finally:
            os.close(write)
        pid_file = folders.pids / f"{name}.json"
        identity = identify(process.pid)
        if identity is not None:
            write_json(pid_file, identity.to_json())
        child = cls(name, process, log, pid_file)
        child._reader = asyncio.create_task(child._copy(stream), name=f"log of {name}")
        child._waiter = asyncio.create_task(child._wait(on_exit, pipe), name=f"end of {name}")
        return child

    async def _copy(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_CHUNK):
            self._log.write(data)

    async def _wait(self, on_exit: Callable[[], None], pipe: asyncio.BaseTransport) -> int:
        code = await self._process.wait()
        # This comes before anybody starts a successor: what it left holds memory, a GPU, a port.
        await asyncio.to_thread(kill_session, self._process.pid)
        if self._reader is not None:
            # A descendant in a session of its own may hold the pipe open: last words are waited for briefly.
            await asyncio.wait([self._reader], timeout=_LAST_WORDS_SECONDS)
            self._reader.cancel()
        pipe.close()
        self.exited_at = datetime.now(UTC)
        self._log.close()
        self._pid_file.unlink(missing_ok=True)
        on_exit()
        return code

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit status; None while it runs; a negative number is the signal that ended it."""
        return self._process.returncode if self.exited_at is not None else None

    @property
    def last_line(self) -> str:
        """The last line of its log."""
        return self._log.last_line()

    @property
    def telling_line(self) -> str:
        """The line of its log that tells most about its end: the last error, else the last line."""
        return self._log.telling_line()

    def signal(self, number: signal.Signals) -> None:
        """Signals the process itself; does nothing if it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill_group(self) -> None:
        """Sends SIGKILL to everything in its session's group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self, timeout: float | None = None) -> bool:
        """Waits for its end; returns whether it has ended."""
        if self._waiter is None:
            return True
        done, _ = await asyncio.wait([self._waiter], timeout=timeout)
        return bool(done)

    async def stop(self, grace_seconds: float, insist_after: float | None = None) -> None:
        """Ends it: SIGTERM, a second one after `insist_after` seconds, and SIGKILL after the grace."""
        self.signal(signal.SIGTERM)
        first = grace_seconds if insist_after is None else min(insist_after, grace_seconds)
        if await self.wait(first):
            return
        if first < grace_seconds:
            self.signal(signal.SIGTERM)
            if await self.wait(grace_seconds - first):
                return
        self.kill_group()
        await self.wait(5.0)


def sweep(pids: Path) -> list[str]:
    """Kills what an earlier supervisor left behind, by its pid files; returns the names of what still ran."""
    found = []
    for file in sorted(pids.glob("*.json")):
        document = read_json(file)
        identity = ProcessIdentity.from_json(document) if document is not None else None
        if identity is not None and is_same_boot(identity):
            leader = is_alive(identity)
            send(identity, signal.SIGKILL, group=True)
            # Its subprocesses may have outlived it; nobody else leads a session of its number then.
            left = kill_session(identity.pid, identity.start_ticks)
            if leader or left:
                found.append(file.stem)
        file.unlink(missing_ok=True)
    return found
