"""A bash session, which runs one command at a time, enforces its deadline and interrupts it.

A session is one state machine:

* dead: there is no bash. A command starts one (starting).
* starting: bash has not reported yet. Its first report makes it idle.
* idle: bash waits for a command, which makes it busy.
* busy: bash runs the command. Its report makes it idle; a SIGINT is sent (interrupted).
* interrupted: bash runs the command, and a SIGINT may be pending in it. The report makes it settling.
  A report with another number shows that the command was interrupted before bash took it (withdrawn).
* settling: bash acts on what is left of a SIGINT. Its report of the last probe makes it idle.
* withdrawn: as settling, but the report of the last probe ends the command, and bash settles again. Another
  interrupt ends the command at once (resettling).
* resettling: as settling, but another SIGINT may have come, and bash settles again.

A command that comes while bash is starting, settling or resettling waits until it is idle. A lost shell makes
every state dead.
"""

from __future__ import annotations

import os
import signal
from enum import Enum
from time import monotonic

from rollyard_sandbox.errors import BadRequest, LaunchError, SandboxError
from rollyard_sandbox.execution.commands import Capture, Command, Outcome
from rollyard_sandbox.execution.event_loop import READ, WRITE
from rollyard_sandbox.execution.processes import (
    exit_code,
    forked_by,
    kill_session,
    send_signal,
    with_descendants,
)
from rollyard_sandbox.execution.shell import Report, Shell, parse_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from rollyard_sandbox.execution.event_loop import EventLoop
    from rollyard_sandbox.isolation.protections import Protections

START_LIMIT: Final = 10.0  # The seconds that bash has to report for the first time, and after an interrupt.
INTERRUPT_GRACE: Final = 1.0  # The seconds between SIGINT and SIGKILL.
_REPEATS: Final = 2
_MOST_REPEATS: Final = 20  # The limit of further repeats while a program may have missed the signal.
_REPEAT_AFTER: Final = 0.1  # seconds
KILL_GRACE: Final = 0.5  # The seconds between killing the foreground and killing the shell.
REAP_GRACE: Final = 2.0  # The seconds that a killed shell has to end.
IDLE_OUTPUT: Final = 64 * 1024  # The bytes that are kept of what background jobs print between commands.
_INTERRUPTED: Final = 128 + signal.SIGINT
_AT_INTERRUPT: Final = b"\n"  # Bash prints this when it acts on a SIGINT at its prompt.
_INPUT_BACKLOG: Final = 1024 * 1024  # bytes of unread input
_READ: Final = 65536
_DRAIN_LIMIT: Final = 256 * 1024  # bytes that are read after a report; a terminal buffers less


def signal_foreground(shell: Shell, number: int) -> None:
    """Signal the process group in the foreground of the shell's terminal, if there is one."""
    try:
        shell.unstick()
        group = shell.foreground()
        if group:
            os.killpg(group, number)
    except OSError:
        return  # It ended meanwhile and is about to be reaped.


def kill_foreground_job(shell: Shell) -> bool:
    """Kill the job in the terminal's foreground.

    Returns:
        False if the foreground is the shell itself, or empty.
    """
    if shell.foreground() in (0, shell.pid):
        return False
    signal_foreground(shell, signal.SIGKILL)
    return True


