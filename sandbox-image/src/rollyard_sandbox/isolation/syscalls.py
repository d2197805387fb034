"""The system calls that the standard library lacks: mounts, rights and System V objects.

See mount(2), capabilities(7) and sysvipc(7).
"""

from __future__ import annotations

import ctypes
import os
import resource
from array import array
from functools import cache

from rollyard_sandbox.isolation.system_calls import Calls, libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Final

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 1 << 14, 1 << 18
# statvfs(3) reports these mount flags with the numbers of mount(2), and ST_RELATIME with another number.
_SAME, _ST_RELATIME, _RELATIME = 2 | 4 | 8 | 1024 | 2048, 4096, 1 << 21
_DETACH: Final = 2
_IPC_RMID: Final = 0  # linux/ipc.h
_CAPBSET_DROP: Final = 24
_CAPABILITIES: Final = 64  # A kernel's sets have room for so many.
_CAPABILITY_VERSION_3: Final = 0x20080522


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library.

    Raises:
        OSError: The function did not return 0.
    """
    if getattr(libc(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        shown = ", ".join(a.decode(errors="replace") for a in arguments if isinstance(a, bytes))
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")


def set_in_proc(name: str, text: str) -> None:
    """Write to a file of /proc with which a setting of the kernel is changed.

    Raises:
        OSError: The kernel refuses it.
    """
    # A file object would take longer than the writing.
    file = os.open(f"/proc/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def drop_rights(capabilities: frozenset[int]) -> None:
    """Restrict the calling process, and the programs that it executes, to some capabilities.

    Args:
        capabilities: The numbers of the capabilities, which are below 32.
    """
    for capability in range(_CAPABILITIES):
        if capability not in capabilities and libc().prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # The kernel knows no further ones.
    limit_rights(capabilities)


@cache
def dropped_rights(capabilities: frozenset[int]) -> Calls:
    """Return the calls with which a new process restricts itself as `drop_rights` does.

    They are the same for each, so they are made once for this process and those that are forked from it.

    Args:
        capabilities: The numbers of the capabilities, which are below 32.
    """
    calls = Calls()
    for capability in range(_CAPABILITIES):
        if capability not in capabilities:
            # The kernel knows fewer than these, and refuses those that it does not know.
            calls.add("prctl", _CAPBSET_DROP, capability, 0, 0, 0, may_fail=True)
    calls.add("capset", *capability_sets(capabilities))
    return calls


def limit_rights(capabilities: frozenset[int]) -> None:
    """Restrict the calling process to some capabilities (numbers below 32), with none inheritable."""
    header, data = capability_sets(capabilities)
    call("capset", *(ctypes.c_void_p(part.buffer_info()[0]) for part in (header, data)))


def capability_sets(
    capabilities: frozenset[int], *, inheritable: bool = False
) -> tuple[array[int], array[int]]:
    """Return the two arguments of capset(2) for some capabilities.

    Args:
        capabilities: The numbers of the capabilities, which are below 32.
        inheritable: Whether they are inheritable, too. Otherwise none is.
    """
    low = sum(1 << number for number in capabilities)
    header = array("I", (_CAPABILITY_VERSION_3, 0))
    # The effective, permitted and inheritable sets are given for the first 32, then for the others.
    return header, array("I", (low, low, low if inheritable else 0, 0, 0, 0))


def remove_segments() -> None:
    """Remove all shared memory segments, semaphores and message queues of the process's ipc namespace.

    They outlive the processes that made them.

    Raises:
        OSError: One of them may not be removed.
    """
    for kind, name, none in (("shm", "shmctl", ()), ("sem", "semctl", (0,)), ("msg", "msgctl", ())):
        try:
            with open(f"/proc/sysvipc/{kind}", encoding="ascii") as file:
                rows = file.read().splitlines()[1:]
        except FileNotFoundError:
            continue  # The kernel was built without them.
        for row in rows:
            call(name, int(row.split()[1]), *none, _IPC_RMID, None)


MAX_TERMINALS: Final = 64
"""The number of pseudo-terminals that a sandbox may have open at once. Each shell has one."""


def own_flags(folder: str) -> int:
    """Return the restrictions of a mount, in the flags of mount(2).

    A mount that was made elsewhere keeps them, so they must be named again when it is changed.
    """
    now = os.statvfs(folder).f_flag
    return (now & _SAME) | (_RELATIME if now & _ST_RELATIME else 0)


def proc_mounts(hidden: Iterable[str]) -> list[tuple[str, str, str, int, str]]:
    """Return the mounts of a new /proc, which shows nothing of the machine, as the arguments of `mount`.

    Args:
        hidden: The names below /proc that shall show nothing. Missing ones are skipped.
    """
    own = NOSUID | NODEV | NOEXEC
    mounts = [("proc", "/proc", "proc", own, "")]
    for name in hidden:
        path = f"/proc/{name}"
        if os.path.isdir(path):
            mounts.append(("tmpfs", path, "tmpfs", RDONLY | NOSUID | NODEV, "size=4096"))
        elif os.path.exists(path):
            mounts.append((os.devnull, path, "", BIND, ""))
            mounts.append(("", path, "", REMOUNT | BIND | RDONLY | NODEV | own_flags(os.devnull), ""))
    # This is needed even if we are the machine's uid 0, which owns the files in them.
    for name in ("sys", "irq", "bus", "sysrq-trigger", "pressure"):
        path = f"/proc/{name}"
        if os.path.exists(path):
            mounts.append((path, path, "", BIND | REC, ""))
            mounts.append(("", path, "", REMOUNT | BIND | RDONLY | own | _RELATIME, ""))
    return mounts


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Make or change a mount; see mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode() or None)
    call("mount", *arguments, ctypes.c_ulong(flags), options.encode() or None)


def mount_read_only(folder: str, further: int = 0) -> None:
    """Make a mount read-only, with the flags `further`."""
    mount("", folder, flags=REMOUNT | BIND | RDONLY | own_flags(folder) | further)


def mount_proc(hidden: Iterable[str]) -> None:
    """Mount a /proc of the calling process's own pid namespace (see `proc_mounts`)."""
    for arguments in proc_mounts(hidden):
        mount(*arguments)


def mount_memory(folder: str, size: int, mode: int) -> None:
    """Mount a new memory file system of `size` bytes over a folder.

    It has room for one file per page, because files without content take memory of the kernel only.
    """
    inodes = size // resource.getpagesize()
    mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, f"size={size},nr_inodes={inodes},mode={mode:o}")


def mount_terminals() -> None:
    """Mount new pseudo-terminals over /dev/pts, of which there are at most MAX_TERMINALS.

    A container's own ones may be shared with the machine, and are limited for all sandboxes together only
    (kernel.pty.max), so one sandbox could leave none to the others. Nothing happens without a /dev/pts.
    """
    if os.path.isdir("/dev/pts"):
        options = f"newinstance,ptmxmode=0666,mode=620,max={MAX_TERMINALS}"
        mount("devpts", "/dev/pts", "devpts", NOSUID | NOEXEC, options)


def unmount(folder: str) -> None:
    """Remove the topmost mount of a folder."""
    call("umount2", folder.encode(), _DETACH)
