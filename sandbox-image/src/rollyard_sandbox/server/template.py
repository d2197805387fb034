"""The template of sandboxes: a process that has loaded the exec server and forks into one for each sandbox.

Loading the interpreter and its modules takes most of the time of a cold start, and every sandbox over the
same root folder begins with the same ones. A template runs no command and learns no secret. Each request of
the worker brings the descriptors of one sandbox, among them a pipe with its secret, which only the forked
process reads. A forked process keeps no other descriptor, has namespaces of its own, and is not a descendant
of the template in any of them: the end of a template harms no sandbox.

The template runs in a view of the file system that bubblewrap has made, and in which nothing can be written.
A forked process gets further namespaces below those of the template: a user namespace that no other sandbox
shares, and in it all the others. What can be written and /proc are mounted afresh.
Everything that comes from the template stays locked, because the new mounts belong to the new user.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress

from rollyard_sandbox import proof
from rollyard_sandbox.isolation.command_namespaces import ROOT_KEEPS, NamespaceOptions, first_program
from rollyard_sandbox.isolation.protections import FAILED, NOT_CONFINED
from rollyard_sandbox.isolation.system_calls import (
    NEWCGROUP,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    NODEV,
    NOEXEC,
    NOSUID,
    PRIVATE,
    REC,
    SET_CHILD_SUBREAPER,
    SET_DUMPABLE,
    call,
    drop_rights,
    dropped_rights,
    last_error,
    libc,
    map_users,
    mount,
    mount_memory,
    starter,
    unmount,
)
from rollyard_sandbox.server.exec_server import serve
from rollyard_sandbox.server.options import ServerOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final, NoReturn

_MOVE: Final = 8192
_SET_INTERFACE_FLAGS, _UP, _RUNNING = 0x8914, 0x1, 0x40  # ioctl SIOCSIFFLAGS; netdevice(7)
_CLONE: Final = {"x86_64": 56, "aarch64": 220}  # The number of clone(2), by the name of the processor.
_SERVER_RIGHTS: Final = frozenset({18, 21, 24, 31})  # sys_chroot, sys_admin, sys_resource, setfcap
_MAX_REQUEST: Final = 64 * 1024  # bytes
_MAX_DESCRIPTORS: Final = 32
# What every sandbox calls in the C library.
_FUNCTIONS: Final = (
    "capset",
    "clone",
    "mount",
    "pause",
    "prctl",
    "pthread_sigmask",
    "setns",
    "signalfd",
    "timerfd_create",
    "timerfd_settime",
    "umount2",
    "unshare",
)


def run(control: int, ready: int, spare: str) -> int:
    """Serve the requests that come from the worker until it closes its end, and return the exit status.

    Args:
        control: A Unix socket (SOCK_SEQPACKET). Each message on it is one request: a JSON object with the
            fields that `_be_sandbox` reads, and the sandbox's descriptors.
        ready: The descriptor to which one byte is written when requests can come.
        spare: An existing folder on which nothing is mounted.
    """
    try:
        forks = Forks()
        replace_proc(spare)
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr)
        return FAILED
    libc().prctl(SET_DUMPABLE, 0, 0, 0, 0)
    libc().prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _load()
    requests = socket.socket(fileno=control)
    requests.set_inheritable(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap())
    os.write(ready, b"+")
    os.close(ready)
    gc.collect()
    gc.freeze()  # Collections in forked processes then leave the shared pages alone.
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, _MAX_DESCRIPTORS)
        if not message:
            return 0
        _fork(forks, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _load() -> None:
    """Import and prepare what every server otherwise imports and prepares when it first needs it."""
    import codecs
    import shutil  # noqa: F401

    import ptyprocess  # noqa: F401

    import rollyard_sandbox.execution.programs  # noqa: F401
    from rollyard_sandbox.isolation import seccomp

    codecs.lookup("ascii")
    seccomp.program(os.uname().machine)
    starter()
    for name in _FUNCTIONS:
        getattr(libc(), name)
    for capabilities in (frozenset[int](), ROOT_KEEPS):
        dropped_rights(capabilities)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _fork(forks: Forks, request: dict[str, Any], descriptors: list[int]) -> None:
    """Fork a sandbox and name its process 1 to the worker, or write the reason why there is none."""
    _, _, info, log, *_ = descriptors
    try:
        first_program(tuple(request["namespaces"]["hidden"]))  # All sandboxes of a template have the same.
        child = forks.fork()
    except OSError as error:
        os.write(log, f"{NOT_CONFINED}: {error}\n".encode())
        return
    if child == 0:
        _be_sandbox(request, descriptors)
    os.write(info, json.dumps({"child-pid": child}).encode())


def _be_sandbox(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become the exec server of a new sandbox, in its process 1.

    Args:
        request: The fields `sizes` (see `confine`), `limits` (a list of resource limits: their
            numbers in `resource` and their values), `workdir`, `lease` in seconds, `namespaces`, which
            holds the arguments of NamespaceOptions, and `yielding` (see ServerOptions).
        descriptors: The listening socket; the pipe for the line that the server is ready; the pipe for the
            number of process 1; the file for standard output and error; the pipe with the secret; and for
            each control group an open file with which a process joins it.
    """
    status = FAILED
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listen, ready, _, log, secret, *groups = descriptors
        os.dup2(log, 1)
        os.dup2(log, 2)
        for group in groups:
            os.write(group, b"0")  # This stands for the writing process.
        open_descriptors = {0, 1, 2, listen, ready, secret}
        _close_all_but(open_descriptors)
        # A program that has just started may look at its children. The server's protections end this.
        libc().prctl(SET_DUMPABLE, 1, 0, 0, 0)
        confine(request["sizes"])
        secret_bytes = proof.read_secret(secret)
        os.chdir(request["workdir"])
        for number, limit in request["limits"]:
            resource.setrlimit(number, (limit, limit))
        status = serve(
            ServerOptions(
                listen=[f"fd:{listen}"],
                ready_fd=ready,
                workdir=request["workdir"],
                lease=request["lease"],
                own_pid_namespace=True,
                secret=secret_bytes,
                namespaces=NamespaceOptions(**request["namespaces"]),
                yielding=request["yielding"],
            )
        )
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr, flush=True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        sys.stderr.flush()
        os._exit(status)


