"""Sending SIGINT to what a command runs in the foreground of its terminal, as Ctrl-C would."""

from __future__ import annotations

import os
import signal

from rollyard_sandbox.execution.processes import forked_by, send_signal, with_descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from rollyard_sandbox.execution.event_loop import EventLoop
    from rollyard_sandbox.execution.shell import Shell

INTERRUPT_GRACE: Final = 1.0  # The seconds between SIGINT and SIGKILL.
_REPEATS: Final = 2
_MOST_REPEATS: Final = 20  # The limit of further repeats while a program may have missed the signal.
_REPEAT_AFTER: Final = 0.1  # seconds


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
