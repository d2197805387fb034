"""A bash session: one command at a time, its deadline, and the shell's replacement when it is lost."""

from __future__ import annotations

import os
import signal
from time import monotonic

from rollyard_sandbox.errors import LaunchError, NoCommandRunning, SandboxError, SessionBusy
from rollyard_sandbox.execution.capture import Capture
from rollyard_sandbox.execution.commands import Command, Outcome
from rollyard_sandbox.execution.event_loop import READ, WRITE
from rollyard_sandbox.execution.interrupts import INTERRUPT_GRACE, Interrupt, Stragglers, kill_foreground_job
from rollyard_sandbox.execution.processes import send_signal, session_members
from rollyard_sandbox.execution.settling import AT_INTERRUPT, Settling
from rollyard_sandbox.execution.shell import Report, Shell, parse_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.execution.event_loop import EventLoop
    from rollyard_sandbox.isolation.protections import Walls

START_LIMIT = 10.0  # seconds for bash to report for the first time, and after an interrupt
KILL_GRACE = 0.5  # seconds between killing the foreground and killing the shell
REAP_GRACE = 2.0  # seconds for a killed shell to end
_INTERRUPTED = 128 + signal.SIGINT
IDLE_OUTPUT = 64 * 1024  # bytes kept of what background jobs print between commands
_INPUT_BACKLOG = 1024 * 1024  # bytes of unread input
_READ = 65536
_DRAIN_LIMIT = 256 * 1024  # bytes read after a report; a terminal buffers less