def _close_all_but(descriptors: set[int]) -> None:
    first = 0
    for descriptor in (*sorted(descriptors), os.sysconf("SC_OPEN_MAX")):
        if descriptor > first:  # An empty range from 0 means all descriptors in some releases of Python.
            os.closerange(first, descriptor)
        first = descriptor + 1


# The functions below make the namespaces of a forked sandbox.


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
            call("unshare", NEWPID)
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
        flags = NEWUSER | NEWNS | NEWPID | NEWIPC | NEWUTS | NEWNET | signal.SIGCHLD
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
        failure = last_error("clone")
        self._in_parent()
        if child < 0:
            raise failure
        return child


def confine(sizes: Mapping[str, tuple[int, int]]) -> None:
    """Set up the namespaces of a sandbox in its process 1, which `Forks` has made.

    Args:
        sizes: A map from a folder to (bytes, mode). Each folder is covered by a memory file system.

    Raises:
        OSError: The kernel refuses a part of it.
    """
    with suppress(OSError):  # Kernels without control groups lack these namespaces.
        call("unshare", NEWCGROUP)
    os.setsid()
    mount("", "/", flags=REC | PRIVATE)
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    map_users("self", 0, 0, 0)
    for folder, (size, mode) in sizes.items():
        mount_memory(folder, size, mode)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.pack("16sH14x", b"lo", _UP | _RUNNING)
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, flags)
    drop_rights(_SERVER_RIGHTS)
