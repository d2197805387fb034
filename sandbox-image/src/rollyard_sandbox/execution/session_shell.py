"""The shell of a session: starting it, settling it, its reports, its terminal, and its loss."""

from __future__ import annotations

import os
import signal

from rollyard_sandbox.errors import SandboxError
from rollyard_sandbox.execution.capture import Capture
from rollyard_sandbox.execution.event_loop import READ, WRITE
from rollyard_sandbox.execution.interrupts import Stragglers
from rollyard_sandbox.execution.processes import send_signal, session_members
from rollyard_sandbox.execution.settling import AT_INTERRUPT, Settling
from rollyard_sandbox.execution.shell import Report, Shell, parse_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from rollyard_sandbox.execution.event_loop import EventLoop
    from rollyard_sandbox.isolation.protections import Protections

    class Session(Protocol):
        """The methods that a shell calls on its session, which runs at most one command in it."""

        @property
        def busy(self) -> bool: ...
        def shell_ready(self) -> None: ...
        def shell_reported(self, report: Report) -> None: ...
        def shell_not_started(self, text: str) -> None: ...
        def shell_lost(self, exit_code: int | None) -> None: ...
        def shell_replaced(self) -> None: ...
        def printed(self, data: bytes) -> None: ...


START_LIMIT = 10.0  # The seconds that bash has to report for the first time, and after an interrupt.
IDLE_OUTPUT = 64 * 1024  # The bytes that are kept of what background jobs print between commands.
_INPUT_BACKLOG = 1024 * 1024  # bytes of unread input
_READ = 65536
_DRAIN_LIMIT = 256 * 1024  # bytes that are read after a report; a terminal buffers less