class Interrupt:
    """A SIGINT for a command, which is sent again when the foreground changes.

    It is repeated because bash forgets a SIGINT that comes while it starts a job. So does the job itself
    until it has become its program, because until then it has bash's handlers. Moreover, the second program
    of a pipeline may be started after the first one has received the signal.

    Args:
        is_wanted: Returns whether the command in question still runs in this shell.
        spare_shell: Whether to signal jobs only, and to look for them as long as `is_wanted` returns True.
    """

    def __init__(
        self, loop: EventLoop, shell: Shell, is_wanted: Callable[[], bool], *, spare_shell: bool = False
    ) -> None:
        self._loop = loop
        self._shell = shell
        self._is_wanted = is_wanted
        self._spare_shell = spare_shell
        self._looks_left = _REPEATS
        self._signalled = 0  # The process group that was signalled last.
        self._groups: set[int] = set()  # The process groups of the jobs that were signalled.
        self._got: set[int] = set()  # The programs of these jobs that received the signal.
        self._begun: set[int] = set()  # The processes that were still copies of the shell at that time.

    def send(self) -> None:
        """Signal now, and look again every tenth of a second until all programs of the job are signalled."""
        if not self._is_wanted():
            return
        group = self._shell.foreground()
        in_shell = group in (0, self._shell.pid)
        unsettled = True
        if not (in_shell and self._spare_shell):
            unsettled = self._look(group, in_shell)
        self._signalled = group
        looks_left = self._looks_left > 0 or (unsettled and self._looks_left > -_MOST_REPEATS)
        if looks_left or self._spare_shell:
            self._looks_left -= 1
            self._loop.call_later(_REPEAT_AFTER, self.send)

    def _look(self, group: int, in_shell: bool) -> bool:
        """Signal the processes that need it now, and return whether one may still have missed the signal."""
        shell = self._shell
        first = group != self._signalled
        # A shell that is about to start a job is signalled before it does so, if that is still possible.
        copies, programs = ({}, {}) if first and in_shell else forked_by(shell.pid)
        if first:
            self._signal(group, in_shell, copies, programs)
        else:
            self._reach_late(copies, programs)
        # The shell may forget a SIGINT that only it has received before the job exists. A job that is gone
        # may have been the first program of a pipeline.
        return bool(self._begun) or in_shell or group not in programs.values()

    def _signal(self, group: int, in_shell: bool, copies: dict[int, int], programs: dict[int, int]) -> None:
        shell = self._shell
        signal_foreground(shell, signal.SIGINT)
        copies = {**copies, **forked_by(shell.pid)[0]}  # The shell may still be forking.
        begun = {pid: of for pid, of in copies.items() if in_shell or of == group}
        self._begun.update(begun)
        self._got.update(pid for pid, of in programs.items() if of == group)
        # A job's group has the pid of its first process, which may not have joined the group yet.
        self._groups.update({group, *begun, *begun.values()} - {0, shell.pid})

    def _reach_late(self, copies: dict[int, int], programs: dict[int, int]) -> None:
        """Signal the processes that have become programs, or have joined a job, since its SIGINT."""
        late = self._begun.difference(copies)
        late.update(pid for pid, of in programs.items() if of in self._groups and pid not in self._got)
        # The processes that they have started since have not received the signal either.
        send_signal(with_descendants(late), signal.SIGINT)
        self._got |= late
        self._begun &= copies.keys()


class Stragglers:
    """The jobs that an interrupted command left in the foreground; they are ended by SIGINT, then SIGKILL.

    If bash (5.2) receives a SIGINT between its fork of a job and its wait for it, it returns to its prompt,
    and the job survives. At the next builtin, which is that of its report, bash still believes that it is
    starting a pipeline and waits for the job. It has then reported the end of the command, but it accepts no
    other command.

    Args:
        is_wanted: Returns True as long as the shell has not shown that it is idle.
    """

    def __init__(self, loop: EventLoop, shell: Shell, is_wanted: Callable[[], bool]) -> None:
        self._loop = loop
        self._shell = shell
        self._is_wanted = is_wanted
        Interrupt(loop, shell, is_wanted, spare_shell=True).send()
        loop.call_later(INTERRUPT_GRACE, self._kill)

    def _kill(self) -> None:
        if not self._is_wanted():
            return
        kill_foreground_job(self._shell)
        self._loop.call_later(_REPEAT_AFTER, self._kill)


class _State(Enum):
    DEAD = "dead"
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    INTERRUPTED = "interrupted"
    SETTLING = "settling"
    WITHDRAWN = "withdrawn"
    RESETTLING = "resettling"


_RUNNING: Final = (_State.BUSY, _State.INTERRUPTED)


class _Probes:
    """Empty lines for an idle shell, which are repeated until it has reported the last of them.

    A SIGINT that came as the last command ended may still be pending in bash. Bash then drops the number, or
    the line, that it reads next, and a command would never begin. An empty line can be dropped and sent
    again.

    Raises:
        OSError: The shell is gone. `is_over` raises this, too.
    """

    def __init__(self, shell: Shell, next_number: Callable[[], str]) -> None:
        self._shell = shell
        self._next_number = next_number
        self._numbers: list[str] = []
        shell.forget_input()
        self._send()

    def _send(self) -> None:
        self._numbers.append(self._next_number())
        self._shell.probe(self._numbers[-1])

    def is_over(self, number: str) -> bool:
        """Return whether a report with `number` means that the shell waits for a command and nothing else."""
        if number == self._numbers[-1]:
            return True
        if number in self._numbers:
            self._numbers.remove(number)  # The shell reads the next number.
        else:
            self._send()  # The shell began its prompt again, perhaps without the number that it had read.
        return False


