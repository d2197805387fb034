"""The shell of a session: it is started, settles, reports, is read and written, and is lost."""

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
        """What a shell needs of its session, which runs at most one command in it."""

        @property
        def busy(self) -> bool: ...
        def shell_ready(self) -> None: ...
        def shell_reported(self, report: Report) -> None: ...
        def shell_not_started(self, text: str) -> None: ...
        def shell_lost(self, exit_code: int | None) -> None: ...
        def shell_replaced(self) -> None: ...
        def printed(self, data: bytes) -> None: ...


START_LIMIT = 10.0  # seconds for bash to report for the first time, and after an interrupt
IDLE_OUTPUT = 64 * 1024  # bytes kept of what background jobs print between commands
_INPUT_BACKLOG = 1024 * 1024  # bytes of unread input
_READ = 65536
_DRAIN_LIMIT = 256 * 1024  # bytes read after a report; a terminal buffers less


class SessionShell:
    """At most one shell at a time; the next one starts in the directory of the one that was lost.

    Args:
        cwd: the directory where the first shell starts.
        session: is called back when the shell is ready, reports, prints or is lost.
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
        self.ready = False  # it waits for a command, or runs one
        self.signalled = False  # a SIGINT may be pending in it
        self.lost_state = False  # a shell was lost since the last command ended

    @property
    def settling(self) -> bool:
        """Whether the shell is still acting on what is left of a SIGINT."""
        return self._settling is not None

    def start(self) -> None:
        """Starts a shell.

        Raises:
            LaunchError: it cannot be started.
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
        """Forgets the shell; unless it has ended with the wait status `status`, its processes are killed."""
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
            self._loop.forget_child(shell.pid)  # the loop reaps it without a call
        self._loop.unwatch(shell.channel.fileno())
        self._loop.unwatch(shell.master)
        shell.close()
        self._session.shell_lost(None if status is None else _exit_code(status))

    def abandon(self) -> None:
        """Discards a shell that hangs; the next one starts in its directory."""
        self.note_directory()
        self.discard()

    def reset(self) -> None:
        """Kills the shell on request: the next one starts where the session began, and has lost no state."""
        if self.shell is not None:
            self.drain()
            self.discard()
        self.cwd = self._home
        self.lost_state = False

    def note_directory(self) -> None:
        """Remembers where the shell is, as far as it is known."""
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
                self._farewell.cwd += os.fsdecode(message)  # bash flushes at newlines, also in a path

    def _channel_lost(self, shell: Shell) -> None:
        """The shell closed its channel: it was replaced by `exec`, or sabotaged itself."""
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
            # `exec bash`: our own new shell takes its place, with the same environment and directory.
            self.note_directory()
            inherited = shell.environment()
            if inherited is not None:
                self._environment = {**inherited, "PS1": "", "PS2": ""}
            self.drain()
            if self._session.busy:
                self._session.shell_replaced()
                self.discard()
                self.lost_state = False  # the result says so already
            else:
                self.discard()
        elif not self._session.busy:
            self.discard()
        # else `exec program`: the command ends when the program does.

    # Reports

    def settle(self) -> None:
        """Lets the shell act on a SIGINT that may be pending in it; `shell_ready` is called afterwards."""
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
                if unsettled() and not self._session.busy:  # a command that waits has a limit of its own
                    self.abandon()

            Stragglers(self._loop, shell, unsettled)
            self._loop.call_later(START_LIMIT, expire)

    def run(self, command: bytes) -> str:
        """Gives the shell a command; returns the number with which it will report the command's end."""
        shell = self.shell
        assert shell is not None
        number = self._next_number()
        try:
            shell.run(command, number)
        except OSError:
            # The shell died between two commands and its end has not been reaped yet.
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
            self._idle_output = Capture(IDLE_OUTPUT)  # bash printed it, and no job
        self._settling = None
        self._session.shell_ready()

    # The terminal

    def take_idle_output(self) -> bytes:
        """Returns what was printed since the last command (its first and last 32 KiB), and forgets it."""
        idle, _ = self._idle_output.finish()
        if idle:
            self._idle_output = Capture(IDLE_OUTPUT)
        return idle

    def idle_text(self) -> str:
        """What was printed since the last command, as text for a message."""
        return self._idle_output.finish()[0].decode(errors="replace").strip()

    def send_input(self, data: bytes) -> None:
        """Types `data` on the terminal.

        Raises:
            SandboxError: more than 1 MiB is waiting to be read (reason InputBacklog).
        """
        if len(self._input) + len(data) > _INPUT_BACKLOG:
            raise SandboxError("the program does not read its input: 1 MiB is waiting", reason="InputBacklog")
        self._input += data
        self._write_input()

    def forget_input(self) -> None:
        """Drops the input that no program has read."""
        if self._input and self.shell is not None:
            self._input.clear()
            self._loop.change(self.shell.master, READ)

    def drain(self) -> None:
        """Reads what is on the terminal now, up to a limit."""
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
        """Reads once; returns the number of bytes, 0 where there are none now."""
        try:
            data = os.read(shell.master, _READ)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(shell.master)  # hung up: the shell's end is about to be reaped
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
            written = 0  # the program does not read; the rest is written when it does
        del self._input[:written]
        self._loop.change(shell.master, READ | WRITE if self._input else READ)


def _exit_code(status: int) -> int:
    """A wait status as shells show it: 128 + the signal's number where a signal ended the process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
