"""Programs that run in fresh processes, with pipes or a terminal, and a process group of their own."""

from __future__ import annotations

import errno
import os
from time import monotonic

from rollyard_sandbox.errors import BadRequest, LaunchError, SandboxError
from rollyard_sandbox.execution.commands import Capture, Outcome
from rollyard_sandbox.execution.event_loop import WRITE
from rollyard_sandbox.execution.launching import launch, open_terminal, refused
from rollyard_sandbox.execution.processes import exit_code, kill_session, prefer_for_oom

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from rollyard_sandbox.execution.event_loop import EventLoop
    from rollyard_sandbox.isolation.protections import Protections

_REAP_GRACE: Final = 2.0  # The seconds that a killed program has to end.
_READ: Final = 65536
_DRAIN_LIMIT: Final = 1024 * 1024 + _READ  # bytes; this is more than the largest pipe holds
_WINDOW: Final = (50, 200)  # rows and columns


def _launch_reason(error: Exception, program: str) -> str | None:
    """Return the reason why a program did not start.

    Returns:
        ProgramNotFound, ConfinementFailed, or None if the program's folder or arguments are the cause.
    """
    if refused(error):
        return "ConfinementFailed"
    is_missing = isinstance(error, OSError) and error.errno == errno.ENOENT and error.filename == program
    absent = is_missing and "/" not in program
    return "ProgramNotFound" if absent else None


class RunningProgram:
    """One program. Standard output and standard error share a pipe, or a terminal, which keeps their order.

    A program ends when its first process does: its output is then read, and what it left running is killed.
    """

    def __init__(
        self,
        loop: EventLoop,
        protections: Protections,
        argv: list[str],
        environment: dict[str, str],
        cwd: str,
        stdin: bytes,
        timeout: float,
        max_output: int,
        done: Callable[[Outcome | SandboxError], None],
        *,
        terminal: bool = False,
    ) -> None:
        if not argv:
            raise BadRequest("argv: at least one word is needed")
        self._loop = loop
        self._done: Callable[[Outcome | SandboxError], None] | None = done
        self._capture = Capture(max_output)
        self._outcome = Outcome()
        self._outcome.cwd = cwd
        self._started = monotonic()
        self._input = memoryview(stdin)
        # A program that closes its terminal may open it again. Until its end another user of the terminal is
        # here, since the kernel would report a terminal without users all the time.
        self._terminal: int | None = None
        if terminal:
            self._stdout, self._terminal = open_terminal(_WINDOW)
            self._stdin = os.dup(self._stdout)
            descriptors = (self._terminal,) * 3
        else:
            theirs, self._stdin = os.pipe()
            self._stdout, output = os.pipe()
            descriptors = (theirs, output, output)
        try:
            self.pid = launch(argv, environment, cwd, protections, descriptors, terminal=terminal)
        except (OSError, ValueError) as error:
            os.close(self._stdin)
            os.close(self._stdout)
            self._close_terminal()
            raise LaunchError(
                f"{argv[0]} could not be started in {cwd}: {error}", reason=_launch_reason(error, argv[0])
            ) from error
        finally:
            if not terminal:
                os.close(theirs)
                os.close(output)
        prefer_for_oom(self.pid)
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        loop.on_exit(self.pid, self._ended)
        loop.watch(self._stdout, self._output_ready)
        self._timer = loop.call_later(timeout, self._time_out)
        self._stdin_open = True
        self._write_input(0)
        if self._stdin_open:
            loop.watch(self._stdin, self._write_input, WRITE)

    def expect_kill(self) -> None:
        """Note that the caller is about to kill every process: the program will end as `killed`."""
        self._outcome.killed = True

    def cancel(self) -> None:
        """Kill the program. This does nothing if it has already ended."""
        if self._done is None:
            return
        self._outcome.killed = True
        # The members are found before their parent is gone, to include what it started in other sessions.
        kill_session(self.pid)
        self._timer.cancel()
        self._timer = self._loop.call_later(_REAP_GRACE, lambda: self._finish(None))

    def _time_out(self) -> None:
        self._outcome.timed_out = True
        self.cancel()

    def _write_input(self, events: int) -> None:
        try:
            while self._input:
                self._input = self._input[os.write(self._stdin, self._input[:_READ]) :]
        except BlockingIOError:
            return
        except OSError:
            self._input = self._input[:0]  # The program closed its standard input and does not want the rest.
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin_open:
            self._stdin_open = False
            self._loop.unwatch(self._stdin)
            os.close(self._stdin)

    def _close_terminal(self) -> None:
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None

    def _output_ready(self, events: int) -> None:
        self._read()

    def _read(self) -> int:
        try:
            data = os.read(self._stdout, _READ)
        except BlockingIOError:
            return 0
        if not data:
            self._loop.unwatch(self._stdout)
        self._capture.add(data)
        return len(data)

    def _ended(self, status: int) -> None:
        total = 0
        while total < _DRAIN_LIMIT:
            count = self._read()
            if not count:
                break
            total += count
        kill_session(self.pid)
        self._finish(exit_code(status))

    def _finish(self, exit_code: int | None) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        self._close_stdin()
        self._loop.unwatch(self._stdout)
        os.close(self._stdout)
        self._close_terminal()
        outcome = self._outcome
        outcome.exit_code = exit_code
        outcome.seconds = monotonic() - self._started
        outcome.output, outcome.truncated_bytes = self._capture.finish()
        done(outcome)
