"""A stage before the server, which makes a sandbox like bubblewrap's inside a container that others started.

`confine` gives the server namespaces of its own, below those of the container. They have a user without any
right, a process table in which the server is process 1 (nothing inside can end it, or see the processes that
manage the container), and memory file systems of fixed sizes where programs write. The server keeps all
rights in these namespaces; `command_namespaces` puts further ones between the server and its commands.
"""

from __future__ import annotations

import os
import signal
import sys

from rollyard_sandbox.isolation.protections import FAILED, NOT_CONFINED
from rollyard_sandbox.isolation.system_calls import (
    BIND,
    NEWIPC,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    NODEV,
    NOEXEC,
    NOSUID,
    PRIVATE,
    REC,
    SET_NO_NEW_PRIVS,
    SET_PDEATHSIG,
    call,
    map_users,
    mount,
    mount_memory,
    mount_read_only,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn


class Confinement:
    """The wanted properties of a sandbox.

    Args:
        uid: The user and group that programs inside see themselves as. None if the container has a root user
            of its own (`--fakeroot`), which stays, with the rights that a container's root usually has.
        sizes: A map from a folder to (bytes, mode). Each folder is covered by a memory file system.
        aliases: A map from a folder to the folder that it shows, if both exist.
        read_only: The mount points to which no program may write. Their submounts stay as they are.
        hostname: The name that `hostname` prints.
    """

    def __init__(
        self,
        *,
        uid: int | None,
        sizes: Mapping[str, tuple[int, int]],
        aliases: Mapping[str, str],
        read_only: Sequence[str],
        hostname: str,
    ) -> None:
        self.uid = uid
        self.sizes = sizes
        self.aliases = aliases
        self.read_only = read_only
        self.hostname = hostname


def confine(confinement: Confinement) -> None:
    """Make a new sandbox, and return in its process 1.

    The calling process ends, and another process ends the container when the sandbox has ended. If the
    kernel refuses a part of it, this exits with FAILED and reports the part on standard error.
    """
    if os.fork():
        # The container's process 1 passes signals to the group of the program that it started, and ends at
        # the first signal for which it finds no group. The group is left, so one signal is now enough.
        os._exit(0)
    os.setsid()
    try:
        _namespaces(confinement.uid)
        child = os.fork()
        if child:
            _keep(child)
        call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        _mounts(confinement)
        call("sethostname", confinement.hostname.encode(), len(confinement.hostname))
        call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr, flush=True)
        _end_container()


def clean_environment(fixed: Mapping[str, str], prefixes: Sequence[str], libraries: str) -> None:
    """Reduce the environment to what the image sets, without what the container's programs have added.

    Args:
        fixed: The variables that are set, whatever the image says.
        prefixes: The prefixes of the variables that are removed.
        libraries: The folder that is removed from LD_LIBRARY_PATH.
    """
    for name in list(os.environ):
        if name.startswith(tuple(prefixes)):
            del os.environ[name]
    paths = [path for path in os.environ.pop("LD_LIBRARY_PATH", "").split(":") if path not in ("", libraries)]
    if paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join(paths)
    os.environ.update(fixed)


def _namespaces(uid: int | None) -> None:
    user, group = os.geteuid(), os.getegid()
    own = NEWNS | NEWPID | NEWIPC | NEWUTS
    if uid is None:
        call("unshare", own)
        return
    call("unshare", own | NEWUSER)
    map_users("self", user, group, uid)


def _keep(child: int) -> NoReturn:
    """Wait for the end of the sandbox, then end the container."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, 1 << 16)
    os.waitpid(child, 0)
    _end_container()


def _end_container() -> NoReturn:
    if os.getpid() != 1:  # The sandbox's own process 1 only ends, and its keeper does the rest.
        os.kill(1, signal.SIGTERM)
    os._exit(FAILED)


def _mounts(confinement: Confinement) -> None:
    mount("", "/", flags=REC | PRIVATE)
    # The container's /proc shows the processes that manage it. A new /proc shows this sandbox only. Commands
    # get another one, which hides more.
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    for folder, (size, mode) in confinement.sizes.items():
        mount_memory(folder, size, mode)
    for alias, folder in confinement.aliases.items():
        if os.path.isdir(alias) and not os.path.islink(alias):
            mount(folder, alias, flags=BIND)
    for folder in confinement.read_only:
        if os.path.ismount(folder):
            mount_read_only(folder)
