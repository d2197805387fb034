"""A stage before the server: inside a container that others started it makes a sandbox like bubblewrap's.

`confine` gives the server namespaces of its own, below those of the container: a user without any right, a
process table in which the server is process 1 (nothing inside can end it, or see what keeps the container),
and memory file systems of fixed sizes where programs write. It leaves the server all rights in these
namespaces: `command_namespaces` puts further ones between the server and its commands.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from rollyard_sandbox.isolation.protections import FAILED, NOT_CONFINED
from rollyard_sandbox.isolation.syscalls import BIND, NODEV, NOEXEC, NOSUID, PRIVATE, REC, Mount, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38


class Confinement:
    """What the sandbox shall look like.

    Args:
        uid: user and group that programs inside see themselves as; None where the container has a root user
            of its own (`--fakeroot`): it stays, with the rights that a container's root usually has.
        sizes: folder to (bytes, mode): a memory file system each, over whatever is there.
        aliases: folder to folder: the first shows the second, where both exist.
        read_only: mount points that nobody may write to; their submounts stay as they are.
        hostname: what `hostname` says.
    """

    __slots__ = ("aliases", "hostname", "read_only", "sizes", "uid")

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


def confine(wanted: Confinement) -> None:
    """Returns in process 1 of a new sandbox; what called it ends, and another ends the container after it.

    Exits with FAILED where the kernel refuses a part of it, and says which on standard error.
    """
    if os.fork():
        # The container's process 1 passes signals to the group of the program it started, and ends by the
        # first one that finds no group: the group is left, so that one signal is enough from now on.
        os._exit(0)
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _namespaces(libc, wanted.uid)
        child = os.fork()
        if child:
            _keep(child)
        call(libc, "prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        _mounts(libc, wanted)
        call(libc, "sethostname", wanted.hostname.encode(), len(wanted.hostname))
        call(libc, "prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr, flush=True)
        _end_container()


def clean_environment(fixed: Mapping[str, str], prefixes: Sequence[str], libraries: str) -> None:
    """Leaves of the environment what the image says: not what the container's programs have added.

    Args:
        fixed: variables that are set, whatever the image says.
        prefixes: variables that begin so are removed.
        libraries: the folder that is taken out of LD_LIBRARY_PATH.
    """
    for name in list(os.environ):
        if name.startswith(tuple(prefixes)):
            del os.environ[name]
    paths = [path for path in os.environ.pop("LD_LIBRARY_PATH", "").split(":") if path not in ("", libraries)]
    if paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join(paths)
    os.environ.update(fixed)


def _namespaces(libc: ctypes.CDLL, uid: int | None) -> None:
    user, group = os.geteuid(), os.getegid()
    own = _NEWNS | _NEWPID | _NEWIPC | _NEWUTS
    if uid is None:
        call(libc, "unshare", own)
        return
    call(libc, "unshare", own | _NEWUSER)
    maps = (("setgroups", "deny"), ("uid_map", f"{uid} {user} 1"), ("gid_map", f"{uid} {group} 1"))
    for name, text in maps:
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _keep(child: int) -> NoReturn:
    """Waits for the end of the sandbox, then ends the container."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, 1 << 16)
    os.waitpid(child, 0)
    _end_container()


def _end_container() -> NoReturn:
    if os.getpid() != 1:  # the sandbox's own process 1 just ends: its keeper does the rest
        os.kill(1, signal.SIGTERM)
    os._exit(FAILED)


def _mounts(libc: ctypes.CDLL, wanted: Confinement) -> None:
    mount = Mount(libc)
    mount("", "/", flags=REC | PRIVATE)
    # The container's /proc shows what keeps it: only a new one shows nothing but this sandbox. Commands get
    # another, which hides more.
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    for folder, (size, mode) in wanted.sizes.items():
        mount.memory(folder, size, mode)
    for alias, folder in wanted.aliases.items():
        if os.path.isdir(alias) and not os.path.islink(alias):
            mount(folder, alias, flags=BIND)
    for folder in wanted.read_only:
        if os.path.ismount(folder):
            mount.read_only(folder)
