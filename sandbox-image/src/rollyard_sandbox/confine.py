"""A stage before the server: inside a container that others started it makes a sandbox like bubblewrap's.

`confine` gives the server namespaces of its own, below those of the container: a user without any right, a
process table in which the server is process 1 (nothing inside can end it, or see what keeps the container),
and memory file systems of fixed sizes where programs write. User namespaces are refused from then on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

FAILED = 78  # exit status (EX_CONFIG)
NOT_CONFINED = "NotConfined"
"""Begins what is said on standard error then."""
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 1 << 14, 1 << 18
# statvfs(3) gives these mount flags with mount(2)'s own numbers, and ST_RELATIME with another.
_SAME, _ST_RELATIME, _RELATIME = 2 | 4 | 8 | 1024 | 2048, 4096, 1 << 21
_SET_PDEATHSIG, _CAPBSET_DROP, _SET_NO_NEW_PRIVS = 1, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522


class Confinement:
    """What the sandbox shall look like.

    Args:
        uid: user and group that programs inside see themselves as; None where the container has a root user
            of its own (`--fakeroot`): it stays, with the rights that a container's root usually has.
        sizes: folder to (bytes, mode): a memory file system each, over whatever is there.
        aliases: folder to folder: the first shows the second, where both exist.
        hidden: names of /proc that show nothing; those that are missing are left out.
        read_only: mount points that nobody may write to; their submounts stay as they are.
        hostname: what `hostname` says.
    """

    __slots__ = ("aliases", "hidden", "hostname", "read_only", "sizes", "uid")

    def __init__(
        self,
        *,
        uid: int | None,
        sizes: Mapping[str, tuple[int, int]],
        aliases: Mapping[str, str],
        hidden: Sequence[str],
        read_only: Sequence[str],
        hostname: str,
    ) -> None:
        self.uid = uid
        self.sizes = sizes
        self.aliases = aliases
        self.hidden = hidden
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
        _call(libc, "prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        _mounts(libc, wanted)
        _call(libc, "sethostname", wanted.hostname.encode(), len(wanted.hostname))
        with open("/proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:
            file.write("0")
        _cover_settings(libc)
        _drop_rights(libc, _ROOT_KEEPS if wanted.uid is None else frozenset())
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


def _call(libc: ctypes.CDLL, name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        shown = ", ".join(a.decode(errors="replace") for a in arguments if isinstance(a, bytes))
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")


def _namespaces(libc: ctypes.CDLL, uid: int | None) -> None:
    user, group = os.geteuid(), os.getegid()
    own = _NEWNS | _NEWPID | _NEWIPC | _NEWUTS
    if uid is None:
        _call(libc, "unshare", own)
        return
    _call(libc, "unshare", own | _NEWUSER)
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
    mount = _Mount(libc)
    mount("", "/", flags=_REC | _PRIVATE)
    # The container's /proc shows what keeps it: only a new one shows nothing but this sandbox.
    mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for folder, (size, mode) in wanted.sizes.items():
        mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, f"size={size},mode={mode:o}")
    for alias, folder in wanted.aliases.items():
        if os.path.isdir(alias) and not os.path.islink(alias):
            mount(folder, alias, flags=_BIND)
    for name in wanted.hidden:
        path = f"/proc/{name}"
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", _RDONLY | _NOSUID | _NODEV, "size=4096")
        elif os.path.exists(path):
            mount(os.devnull, path, flags=_BIND)
            mount.read_only(path, _NODEV)
    for folder in wanted.read_only:
        if os.path.ismount(folder):
            mount.read_only(folder)


class _Mount:
    """mount(2)."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._libc = libc

    def __call__(self, source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
        arguments = (source.encode(), target.encode(), kind.encode() or None)
        _call(self._libc, "mount", *arguments, ctypes.c_ulong(flags), options.encode() or None)

    def read_only(self, folder: str, further: int = 0) -> None:
        """Restricts a mount; one made elsewhere keeps its own restrictions, which must be named again."""
        now = os.statvfs(folder).f_flag
        flags = (now & _SAME) | (_RELATIME if now & _ST_RELATIME else 0) | further
        self("", folder, flags=_REMOUNT | _BIND | _RDONLY | flags)


def _cover_settings(libc: ctypes.CDLL) -> None:
    mount = _Mount(libc)
    for name in ("sys", "irq", "bus", "sysrq-trigger", "pressure"):
        path = f"/proc/{name}"
        if os.path.exists(path):
            mount(path, path, flags=_BIND | _REC)
            mount.read_only(path)


# What Docker leaves to a container's root, but mknod, net_raw and audit_write: chown, dac_override, fowner,
# fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, setfcap.
_ROOT_KEEPS = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31})


def _drop_rights(libc: ctypes.CDLL, kept: frozenset[int]) -> None:
    for capability in range(64):
        if capability not in kept and libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel knows no further ones
    low = sum(1 << number for number in kept)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable: of the first 32, then of the others.
    data = (ctypes.c_uint32 * 6)(low, low, 0, 0, 0, 0)
    _call(libc, "capset", ctypes.byref(header), ctypes.byref(data))
    _call(libc, "prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
