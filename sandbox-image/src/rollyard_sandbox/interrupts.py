"""SIGINT for what a command runs in the foreground of its terminal, as Ctrl-C would send it."""

from __future__ import annotations

import os
import signal

from rollyard_sandbox.processes import copies_of, send_signal, with_descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.eventloop import EventLoop
    from rollyard_sandbox.shell import Shell

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


class Interrupt:
    """SIGINT, again where the foreground changes: bash forgets one that comes while it starts a job.

    So does the job itself until it has become its program: until then it has bash's handlers.

    Args:
        wanted: whether the command that is meant still runs in this shell.
    """

    def __init__(self, loop: EventLoop, shell: Shell, wanted: Callable[[], bool]) -> None:
        self._loop = loop
        self._shell = shell
        self._wanted = wanted
        self._looks_left = _REPEATS
        self._signalled = 0  # the process group that got the last one
        self._begun: frozenset[int] = frozenset()  # its processes that were still copies of the shell then

    def send(self) -> None:
        """Signals now, and looks again every tenth of a second until a program has got it."""
        shell = self._shell
        if not self._wanted():
            return
        group = shell.foreground()
        in_shell = group in (0, shell.pid)
        copies = frozenset() if in_shell else copies_of(shell.pid, group)
        if group != self._signalled:
            signal_foreground(shell, signal.SIGINT)
            if not in_shell:
                self._begun = copies | copies_of(shell.pid, group)  # it may still be forking
        else:
            # What they have started since has not got it either.
            send_signal(with_descendants(self._begun - copies), signal.SIGINT)
            self._begun &= copies
        self._signalled = group
        # One that only the shell got may be forgotten until the job is there.
        unsettled = self._begun or in_shell
        if self._looks_left > 0 or (unsettled and self._looks_left > -_MOST_REPEATS):
            self._looks_left -= 1
            self._loop.call_later(_REPEAT_AFTER, self.send)
