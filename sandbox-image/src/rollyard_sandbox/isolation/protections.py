"""The protections of the server against the commands that it starts.

Commands are hostile, and run as the server's own user. Several protections, none of which needs another,
keep them away from the server. The kernel lets no command read or trace it, because it is not dumpable. The
calls that would do so are refused to commands before the kernel looks at their arguments (`seccomp`). If the
server may make namespaces, commands run in some in which it does not exist (`command_namespaces`). If they
share control groups with nothing but the server, they run at the lowest priority, and cannot outnumber it.
"""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager

from rollyard_sandbox.isolation.seccomp import CallFilter
from rollyard_sandbox.isolation.system_calls import SET_DUMPABLE, last_error, libc, starter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

    from rollyard_sandbox.isolation.command_namespaces import CommandNamespaces, NamespaceOptions
    from rollyard_sandbox.isolation.system_calls import Calls

FAILED: Final = 78  # The exit status when the kernel refuses a protection (EX_CONFIG).
NOT_CONFINED: Final = "NotConfined"
"""The first word of the message on standard error in this case, and the `filename` of the error of a command
that could not enter the protections."""
_LOWEST: Final = 19  # setpriority(2)
# The kernel counts these for all sandboxes of one user of the machine together. Message queues are therefore
# refused. As many descriptors may be in flight on sockets as a process may have open: a worker that may have
# more can still pass some when sandboxes hold all that they can (unix(7), ETOOMANYREFS).
_LIMITS: Final = {resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_NOFILE: 4096}
# These are counted for a user namespace, too: queued signals with timers, and bytes of locked memory.
_LIMITS_OF_USERS: Final = {resource.RLIMIT_SIGPENDING: 1024, resource.RLIMIT_MEMLOCK: 64 << 10}


def limit_shared_resources(*, own_users: bool) -> None:
    """Limit what this process and its commands take of the resources that all sandboxes of a user share.

    Args:
        own_users: Whether this process has a user namespace of its own.
    """
    for number, limit in (_LIMITS | (_LIMITS_OF_USERS if own_users else {})).items():
        hard = resource.getrlimit(number)[1]
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(number, (allowed, allowed))
        except ValueError:
            continue  # A gVisor kernel refuses some of them, and has one sandbox only.


class Protections:
    """The protections of one server, which are in force as soon as this object exists.

    Args:
        filter_calls: Whether commands get the filter of system calls.
        namespaces: The options of the commands' namespaces. With None commands share those of the server.
        yielding: Whether commands have the lowest priority, so that hundreds of them leave the server its
            share of the time.

    Raises:
        OSError: The kernel refuses a protection.
    """

    def __init__(
        self, *, filter_calls: bool, namespaces: NamespaceOptions | None = None, yielding: bool = False
    ) -> None:
        self.namespaces: CommandNamespaces | None = None
        if namespaces is not None:
            from rollyard_sandbox.isolation.command_namespaces import CommandNamespaces

            self.namespaces = CommandNamespaces(namespaces)
        # A program that the server executes is an ordinary process again (prctl(2), PR_SET_DUMPABLE).
        if libc().prctl(SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise last_error("prctl(PR_SET_DUMPABLE)")
        self._filter = CallFilter() if filter_calls else None
        self._yielding = yielding

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Return a context in which a process is started that will be a command, with the calls of `add_to`.

        Raises:
            OSError: The namespaces cannot be made.
        """
        if self.namespaces is None:
            yield
            return
        starter().prepare()
        with self.namespaces.starting():
            yield

    def add_to(self, calls: Calls, cwd: str) -> None:
        """Add the calls by which a new process enters the protections, before it becomes a command in `cwd`.

        If the kernel refuses one of them, the command does not run.
        """
        calls.purpose = NOT_CONFINED
        if self.namespaces is not None:
            self.namespaces.add_to(calls, cwd)
        if self._filter is not None:
            self._filter.add_to(calls)
        if self._yielding:
            # This comes last, because the server waits until the program has begun.
            calls.add("setpriority", os.PRIO_PROCESS, 0, _LOWEST)
