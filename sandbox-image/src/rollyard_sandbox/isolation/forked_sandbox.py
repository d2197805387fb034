"""The namespaces of a sandbox whose process was forked from a template (see `server.template`).

The template runs in a view of the file system that bubblewrap has made, and in which nothing can be written.
A forked process gets further namespaces below those of the template: a user namespace that no other sandbox
shares, and in it all the others. What can be written and /proc are mounted afresh.
Everything that comes from the template stays locked, because the new mounts belong to the new user.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from contextlib import suppress

from rollyard_sandbox.isolation.syscalls import (
    NODEV,
    NOEXEC,
    NOSUID,
    PRIVATE,
    REC,
    call,
    drop_rights,
    mount,
    mount_memory,
    set_in_proc,
    unmount,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MOVE: Final = 8192
_SET_INTERFACE_FLAGS, _UP, _RUNNING = 0x8914, 0x1, 0x40  # ioctl SIOCSIFFLAGS; netdevice(7)
_CLONE: Final = {"x86_64": 56, "aarch64": 220}  # The number of clone(2), by the name of the processor.
_SERVER_RIGHTS: Final = frozenset({18, 21, 24, 31})  # sys_chroot, sys_admin, sys_resource, setfcap


def replace_proc(spare: str) -> None:
    """Replace the template's /proc, which shows this machine, by one of a pid namespace that has ended.

    It shows no process. The kernel lets a namespace below mount its own /proc only where one is visible
    already.

    Args:
        spare: An existing folder on which nothing is mounted.

    Raises:
        OSError: The kernel refuses it.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call("unshare", _NEWPID)
            first = os.fork()
            if first == 0:
                mount("proc", spare, "proc", NOSUID | NODEV | NOEXEC)
                os.write(write, b"+")
            else:
                os.waitpid(first, 0)
        except OSError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    words = os.read(read, 4096)
    os.close(read)
    if words != b"+":
        raise OSError(f"no /proc can be mounted: {words.decode(errors='replace') or 'no reason is known'}")
    unmount("/proc")
    mount(spare, "/proc", flags=_MOVE)


class Forks:
    """Forks of this process into the namespaces of new sandboxes.

    Raises:
        OSError: The number of clone(2) on this processor is not known.
    """

    def __init__(self) -> None:
        machine = os.uname().machine
        if machine not in _CLONE:
            raise OSError(errno.ENOSYS, f"the number of clone(2) on {machine} is not known")
        # Libraries of these kinds keep the interpreter's lock during a call, as os.fork does.
        python = ctypes.pythonapi
        self._before, self._in_child = python.PyOS_BeforeFork, python.PyOS_AfterFork_Child
        self._in_parent = python.PyOS_AfterFork_Parent
        self._system_call = ctypes.PyDLL(None, use_errno=True).syscall
        self._system_call.restype = ctypes.c_long
        flags = _NEWUSER | _NEWNS | _NEWPID | _NEWIPC | _NEWUTS | _NEWNET | signal.SIGCHLD
        self._arguments = [ctypes.c_ulong(value) for value in (_CLONE[machine], flags, 0, 0, 0, 0)]

    def fork(self) -> int:
        """Fork this process, which must have a single thread, as os.fork does.

        The new process is process 1 of its pid namespace. A process that first moved into new namespaces
        would have to fork a second time for that, and each fork of a Python process takes a millisecond.

        Returns:
            0 in the new process, and its number in this one.

        Raises:
            OSError: The kernel refuses it.
        """
        self._before()
        child: int = self._system_call(*self._arguments)
        if child == 0:
            self._in_child()
            return 0
        number = ctypes.get_errno()
        self._in_parent()
        if child < 0:
            raise OSError(number, f"clone: {os.strerror(number)}")
        return child


def confine(sizes: Mapping[str, tuple[int, int]]) -> None:
    """Set up the namespaces of a sandbox in its process 1, which `Forks` has made.

    Args:
        sizes: A map from a folder to (bytes, mode). Each folder is covered by a memory file system.

    Raises:
        OSError: The kernel refuses a part of it.
    """
    with suppress(OSError):  # Kernels without control groups lack these namespaces.
        call("unshare", _NEWCGROUP)
    os.setsid()
    mount("", "/", flags=REC | PRIVATE)
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    for name, text in (("setgroups", "deny"), ("uid_map", "0 0 1"), ("gid_map", "0 0 1")):
        set_in_proc(f"self/{name}", text)
    for folder, (size, mode) in sizes.items():
        mount_memory(folder, size, mode)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.pack("16sH14x", b"lo", _UP | _RUNNING)
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, flags)
    drop_rights(_SERVER_RIGHTS)