class BashSession:
    """A named, persistent bash.

    State (directory, variables, functions, jobs) lives in the shell. When the shell is lost the next command
    gets a new one in the same directory. What background jobs print between two commands is shown at the
    head of the next command's output (its first and last 32 KiB).
    """

    def __init__(
        self, loop: EventLoop, name: str, cwd: str, environment: dict[str, str], walls: Walls
    ) -> None:
        self.name = name
        self._loop = loop
        self._home = cwd
        self._cwd = cwd
        self._environment = environment
        self._walls = walls
        self._shell: Shell | None = None
        self._ready = False
        self._signalled = False
        self._settling: Settling | None = None
        self._withdrawn = False  # the running command was interrupted before the shell took it
        self._command: Command | None = None
        self._count = 0
        self._queued: Command | None = None
        self._lost_state = False
        self._idle_output = Capture(IDLE_OUTPUT)
        self._input = bytearray()
        self._farewell: Report | None = None

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._command is not None

    @property
    def pid(self) -> int | None:
        """The shell's pid, None where there is no shell now."""
        return self._shell.pid if self._shell else None

    def execute(
        self,
        command: bytes,
        timeout: float,
        max_output: int,
        on_output: Callable[[bytes], None] | None,
        done: Callable[[Outcome | SandboxError], None],
    ) -> Command:
        """Runs `command`; `done` is called once, at the latest a few seconds after `timeout`.

        While a cancelled command is being stopped, one that follows it waits.

        Raises:
            SessionBusy: another command is running.
            LaunchError: no shell could be started.
        """
        running = Command(command, timeout, max_output, on_output, done)
        if self._command is None and self._queued is None:
            self._begin(running)
        elif self._command is not None and self._command.cancelled and self._queued is None:
            self._queued = running
        else:
            raise SessionBusy(f"session {self.name!r} is running another command")
        return running

    def _begin(self, running: Command) -> None:
        if self._shell is not None and not self._shell.reads_terminal():
            self._discard_shell()
        if self._shell is None:
            self._start_shell()
        self._command = running
        if self._ready:
            self._dispatch(running)
        else:
            running.timer = self._loop.call_later(START_LIMIT, self._time_out)

    def _begin_queued(self) -> None:
        running, self._queued = self._queued, None
        if running is not None:
            self._begin_or_fail(running)

    def _begin_anew(self, running: Command) -> None:
        """Gives a command that waits for a shell a new one."""
        self._command = None
        self._abandon_shell()
        self._begin_or_fail(running)

    def _begin_or_fail(self, running: Command) -> None:
        try:
            self._begin(running)
        except SandboxError as error:
            running.done(error)

    def send_input(self, data: bytes) -> None:
        """Types `data` on the terminal of the running command.

        Raises:
            NoCommandRunning: nothing runs.
            SandboxError: more than 1 MiB is waiting to be read.
        """
        if self._command is None or self._shell is None or not self._ready:
            raise NoCommandRunning(f"session {self.name!r} runs no command that could read input")
        if len(self._input) + len(data) > _INPUT_BACKLOG:
            raise SandboxError("the program does not read its input: 1 MiB is waiting", reason="InputBacklog")
        self._input += data
        self._write_input()

    def interrupt(self) -> None:
        """SIGINT for the foreground of the terminal, like Ctrl-C.

        Raises:
            NoCommandRunning: nothing runs.
        """
        if self._command is None or self._shell is None:
            raise NoCommandRunning(f"session {self.name!r} runs no command")
        if not self._ready:
            self._finish(_INTERRUPTED)  # the shell is not listening yet: the command does not begin at all
            return
        self._interrupt(self._command)

    def cancel(self, command: Command) -> None:
        """Ends `command` as a timeout would, at once; does nothing where it has ended."""
        if self._command is command:
            command.cancelled = True
            self._stop_command()
        elif self._queued is command:
            self._queued = None
            command.done(command.outcome)

    def expect_kill(self) -> None:
        """The caller is about to kill every process: a running command will end as `killed`."""
        if self._command is not None:
            self._command.outcome.killed = True

    def kill(self) -> None:
        """Kills the shell and every process of its session; a running command ends as `killed`."""
        self.expect_kill()
        if self._shell is not None:
            self._drain()
            self._discard_shell()
        self._cwd = self._home
        self._lost_state = False

    # Starting and losing shells

    def _start_shell(self) -> None:
        if not os.path.isdir(self._cwd):
            self._cwd = self._home
        shell = Shell.spawn(self._cwd, self._environment, self._walls)
        self._shell = shell
        self._ready = False
        self._signalled = False
        self._settling = None
        self._farewell = None
        self._loop.watch(shell.channel.fileno(), self._channel_ready)
        self._loop.watch(shell.master, self._terminal_ready)
        self._loop.on_exit(shell.pid, self._shell_ended)

    def _discard_shell(self, status: int | None = None) -> None:
        """Forgets the shell, killing what is left of it where it has not ended by itself."""
        shell = self._shell
        if shell is None:
            return
        self._shell = None
        self._ready = False
        self._lost_state = True
        self._input.clear()
        if status is None:
            members = session_members(shell.pid)
            send_signal((p.pid for p in members), signal.SIGKILL)
            send_signal((shell.pid,), signal.SIGKILL)
            self._loop.forget_child(shell.pid)  # the loop reaps it without telling us
        self._loop.unwatch(shell.channel.fileno())
        self._loop.unwatch(shell.master)
        shell.close()
        if self._command is not None:
            self._finish(None if status is None else _exit_code(status))

    def _abandon_shell(self) -> None:
        """Discards a shell that hangs; the next one starts in its directory."""
        if self._shell is not None:
            self._cwd = self._shell.cwd() or self._cwd
        self._discard_shell()

    def _shell_ended(self, status: int) -> None:
        shell = self._shell
        if shell is None:
            return
        self._read_farewell(shell)
        self._drain()
        if self._farewell is not None and self._farewell.cwd:
            self._cwd = self._farewell.cwd
        if not self._ready and self._settling is None and self._command is not None:
            self._fail(LaunchError(f"bash ended before it was ready: {self._idle_text()}"))
        self._discard_shell(status)

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
        shell = self._shell
        if shell is None:
            return
        fresh = shell.is_fresh_shell()
        if fresh is None:
            self._loop.call_later(0.01, self._judge_exec)
        elif fresh:
            # `exec bash`: our own new shell takes its place, with the same environment and directory.
            self._cwd = shell.cwd() or self._cwd
            inherited = shell.environment()
            if inherited is not None:
                self._environment = {**inherited, "PS1": "", "PS2": ""}
            self._drain()
            if self._command is not None:
                self._finish(0, lost=True)
                self._discard_shell()
                self._lost_state = False  # the result says so already
            else:
                self._discard_shell()
        elif self._command is None:
            self._discard_shell()
        # else `exec program`: the command ends when the program does.

    # Running a command

    def _settle(self, shell: Shell) -> None:
        self._ready = False
        self._signalled = False
        try:
            settling = self._settling = Settling(shell, self._next_number)
        except OSError:
            self._discard_shell()
        else:

            def unsettled() -> bool:
                return self._shell is shell and self._settling is settling

            def expire() -> None:
                if unsettled() and self._command is None:  # a command that waits has a limit of its own
                    self._abandon_shell()

            Stragglers(self._loop, shell, unsettled)
            self._loop.call_later(START_LIMIT, expire)

    def _next_number(self) -> str:
        self._count += 1
        return f"{self._count:08d}"[-8:]

    def _dispatch(self, running: Command) -> None:
        shell = self._shell
        assert shell is not None
        running.number = self._next_number()
        idle, _ = self._idle_output.finish()
        if idle:
            self._idle_output = Capture(IDLE_OUTPUT)
            running.capture.add(idle)
            if running.on_output is not None:
                running.on_output(idle)
        if running.timer is not None:
            running.timer.cancel()
        running.timer = self._loop.call_later(running.timeout, self._time_out)
        running.started = monotonic()
        try:
            shell.run(running.command, running.number)
        except OSError:
            # The shell died between two commands and its end has not been reaped yet.
            self._discard_shell()

    def _channel_ready(self, events: int) -> None:
        shell = self._shell
        while shell is not None and shell is self._shell:
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
            if not self._ready:
                if self._is_settled(report.number):
                    self._became_ready()
            elif self._command is not None and report.number == self._command.number:
                self._drain()
                self._finish(report.status)
            elif self._command is not None and self._signalled:
                # The interrupt came before the shell took the command, and the number may be lost with it.
                self._withdrawn = True
                self._settle(shell)

    def _is_settled(self, number: str) -> bool:
        try:
            return self._settling is None or self._settling.is_over(number)
        except OSError:
            self._discard_shell()
            return False

    def _became_ready(self) -> None:
        self._ready = True
        self._drain()
        if self._settling is None or self._idle_output.finish()[0] == AT_INTERRUPT:
            self._idle_output = Capture(IDLE_OUTPUT)  # bash's own words
        self._settling = None
        running = self._command
        if running is not None and self._withdrawn:
            self._finish(_INTERRUPTED)
        elif self._signalled and self._shell is not None:
            self._settle(self._shell)
        elif running is not None:
            self._dispatch(running)

    def _terminal_ready(self, events: int) -> None:
        shell = self._shell
        if shell is None:
            return
        if self._input and events & WRITE:
            self._write_input()
        if events & ~WRITE:
            self._read_terminal(shell)

    def _read_terminal(self, shell: Shell) -> int:
        """Reads once; the number of bytes, 0 where there are none now."""
        try:
            data = os.read(shell.master, _READ)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(shell.master)  # hung up: the shell's end is about to be reaped
            return 0
        running = self._command
        if running is None or not self._ready:
            self._idle_output.add(data)
        else:
            running.capture.add(data)
            if running.on_output is not None:
                running.on_output(data)
        return len(data)

    def _drain(self) -> None:
        shell, total = self._shell, 0
        while shell is not None and total < _DRAIN_LIMIT:
            count = self._read_terminal(shell)
            if not count:
                return
            total += count

    def _write_input(self) -> None:
        shell = self._shell
        assert shell is not None
        try:
            written = os.write(shell.master, self._input) if self._input else 0
        except BlockingIOError:
            written = 0  # the program does not read; the rest is written when it does
        del self._input[:written]
        self._loop.change(shell.master, READ | WRITE if self._input else READ)

    def _finish(self, exit_code: int | None, *, lost: bool = False) -> None:
        running = self._command
        assert running is not None
        self._command = None
        self._signalled |= self._withdrawn  # it was signalled again while the shell settled
        self._withdrawn = False
        if running.timer is not None:
            running.timer.cancel()
        if self._input and self._shell is not None:
            self._input.clear()
            self._loop.change(self._shell.master, READ)
        outcome = running.outcome
        outcome.seconds = monotonic() - running.started
        outcome.exit_code = exit_code
        outcome.output, outcome.truncated_bytes = running.capture.finish()
        if self._shell is not None and not lost:
            self._cwd = self._shell.cwd() or self._cwd
        outcome.cwd = self._cwd
        outcome.shell_restarted = self._lost_state or lost
        self._lost_state = False
        if self._shell is not None and self._ready and self._signalled and not lost:
            self._settle(self._shell)
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
            # Not now: the shell of the ended command may be in the middle of being replaced.
            self._loop.call_later(0.0, self._begin_queued)

    def _idle_text(self) -> str:
        return self._idle_output.finish()[0].decode(errors="replace").strip()

    # Deadlines: interrupt, kill the foreground, kill the shell

    def _time_out(self) -> None:
        running = self._command
        if running is None:
            return
        if not self._ready and not self._withdrawn:
            if self._settling is None:
                self._fail(LaunchError(f"bash was not ready in time: {self._idle_text()}"))
                self._discard_shell()
            else:
                self._begin_anew(running)
            return
        running.outcome.timed_out = True
        self._stop_command()

    def _stop_command(self) -> None:
        running = self._command
        assert running is not None
        if running.timer is not None:
            running.timer.cancel()
        if not self._ready:
            self._discard_shell()
            return
        self._interrupt(running)
        running.timer = self._loop.call_later(INTERRUPT_GRACE, self._kill_foreground)

    def _interrupt(self, running: Command) -> None:
        shell = self._shell
        if shell is None:
            return
        self._signalled = True
        Interrupt(self._loop, shell, lambda: self._shell is shell and self._command is running).send()

    def _kill_foreground(self) -> None:
        running, shell = self._command, self._shell
        if running is None or shell is None:
            return
        running.outcome.killed = True
        if kill_foreground_job(shell):
            running.timer = self._loop.call_later(KILL_GRACE, self._kill_shell)
        else:
            self._kill_shell()

    def _kill_shell(self) -> None:
        shell, running = self._shell, self._command
        if shell is None or running is None:
            return
        self._cwd = shell.cwd() or self._cwd
        members = session_members(shell.pid)
        send_signal((p.pid for p in members), signal.SIGKILL)
        running.timer = self._loop.call_later(REAP_GRACE, self._discard_shell)


def _exit_code(status: int) -> int:
    """A wait status as shells show it: 128 + the signal's number where a signal ended the process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