class SessionShell:
    """The shell of one session: at most one at a time, and the next starts in the directory of the lost one.

    Args:
        cwd: The directory in which the first shell starts.
        session: The session that is called back when the shell is ready, reports, prints or is lost.
    """

    def __init__(
        self,
        loop: EventLoop,
        cwd: str,
        environment: dict[str, str],
        protections: Protections,
        session: Session,
    ) -> None:
        self._loop = loop
        self._home = cwd
        self._environment = environment
        self._protections = protections
        self._session = session
        self._settling: Settling | None = None
        self._farewell: Report | None = None
        self._count = 0
        self._idle_output = Capture(IDLE_OUTPUT)
        self._input = bytearray()
        self.cwd = cwd
        self.shell: Shell | None = None
        self.ready = False  # Whether the shell waits for a command, or runs one.
        self.signalled = False  # Whether a SIGINT may be pending in the shell.
        self.lost_state = False  # Whether a shell was lost since the last command ended.

    @property
    def settling(self) -> bool:
        """Return whether the shell is still acting on what is left of a SIGINT."""
        return self._settling is not None

    def start(self) -> None:
        """Start a shell.

        Raises:
            LaunchError: It cannot be started.
        """
        if not os.path.isdir(self.cwd):
            self.cwd = self._home
        shell = Shell.spawn(self.cwd, self._environment, self._protections)
        self.shell = shell
        self.ready = False
        self.signalled = False
        self._settling = None
        self._farewell = None
        self._loop.watch(shell.channel.fileno(), self._channel_ready)
        self._loop.watch(shell.master, self._terminal_ready)
        self._loop.on_exit(shell.pid, self._ended)

    def discard(self, status: int | None = None) -> None:
        """Forget the shell. Its processes are killed, unless it has ended with the wait status `status`."""
        shell = self.shell
        if shell is None:
            return
        self.shell = None
        self.ready = False
        self.lost_state = True
        self._input.clear()
        if status is None:
            members = session_members(shell.pid)
            send_signal((p.pid for p in members), signal.SIGKILL)
            send_signal((shell.pid,), signal.SIGKILL)
            self._loop.forget_child(shell.pid)  # The loop reaps it without calling back.
        self._loop.unwatch(shell.channel.fileno())
        self._loop.unwatch(shell.master)
        shell.close()
        self._session.shell_lost(None if status is None else _exit_code(status))

    def abandon(self) -> None:
        """Discard a shell that hangs. The next one starts in its directory."""
        self.note_directory()
        self.discard()

    def reset(self) -> None:
        """Kill the shell on request. The next one starts where the session began and reports no loss."""
        if self.shell is not None:
            self.drain()
            self.discard()
        self.cwd = self._home
        self.lost_state = False

    def note_directory(self) -> None:
        """Remember the shell's working directory, as far as it is known."""
        if self.shell is not None:
            self.cwd = self.shell.cwd() or self.cwd

    def _ended(self, status: int) -> None:
        shell = self.shell
        if shell is None:
            return
        self._read_farewell(shell)
        self.drain()
        if self._farewell is not None and self._farewell.cwd:
            self.cwd = self._farewell.cwd
        if not self.ready and self._settling is None and self._session.busy:
            self._session.shell_not_started(f"bash ended before it was ready: {self.idle_text()}")
        self.discard(status)

    def _read_farewell(self, shell: Shell) -> None:
        while message := shell.receive():
            report = parse_report(message)
            if report is not None and report.leaving:
                self._farewell = report
            elif self._farewell is not None:
                # Bash flushes at newlines, and therefore splits a path that contains one.
                self._farewell.cwd += os.fsdecode(message)

    def _channel_lost(self, shell: Shell) -> None:
        """This is called when the shell closed its channel: `exec` replaced it, or it sabotaged itself."""
        self._loop.unwatch(shell.channel.fileno())
        self._judge_exec()

    def _judge_exec(self) -> None:
        shell = self.shell
        if shell is None:
            return
        fresh = shell.is_fresh_shell()
        if fresh is None:
            self._loop.call_later(0.01, self._judge_exec)
        elif fresh:
            # After `exec bash` our own new shell takes its place, with the same environment and directory.
            self.note_directory()
            inherited = shell.environment()
            if inherited is not None:
                self._environment = {**inherited, "PS1": "", "PS2": ""}
            self.drain()
            if self._session.busy:
                self._session.shell_replaced()
                self.discard()
                self.lost_state = False  # The result reports the loss already.
            else:
                self.discard()
        elif not self._session.busy:
            self.discard()
        # Otherwise it was `exec program`, and the command ends when the program does.

    # The methods below give the shell commands and read its reports.

    def settle(self) -> None:
        """Let the shell act on a SIGINT that may be pending in it. `shell_ready` is called afterwards."""
        shell = self.shell
        assert shell is not None
        self.ready = False
        self.signalled = False
        try:
            settling = self._settling = Settling(shell, self._next_number)
        except OSError:
            self.discard()
        else:

            def unsettled() -> bool:
                return self.shell is shell and self._settling is settling

            def expire() -> None:
                # A command that waits has a limit of its own.
                if unsettled() and not self._session.busy:
                    self.abandon()

            Stragglers(self._loop, shell, unsettled)
            self._loop.call_later(START_LIMIT, expire)

    def run(self, command: bytes) -> str:
        """Give the shell a command, and return the number with which it will report the command's end."""
        shell = self.shell
        assert shell is not None
        number = self._next_number()
        try:
            shell.run(command, number)
        except OSError:
            # The shell died between two commands and has not been reaped yet.
            self.discard()
        return number

    def _next_number(self) -> str:
        self._count += 1
        return f"{self._count:08d}"[-8:]

    def _channel_ready(self, events: int) -> None:
        shell = self.shell
        while shell is not None and shell is self.shell:
            message = shell.receive()
            if message is None:
                return
            if not message:
                self._channel_lost(shell)
                return
            report = parse_report(message)
            if report is None:
                continue
            if report.leaving:
                self._farewell = report
                self._read_farewell(shell)
                return
            if self.ready:
                self._session.shell_reported(report)
            elif self._is_settled(report.number):
                self._became_ready()

    def _is_settled(self, number: str) -> bool:
        try:
            return self._settling is None or self._settling.is_over(number)
        except OSError:
            self.discard()
            return False

    def _became_ready(self) -> None:
        self.ready = True
        self.drain()
        if self._settling is None or self._idle_output.finish()[0] == AT_INTERRUPT:
            self._idle_output = Capture(IDLE_OUTPUT)  # Bash itself printed this, not a job.
        self._settling = None
        self._session.shell_ready()

    # The methods below read and write the terminal.

    def take_idle_output(self) -> bytes:
        """Return what was printed since the last command (its first and last 32 KiB), and forget it."""
        idle, _ = self._idle_output.finish()
        if idle:
            self._idle_output = Capture(IDLE_OUTPUT)
        return idle

    def idle_text(self) -> str:
        """Return what was printed since the last command, as text for a message."""
        return self._idle_output.finish()[0].decode(errors="replace").strip()

    def send_input(self, data: bytes) -> None:
        """Type `data` on the terminal.

        Raises:
            SandboxError: More than 1 MiB is waiting to be read (reason InputBacklog).
        """
        if len(self._input) + len(data) > _INPUT_BACKLOG:
            raise SandboxError("the program does not read its input: 1 MiB is waiting", reason="InputBacklog")
        self._input += data
        self._write_input()

    def forget_input(self) -> None:
        """Drop the input that no program has read."""
        if self._input and self.shell is not None:
            self._input.clear()
            self._loop.change(self.shell.master, READ)

    def drain(self) -> None:
        """Read what the terminal holds now, up to a limit."""
        shell, total = self.shell, 0
        while shell is not None and total < _DRAIN_LIMIT:
            count = self._read_terminal(shell)
            if not count:
                return
            total += count

    def _terminal_ready(self, events: int) -> None:
        shell = self.shell
        if shell is None:
            return
        if self._input and events & WRITE:
            self._write_input()
        if events & ~WRITE:
            self._read_terminal(shell)

    def _read_terminal(self, shell: Shell) -> int:
        """Read once, and return the number of bytes, which is 0 if there are none now."""
        try:
            data = os.read(shell.master, _READ)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(shell.master)  # The terminal hung up, and the shell is about to be reaped.
            return 0
        if self.ready and self._session.busy:
            self._session.printed(data)
        else:
            self._idle_output.add(data)
        return len(data)

    def _write_input(self) -> None:
        shell = self.shell
        assert shell is not None
        try:
            written = os.write(shell.master, self._input) if self._input else 0
        except BlockingIOError:
            written = 0  # The program does not read now. The rest is written when it does.
        del self._input[:written]
        self._loop.change(shell.master, READ | WRITE if self._input else READ)


def _exit_code(status: int) -> int:
    """Return a wait status as shells show it: 128 + the signal's number if a signal ended the process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