class BashSession:
    """A named, persistent bash.

    Its state (directory, variables, functions, jobs) lives in the shell. When the shell is lost, the next
    command gets a new one in the same directory. What background jobs print between two commands (its first
    and last 32 KiB) is shown at the head of the next command's output.

    Args:
        cwd: The directory in which the first shell starts.
    """

    def __init__(
        self, loop: EventLoop, name: str, cwd: str, environment: dict[str, str], protections: Protections
    ) -> None:
        self.name = name
        self._loop = loop
        self._home = cwd
        self._cwd = cwd
        self._environment = environment
        self._protections = protections
        self._state = _State.DEAD
        self._shell: Shell | None = None  # None if and only if the state is dead.
        self._command: Command | None = None  # The command that runs, or that waits for the shell.
        self._queued: Command | None = None  # The command that waits for the end of a cancelled one.
        self._probes: _Probes | None = None
        self._farewell: Report | None = None
        self._count = 0
        self._idle_output = Capture(IDLE_OUTPUT)
        self._input = bytearray()
        self._lost_state = False  # Whether a shell was lost since the last command ended.

    @property
    def busy(self) -> bool:
        """Return whether a command is running."""
        return self._command is not None

    @property
    def pid(self) -> int | None:
        """Return the shell's pid, or None if there is no shell now."""
        return self._shell.pid if self._shell else None

    def execute(self, command: Command) -> None:
        """Run `command`, whose `done` is called once, at the latest a few seconds after its timeout.

        While a cancelled command is being stopped, the one that follows it waits.

        Raises:
            BadRequest: Another command is running (reason SessionBusy).
            LaunchError: No shell could be started.
        """
        if self._command is None and self._queued is None:
            self._begin(command)
        elif self._command is not None and self._command.cancelled and self._queued is None:
            self._queued = command
        else:
            raise BadRequest(f"session {self.name!r} is running another command", reason="SessionBusy")

    def send_input(self, data: bytes) -> None:
        """Type `data` on the terminal of the running command.

        Raises:
            BadRequest: No command is running (reason NoCommandRunning).
            SandboxError: More than 1 MiB is waiting to be read (reason InputBacklog).
        """
        if self._state not in _RUNNING:
            raise BadRequest(
                f"session {self.name!r} runs no command that could read input", reason="NoCommandRunning"
            )
        if len(self._input) + len(data) > _INPUT_BACKLOG:
            raise SandboxError("the program does not read its input: 1 MiB is waiting", reason="InputBacklog")
        self._input += data
        self._write_input()

    def interrupt(self) -> None:
        """Send SIGINT to the foreground of the terminal, like Ctrl-C.

        Raises:
            BadRequest: No command is running (reason NoCommandRunning).
        """
        if self._command is None:
            raise BadRequest(f"session {self.name!r} runs no command", reason="NoCommandRunning")
        if self._state in _RUNNING:
            self._interrupt(self._command)
        else:
            self._finish(_INTERRUPTED)  # The shell does not listen yet, so the command does not begin at all.

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
        """Kill the shell and every process of its session. A running command ends as `killed`.

        The next shell starts where the session began, and its first command reports no loss.
        """
        self.expect_kill()
        self._drain()
        self._discard()
        self._cwd = self._home
        self._lost_state = False

    # The methods below start and end the shell.

    def _start(self) -> None:
        """Start a shell.

        Raises:
            LaunchError: It cannot be started.
        """
        if not os.path.isdir(self._cwd):
            self._cwd = self._home
        shell = self._shell = Shell.spawn(self._cwd, self._environment, self._protections)
        self._state = _State.STARTING
        self._farewell = None
        self._loop.watch(shell.channel.fileno(), self._channel_ready)
        self._loop.watch(shell.master, self._terminal_ready)
        self._loop.on_exit(shell.pid, self._exited)

    def _discard(self, status: int | None = None) -> None:
        """Forget the shell. Its processes are killed, unless it has ended with the wait status `status`."""
        shell = self._shell
        if shell is None:
            return
        self._shell = None
        self._state = _State.DEAD
        self._probes = None
        self._lost_state = True
        self._input.clear()
        if status is None:
            kill_session(shell.pid)
            send_signal((shell.pid,), signal.SIGKILL)
            self._loop.forget_child(shell.pid)  # The loop reaps it without calling back.
        self._loop.unwatch(shell.channel.fileno())
        self._loop.unwatch(shell.master)
        shell.close()
        if self._command is not None:
            self._finish(None if status is None else exit_code(status))

    def _note_directory(self) -> None:
        """Remember the shell's working directory, as far as it is known. The next shell starts in it."""
        if self._shell is not None:
            self._cwd = self._shell.cwd() or self._cwd

    def _exited(self, status: int) -> None:
        shell = self._shell
        if shell is None:
            return
        self._read_farewell(shell)
        self._drain()
        if self._farewell is not None and self._farewell.cwd:
            self._cwd = self._farewell.cwd
        if self._state is _State.STARTING and self._command is not None:
            self._fail(LaunchError(f"bash ended before it was ready: {self._idle_text()}"))
        self._discard(status)

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
        shell = self._shell
        if shell is None:
            return
        fresh = shell.is_fresh_shell()
        if fresh is None:
            self._loop.call_later(0.01, self._judge_exec)
        elif fresh:
            # After `exec bash` our own new shell takes its place, with the same environment and directory.
            self._note_directory()
            inherited = shell.environment()
            if inherited is not None:
                self._environment = {**inherited, "PS1": "", "PS2": ""}
            self._drain()
            if self._command is not None:
                self._finish(0, replaced=True)
                self._discard()
                self._lost_state = False  # The result reports the loss already.
            else:
                self._discard()
        elif self._command is None:
            self._discard()
        # Otherwise it was `exec program`, and the command ends when the program does.

    # The methods below begin and end a command.

    def _begin(self, running: Command) -> None:
        if self._shell is not None and not self._shell.reads_terminal():
            self._discard()
        if self._shell is None:
            self._start()
        self._command = running
        if self._state is _State.IDLE:
            self._dispatch(running)
        else:
            running.timer = self._loop.call_later(START_LIMIT, self._time_out)

    def _begin_queued(self) -> None:
        running, self._queued = self._queued, None
        if running is not None:
            self._begin_or_fail(running)

    def _begin_again(self, running: Command) -> None:
        """Give a new shell, in the same directory, to a command that waits for one that hangs."""
        self._command = None
        self._note_directory()
        self._discard()
        self._begin_or_fail(running)

    def _begin_or_fail(self, running: Command) -> None:
        try:
            self._begin(running)
        except SandboxError as error:
            running.done(error)

    def _dispatch(self, running: Command) -> None:
        shell = self._shell
        assert shell is not None
        self._state = _State.BUSY
        idle, _ = self._idle_output.finish()
        if idle:
            self._idle_output = Capture(IDLE_OUTPUT)
            self._printed(running, idle)
        if running.timer is not None:
            running.timer.cancel()
        running.timer = self._loop.call_later(running.timeout, self._time_out)
        running.started = monotonic()
        running.number = self._next_number()
        try:
            shell.run(running.command, running.number, reads_input=running.reads_input)
        except OSError:
            # The shell died between two commands and has not been reaped yet.
            self._discard()

    def _finish(self, exit_code: int | None, *, replaced: bool = False) -> None:
        """End the command, whose shell is the caller's to discard if `replaced` (by `exec bash`) is True."""
        running = self._command
        assert running is not None
        self._command = None
        if running.timer is not None:
            running.timer.cancel()
        self._forget_input()
        outcome = running.outcome
        outcome.seconds = monotonic() - running.started
        outcome.exit_code = exit_code
        outcome.output, outcome.truncated_bytes = running.capture.finish()
        if not replaced:
            self._note_directory()
        outcome.cwd = self._cwd
        outcome.shell_restarted = self._lost_state or replaced
        self._lost_state = False
        if self._state is _State.WITHDRAWN:
            self._state = _State.RESETTLING  # The command may have been signalled while the shell settled.
        elif self._state is _State.BUSY or replaced:
            self._state = _State.IDLE
        elif self._state is _State.INTERRUPTED:
            self._settle()
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

    # The methods below read the shell's reports.

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
            self._reported(report)

    def _reported(self, report: Report) -> None:
        running = self._command
        if self._state in _RUNNING:
            assert running is not None
            if report.number == running.number:
                self._drain()
                self._finish(report.status)
            elif self._state is _State.INTERRUPTED:
                # The interrupt came before the shell took the command, and the number may be lost with it.
                self._settle(_State.WITHDRAWN)
        elif self._state is not _State.IDLE and self._is_settled(report.number):
            self._became_ready()

    def _is_settled(self, number: str) -> bool:
        try:
            return self._probes is None or self._probes.is_over(number)
        except OSError:
            self._discard()
            return False

    def _became_ready(self) -> None:
        self._drain()
        if self._state is _State.STARTING or self._idle_output.finish()[0] == _AT_INTERRUPT:
            self._idle_output = Capture(IDLE_OUTPUT)  # Bash itself printed this, not a job.
        self._probes = None
        if self._state is _State.WITHDRAWN:
            self._state = _State.INTERRUPTED
            self._finish(_INTERRUPTED)
        elif self._state is _State.RESETTLING:
            self._settle()
        else:
            self._state = _State.IDLE
            if self._command is not None:
                self._dispatch(self._command)

    def _settle(self, state: _State = _State.SETTLING) -> None:
        """Let the shell, which is ready, act on a SIGINT that may be pending in it."""
        shell = self._shell
        assert shell is not None
        self._state = state
        try:
            probes = self._probes = _Probes(shell, self._next_number)
        except OSError:
            self._discard()
        else:

            def unsettled() -> bool:
                return self._shell is shell and self._probes is probes

            def expire() -> None:
                # A command that waits has a limit of its own.
                if unsettled() and self._command is None:
                    self._note_directory()
                    self._discard()

            Stragglers(self._loop, shell, unsettled)
            self._loop.call_later(START_LIMIT, expire)

    def _next_number(self) -> str:
        self._count += 1
        return f"{self._count:08d}"[-8:]

    # The methods below enforce a deadline: they interrupt, then kill the foreground, then kill the shell.

    def _time_out(self) -> None:
        running = self._command
        if running is None:
            return
        if self._state is _State.STARTING:
            self._fail(LaunchError(f"bash was not ready in time: {self._idle_text()}"))
            self._discard()
        elif self._state in (_State.SETTLING, _State.RESETTLING):
            self._begin_again(running)
        else:
            running.outcome.timed_out = True
            self._stop_command()

    def _stop_command(self) -> None:
        running = self._command
        assert running is not None
        if running.timer is not None:
            running.timer.cancel()
        if self._state in _RUNNING:
            self._interrupt(running)
            running.timer = self._loop.call_later(INTERRUPT_GRACE, self._kill_foreground)
        else:
            self._discard()

    def _interrupt(self, running: Command) -> None:
        shell = self._shell
        assert shell is not None
        self._state = _State.INTERRUPTED
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
        running, shell = self._command, self._shell
        if running is None or shell is None:
            return
        self._note_directory()
        kill_session(shell.pid)
        running.timer = self._loop.call_later(REAP_GRACE, self._discard)

    # The methods below read and write the terminal.

    def _printed(self, running: Command, data: bytes) -> None:
        running.capture.add(data)
        if running.on_output is not None:
            running.on_output(data)

    def _idle_text(self) -> str:
        """Return what was printed since the last command, as text for a message."""
        return self._idle_output.finish()[0].decode(errors="replace").strip()

    def _forget_input(self) -> None:
        """Drop the input that no program has read."""
        if self._input and self._shell is not None:
            self._input.clear()
            self._loop.change(self._shell.master, READ)

    def _drain(self) -> None:
        """Read what the terminal holds now, up to a limit."""
        shell, total = self._shell, 0
        while shell is not None and total < _DRAIN_LIMIT:
            count = self._read_terminal(shell)
            if not count:
                return
            total += count

    def _terminal_ready(self, events: int) -> None:
        shell = self._shell
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
        if self._command is not None and self._state in _RUNNING:
            self._printed(self._command, data)
        else:
            self._idle_output.add(data)
        return len(data)

    def _write_input(self) -> None:
        shell = self._shell
        assert shell is not None
        try:
            written = os.write(shell.master, self._input) if self._input else 0
        except BlockingIOError:
            written = 0  # The program does not read now. The rest is written when it does.
        del self._input[:written]
        self._loop.change(shell.master, READ | WRITE if self._input else READ)
