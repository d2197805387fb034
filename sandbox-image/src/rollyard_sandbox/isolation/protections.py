"""What stands between the server and the commands that it starts.

Commands are hostile, and run as the server's own user. Several walls keep them from it, none of which needs
another: the kernel lets no command read or trace the server (it is not dumpable), the calls that would do so
are refused to commands before the kernel looks at their arguments (`callfilter`), and where the server may
make namespaces, commands run in some in which it does not exist (`border`).
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager

from rollyard_sandbox.isolation import signal_senders
from rollyard_sandbox.isolation.seccomp import CallFilter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollyard_sandbox.isolation.command_namespaces import Border, Inside

FAILED = 78  # exit status (EX_CONFIG)
NOT_CONFINED = "NotConfined"
"""Begins what is said on standard error then."""
_SET_DUMPABLE = 4  # linux/prctl.h


class Walls:
    """The walls of one server, which begin to stand when this is made.

    Args:
        filter_calls: whether commands get the filter of system calls.
        inside: what commands find beyond a border; None: there is no border.

    Raises:
        OSError: the kernel refuses a wall.
    """

    def __init__(self, *, filter_calls: bool, inside: Inside | None = None) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.border: Border | None = None
        if inside is not None:
            from rollyard_sandbox.isolation.command_namespaces import Border

            self.border = Border(libc, inside)
        # What the server executes from now on is an ordinary process again (prctl(2), PR_SET_DUMPABLE).
        if libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
        self._filter = CallFilter(libc) if filter_calls else None

    @contextmanager
    def across(self) -> Iterator[None]:
        """What is forked in the meantime will be a command; it has to call `enter`.

        Raises:
            OSError: the border cannot be put up again.
        """
        if self.border is None:
            yield
            return
        with self.border.across():
            yield

    def descriptors(self) -> tuple[int, ...]:
        """What `enter` needs open in the child; programs that are executed do not inherit them."""
        return () if self.border is None else self.border.descriptors()

    def enter(self, cwd: str) -> None:
        """In a forked child, just before it becomes a command in the folder `cwd`.

        Raises:
            OSError: the kernel refuses a wall; the command must not run.
        """
        signal_senders.unblock()
        if self.border is not None:
            self.border.enter(cwd)
        if self._filter is not None:
            self._filter.install()
