"""One subprocess of the local driver, which is started, watched, logged, and ended within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

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

_CHUNK: Final = 1 << 16
_LAST_WORDS_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a child's log file and pid file."""

    logs: Path
    pids: Path


class Child:
    """A subprocess in a session of its own, which the kernel kills when this process dies.

    It must be started from the main thread, because the kernel ties the death signal to the thread.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        log: LogFile,
        pid_file: Path,
        on_exit: Callable[[], None],
    ) -> None:
        self.name = name
        self._on_exit = on_exit
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
        waits: bool = False,
    ) -> Child:
        """Start `program arguments…` and return the child.

        Args:
            name: The name of the log file and of the pid file.
            arguments: The arguments of the program.
            folders: The folders of the log file and of the pid file.
            env: Variables that are added to this process's own environment.
            on_exit: Called once, when the process has ended.
            program: The absolute path of the program. The default is this Python.
            guarded: Whether the program has subprocesses that must not outlive it. A guard beside it then
                ends them all, even when this process is killed.
            waits: Whether the program waits for its arguments, which `hand_over` sends to its standard input.

        Raises:
            OSError: The process cannot be started, or its log cannot be opened.
        """
        log = LogFile(folders.logs / f"{name}.log")
        command = [*(["--guard"] if guarded else []), program, *arguments]
        # The pipe is created here, because with asyncio's own pipe the process counts as running until the
        # last of its descendants closes it, which an orphan that outlives a killed server never does.
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
                stdin=asyncio.subprocess.PIPE if waits else asyncio.subprocess.DEVNULL,
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
        child = cls(name, process, log, pid_file, on_exit)
        child._reader = asyncio.create_task(child._copy(stream), name=f"log of {name}")
        child._waiter = asyncio.create_task(child._wait(pipe), name=f"end of {name}")
        return child

    async def hand_over(
        self, name: str, arguments: Sequence[str], folders: Folders, on_exit: Callable[[], None]
    ) -> bool:
        """Send its arguments to a child that waits for them, and return whether it was there to take them.

        From then on the child has another name, log file, pid file and `on_exit`. This is done once.

        Raises:
            OSError: The log cannot be opened.
        """
        stdin = self._process.stdin
        identity = identify(self._process.pid)
        if stdin is None or stdin.is_closing() or identity is None or self._process.returncode is not None:
            return False
        try:
            log, before = LogFile(folders.logs / f"{name}.log"), self._log
        except OSError:
            stdin.close()  # The process ends.
            raise
        pid_file, old_pid_file = folders.pids / f"{name}.json", self._pid_file
        write_json(pid_file, identity.to_json())
        self.name, self._log, self._pid_file, self._on_exit = name, log, pid_file, on_exit
        self.started_at = datetime.now(UTC)
        before.close()
        old_pid_file.unlink(missing_ok=True)
        # If the process ends now, `on_exit` is called as for any other end.
        with contextlib.suppress(ConnectionError):
            stdin.write(json.dumps(list(arguments)).encode() + b"\n")
            await stdin.drain()
        stdin.close()
        return True

    async def _copy(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_CHUNK):
            self._log.write(data)

    async def _wait(self, pipe: asyncio.BaseTransport) -> int:
        code = await self._process.wait()
        # This happens before a successor is started, because the processes that are left hold memory, a GPU
        # or a port.
        await asyncio.to_thread(kill_session, self._process.pid)
        if self._reader is not None:
            # A descendant in a session of its own may hold the pipe open, so the last output is awaited only
            # briefly.
            await asyncio.wait([self._reader], timeout=_LAST_WORDS_SECONDS)
            self._reader.cancel()
        pipe.close()
        self.exited_at = datetime.now(UTC)
        self._log.close()
        self._pid_file.unlink(missing_ok=True)
        self._on_exit()
        return code

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit status, or None while the process runs.

        A negative number is the signal that ended the process.
        """
        return self._process.returncode if self.exited_at is not None else None

    @property
    def last_line(self) -> str:
        """The last line of the child's log."""
        return self._log.last_line()

    @property
    def telling_line(self) -> str:
        """The line of the child's log that best explains its end.

        This is the last error, or the last line if there is no error.
        """
        return self._log.telling_line()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself. This does nothing if the process has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill_group(self) -> None:
        """Send SIGKILL to all processes in the child's process group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the process, and return whether it has ended."""
        if self._waiter is None:
            return True
        done, _ = await asyncio.wait([self._waiter], timeout=timeout)
        return bool(done)

    async def stop(self, grace_seconds: float, insist_after: float | None = None) -> None:
        """End the process within the grace period.

        The process gets SIGTERM, a second SIGTERM after `insist_after` seconds, and SIGKILL after
        `grace_seconds`.
        """
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
    """Kill the processes that an earlier supervisor left behind.

    Args:
        pids: The folder of the pid files. All pid files are removed.

    Returns:
        The names of the children of which something still ran.
    """
    names = []
    for file in sorted(pids.glob("*.json")):
        document = read_json(file)
        identity = ProcessIdentity.from_json(document) if document is not None else None
        if identity is not None and is_same_boot(identity):
            leader = is_alive(identity)
            send(identity, signal.SIGKILL, group=True)
            # The leader's subprocesses may have outlived it. No other process can lead a session of the same
            # number while they live.
            left = kill_session(identity.pid, identity.start_ticks)
            if leader or left:
                names.append(file.stem)
        file.unlink(missing_ok=True)
    return names
