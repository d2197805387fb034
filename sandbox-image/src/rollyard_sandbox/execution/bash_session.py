"""A bash session, which runs one command at a time, enforces its deadline and interrupts it."""

from __future__ import annotations

import signal
from time import monotonic

from rollyard_sandbox.errors import LaunchError, NoCommandRunning, SandboxError, SessionBusy
from rollyard_sandbox.execution.commands import Command, Outcome
from rollyard_sandbox.execution.interrupts import INTERRUPT_GRACE, Interrupt, kill_foreground_job
from rollyard_sandbox.execution.processes import send_signal, session_members
from rollyard_sandbox.execution.session_shell import START_LIMIT, SessionShell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.execution.event_loop import EventLoop
    from rollyard_sandbox.execution.shell import Report
    from rollyard_sandbox.isolation.protections import Protections

KILL_GRACE = 0.5  # The seconds between killing the foreground and killing the shell.
REAP_GRACE = 2.0  # The seconds that a killed shell has to end.
_INTERRUPTED = 128 + signal.SIGINT


class BashSession:
    """A named, persistent bash.

    Its state (directory, variables, functions, jobs) lives in the shell. When the shell is lost, the next
    command gets a new one in the same directory. What background jobs print between two commands (its first
    and last 32 KiB) is shown at the head of the next command's output.
    """

    def __init__(
        self, loop: EventLoop, name: str, cwd: str, environment: dict[str, str], protections: Protections
    ) -> None:
        self.name = name
        self._loop = loop
        self._shell = SessionShell(loop, cwd, environment, protections, self)
        self._command: Command | None = None
        self._queued: Command | None = None
        self._withdrawn = False  # Whether the running command was interrupted before the shell took it.

    @property
    def busy(self) -> bool:
        """Return whether a command is running."""
        return self._command is not None

    @property
    def pid(self) -> int | None:
        """Return the shell's pid, or None if there is no shell now."""
        return self._shell.shell.pid if self._shell.shell else None

    def execute(
        self,
        command: bytes,
        timeout: float,
        max_output: int,
        on_output: Callable[[bytes], None] | None,
        done: Callable[[Outcome | SandboxError], None],
    ) -> Command:
        """Run `command`, and call `done` once, at the latest a few seconds after `timeout` seconds.

        While a cancelled command is being stopped, the one that follows it waits.

        Raises:
            SessionBusy: Another command is running.
            LaunchError: No shell could be started.
        """
        running = Command(command, timeout, max_output, on_output, done)
        if self._command is None and self._queued is None:
            self._begin(running)
        elif self._command is not None and self._command.cancelled and self._queued is None:
            self._queued = running
        else:
            raise SessionBusy(f"session {self.name!r} is running another command")
        return running

    def send_input(self, data: bytes) -> None:
        """Type `data` on the terminal of the running command.

        Raises:
            NoCommandRunning: No command is running.
            SandboxError: More than 1 MiB is waiting to be read.
        """
        if self._command is None or not self._shell.ready:
            raise NoCommandRunning(f"session {self.name!r} runs no command that could read input")
        self._shell.send_input(data)

    def interrupt(self) -> None:
        """Send SIGINT to the foreground of the terminal, like Ctrl-C.

        Raises:
            NoCommandRunning: No command is running.
        """
        if self._command is None or self._shell.shell is None:
            raise NoCommandRunning(f"session {self.name!r} runs no command")
        if not self._shell.ready:
            self._finish(_INTERRUPTED)  # The shell does not listen yet, so the command does not begin at all.
            return
        self._interrupt(self._command)

    def cancel(self, command: Command) -> None:
        """End `command` at once, as a timeout would. This does nothing if it has already ended."""
        if self._command is command:
            command.cancelled = True
            self._stop_command()
        elif self._queued is command:
            self._queued = None
            command.done(command.outcome)

    def expect_kill(self) -> None:
        """Note that the caller is about to kill every process: a running command will end as `killed`."""
        if self._command is not None:
            self._command.outcome.killed = True

    def kill(self) -> None:
        """Kill the shell and every process of its session. A running command ends as `killed`."""
        self.expect_kill()
        self._shell.reset()

    # The shell calls these methods.

    def shell_ready(self) -> None:
        """This is called when the shell waits for a command."""
        running = self._command
        if running is not None and self._withdrawn:
            self._finish(_INTERRUPTED)
        elif self._shell.signalled and self._shell.shell is not None:
            self._shell.settle()
        elif running is not None:
            self._dispatch(running)

    def shell_reported(self, report: Report) -> None:
        """This is called when the shell, which was ready, reports the end of a command."""
        if self._command is not None and report.number == self._command.number:
            self._shell.drain()
            self._finish(report.status)
        elif self._command is not None and self._shell.signalled:
            # The interrupt came before the shell took the command, and the number may be lost with it.
            self._withdrawn = True
            self._shell.settle()

    def shell_not_started(self, text: str) -> None:
        """This is called when the shell has ended before it was ready."""
        self._fail(LaunchError(text))

    def shell_lost(self, exit_code: int | None) -> None:
        """This is called when the shell is gone, with its exit code if it ended by itself."""
        if self._command is not None:
            self._finish(exit_code)

    def shell_replaced(self) -> None:
        """This is called when the running command has replaced the shell by another one (`exec bash`)."""
        self._finish(0, lost=True)

    def printed(self, data: bytes) -> None:
        """This is called when the running command has printed something."""
        running = self._command
        assert running is not None
        running.capture.add(data)
        if running.on_output is not None:
            running.on_output(data)

    # The methods below run a command.

    def _begin(self, running: Command) -> None:
        if self._shell.shell is not None and not self._shell.shell.reads_terminal():
            self._shell.discard()
        if self._shell.shell is None:
            self._shell.start()
        self._command = running
        if self._shell.ready:
            self._dispatch(running)
        else:
            running.timer = self._loop.call_later(START_LIMIT, self._time_out)

    def _begin_queued(self) -> None:
        running, self._queued = self._queued, None
        if running is not None:
            self._begin_or_fail(running)

    def _begin_again(self, running: Command) -> None:
        """Give a new shell to a command that waits for one."""
        self._command = None
        self._shell.abandon()
        self._begin_or_fail(running)

    def _begin_or_fail(self, running: Command) -> None:
        try:
            self._begin(running)
        except SandboxError as error:
            running.done(error)

    def _dispatch(self, running: Command) -> None:
        idle = self._shell.take_idle_output()
        if idle:
            self.printed(idle)
        if running.timer is not None:
            running.timer.cancel()
        running.timer = self._loop.call_later(running.timeout, self._time_out)
        running.started = monotonic()
        running.number = self._shell.run(running.command)

    def _finish(self, exit_code: int | None, *, lost: bool = False) -> None:
        running, shell = self._command, self._shell
        assert running is not None
        self._command = None
        shell.signalled |= self._withdrawn  # The command was signalled again while the shell settled.
        self._withdrawn = False
        if running.timer is not None:
            running.timer.cancel()
        shell.forget_input()
        outcome = running.outcome
        outcome.seconds = monotonic() - running.started
        outcome.exit_code = exit_code
        outcome.output, outcome.truncated_bytes = running.capture.finish()
        if not lost:
            shell.note_directory()
        outcome.cwd = shell.cwd
        outcome.shell_restarted = shell.lost_state or lost
        shell.lost_state = False
        if shell.ready and shell.signalled and not lost:
            shell.settle()
        self._ended(running, outcome)

    def _fail(self, error: SandboxError) -> None:
        running = self._command
        assert running is not None
        self._command = None
        if running.timer is not None:
            running.timer.cancel()
        self._ended(running, error)

    def _ended(self, running: Command, outcome: Outcome | SandboxError) -> None:
        running.done(outcome)
        if self._queued is not None:
            # It begins later, because the shell of the ended command may be in the middle of being replaced.
            self._loop.call_later(0.0, self._begin_queued)

    # The methods below enforce a deadline: they interrupt, then kill the foreground, then kill the shell.

    def _time_out(self) -> None:
        running = self._command
        if running is None:
            return
        if not self._shell.ready and not self._withdrawn:
            if self._shell.settling:
                self._begin_again(running)
            else:
                self._fail(LaunchError(f"bash was not ready in time: {self._shell.idle_text()}"))
                self._shell.discard()
            return
        running.outcome.timed_out = True
        self._stop_command()

    def _stop_command(self) -> None:
        running = self._command
        assert running is not None
        if running.timer is not None:
            running.timer.cancel()
        if not self._shell.ready:
            self._shell.discard()
            return
        self._interrupt(running)
        running.timer = self._loop.call_later(INTERRUPT_GRACE, self._kill_foreground)

    def _interrupt(self, running: Command) -> None:
        shell = self._shell.shell
        if shell is None:
            return
        self._shell.signalled = True
        Interrupt(self._loop, shell, lambda: self._shell.shell is shell and self._command is running).send()

    def _kill_foreground(self) -> None:
        running, shell = self._command, self._shell.shell
        if running is None or shell is None:
            return
        running.outcome.killed = True
        if kill_foreground_job(shell):
            running.timer = self._loop.call_later(KILL_GRACE, self._kill_shell)
        else:
            self._kill_shell()

    def _kill_shell(self) -> None:
        running, shell = self._command, self._shell.shell
        if running is None or shell is None:
            return
        self._shell.note_directory()
        members = session_members(shell.pid)
        send_signal((p.pid for p in members), signal.SIGKILL)
        running.timer = self._loop.call_later(REAP_GRACE, self._shell.discard)
