"""A command of a bash session that runs while its caller does something else."""

from __future__ import annotations

import asyncio
from typing import Protocol

from rollyard_sandbox.client.results import ExecResult
from rollyard_sandbox.errors import SandboxError


class SessionTerminal(Protocol):
    """The calls of the client that reach the terminal of a session."""

    async def send_input(self, data: bytes, *, session: str = "main") -> None:
        """Type `data` on the terminal of the command that `session` is running."""

    async def interrupt(self, *, session: str = "main") -> None:
        """Send SIGINT to the foreground of the session's terminal."""


class RunningCommand:
    """A command that has been started, and accepts input and interrupts."""

    def __init__(self, terminal: SessionTerminal, session: str) -> None:
        self._terminal = terminal
        self._session = session
        self._output = bytearray()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[ExecResult] | None = None

    def output_so_far(self) -> bytes:
        """Return what the command has printed until now, at most its first `max_output` bytes."""
        return bytes(self._output)

    async def wait_for_output(self, expected: bytes, *, timeout: float = 30.0) -> bytes:
        """Wait until `expected` has been printed, and return the output so far.

        Raises:
            TimeoutError: It was not printed within `timeout` seconds.
            SandboxError: The command ended without it (reason OutputNotFound), or the sandbox was lost.
        """
        assert self._task is not None
        async with asyncio.timeout(timeout):
            while expected not in self._output:
                if self._task.done():
                    self._task.result()
                    raise SandboxError(f"the command ended without {expected!r}", reason="OutputNotFound")
                self._changed.clear()
                await self._changed.wait()
        return bytes(self._output)

    async def send_input(self, data: bytes) -> None:
        """Type `data` on the command's terminal. A line needs its newline."""
        await self._terminal.send_input(data, session=self._session)

    async def interrupt(self) -> None:
        """Send SIGINT to the terminal's foreground, like Ctrl-C."""
        await self._terminal.interrupt(session=self._session)

    async def result(self) -> ExecResult:
        """Wait for the command's end, and return its result. Cancelling this wait cancels the command."""
        assert self._task is not None
        return await self._task

    def listen(self, data: bytes) -> None:
        """Store output that the server has sent."""
        self._output += data
        self._changed.set()

    def attach(self, task: asyncio.Task[ExecResult]) -> None:
        """Store the task that waits for the command's result."""
        self._task = task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[ExecResult]) -> None:
        self._changed.set()
        if not task.cancelled():
            task.exception()  # This marks it as retrieved. A caller that awaits `result` still gets it.
