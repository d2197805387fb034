"""SIGINT for what a command runs in the foreground of its terminal, as Ctrl-C would send it."""

from __future__ import annotations

import os
import signal

from rollyard_sandbox.execution.processes import forked_by, send_signal, with_descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.execution.event_loop import EventLoop
    from rollyard_sandbox.execution.shell import Shell

INTERRUPT_GRACE = 1.0  # seconds between SIGINT and SIGKILL
_REPEATS = 2
_MOST_REPEATS = 20  # more, while no program has got it
_REPEAT_AFTER = 0.1  # seconds


def signal_foreground(shell: Shell, number: int) -> None:
    """Signals the process group in the foreground of the shell's terminal, where there is one."""
    try:
        shell.unstick()
        group = shell.foreground()
        if group:
            os.killpg(group, number)
    except OSError:
        return  # it ended meanwhile; its end is about to be reaped


def kill_foreground_job(shell: Shell) -> bool:
    """Kills the job in the terminal's foreground; False where that is the shell itself, or nothing."""
    if shell.foreground() in (0, shell.pid):
        return False
    signal_foreground(shell, signal.SIGKILL)
    return True


class Interrupt:
    """SIGINT, again where the foreground changes: bash forgets one that comes while it starts a job.

    So does the job itself until it has become its program: until then it has bash's handlers. And the second
    program of a pipeline may be started when the first one has got it.

    Args:
        wanted: whether the command that is meant still runs in this shell.
        spare_shell: signal jobs only, and look for them as long as it is wanted.
    """

    def __init__(
        self, loop: EventLoop, shell: Shell, wanted: Callable[[], bool], *, spare_shell: bool = False
    ) -> None:
        self._loop = loop
        self._shell = shell
        self._wanted = wanted
        self._spare_shell = spare_shell
        self._looks_left = _REPEATS
        self._signalled = 0  # the process group that got the last one
        self._groups: set[int] = set()  # of jobs that got one
        self._got: set[int] = set()  # programs of theirs that did
        self._begun: set[int] = set()  # processes that were still copies of the shell then

    def send(self) -> None:
        """Signals now, and looks again every tenth of a second until all programs of the job have got it."""
        if not self._wanted():
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
        """Signals whom it takes now; whether somebody may still have missed it."""
        shell = self._shell
        first = group != self._signalled
        # A shell that is about to start a job is signalled before it does, where that is still possible.
        copies, programs = ({}, {}) if first and in_shell else forked_by(shell.pid)
        if first:
            self._signal(group, in_shell, copies, programs)
        else:
            self._reach_late(copies, programs)
        # One that only the shell got may be forgotten until the job is there; a job that is gone may be
        # the first program of a pipeline.
        return bool(self._begun) or in_shell or group not in programs.values()

    def _signal(self, group: int, in_shell: bool, copies: dict[int, int], programs: dict[int, int]) -> None:
        shell = self._shell
        signal_foreground(shell, signal.SIGINT)
        copies = {**copies, **forked_by(shell.pid)[0]}  # it may still be forking
        begun = {pid: of for pid, of in copies.items() if in_shell or of == group}
        self._begun.update(begun)
        self._got.update(pid for pid, of in programs.items() if of == group)
        # A job's group has the pid of its first process, which may not have joined it yet.
        self._groups.update({group, *begun, *begun.values()} - {0, shell.pid})

    def _reach_late(self, copies: dict[int, int], programs: dict[int, int]) -> None:
        """Signals what has become a program, or has joined a job, since the job got its SIGINT."""
        late = self._begun.difference(copies)
        late.update(pid for pid, of in programs.items() if of in self._groups and pid not in self._got)
        # What they have started since has not got it either.
        send_signal(with_descendants(late), signal.SIGINT)
        self._got |= late
        self._begun &= copies.keys()


class Stragglers:
    """Ends what an interrupted command left in the foreground of its terminal: SIGINT, later SIGKILL.

    Bash (5.2) that gets a SIGINT between its fork of a job and its wait for it goes back to its prompt; the
    job lives on. At the next builtin, which is that of its report, bash still believes that it is starting
    a pipeline and waits for the job: it has said that the command is over, and takes no other.

    Args:
        wanted: whether the shell has not shown yet that it is idle.
    """

    def __init__(self, loop: EventLoop, shell: Shell, wanted: Callable[[], bool]) -> None:
        self._loop = loop
        self._shell = shell
        self._wanted = wanted
        Interrupt(loop, shell, wanted, spare_shell=True).send()
        loop.call_later(INTERRUPT_GRACE, self._kill)

    def _kill(self) -> None:
        if not self._wanted():
            return
        kill_foreground_job(self._shell)
        self._loop.call_later(_REPEAT_AFTER, self._kill)
