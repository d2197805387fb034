"""The namespaces between the server and its commands.

The server keeps the right to make namespaces in its sandbox. Commands run in a pid namespace of their own,
which shows them neither the server nor the processes that manage the sandbox, and in a mount namespace whose
/proc belongs to that pid namespace. Unless they are root of an image, they also run in a user namespace in
which the server does not exist: the kernel then grants them nothing over the server, whatever the two have
in common. The first process of their pid namespace only reaps. Killing it kills all commands at once, and the
next command then gets new namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
from array import array
from contextlib import contextmanager
from functools import cache

from rollyard_sandbox.isolation.system_calls import (
    NEWNS,
    NEWPID,
    NEWUSER,
    NUMBERS,
    SET_DUMPABLE,
    SET_NAME,
    SET_PDEATHSIG,
    Calls,
    call,
    capability_sets,
    dropped_rights,
    last_error,
    libc,
    limit_rights,
    map_users,
    mount_memory,
    mount_proc,
    mount_terminals,
    proc_mounts,
    set_in_proc,
    starter,
    unmount,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Final, NoReturn

    SmallCall = tuple[str, tuple[int | bytes | None, ...]]
    """The name of a system call and its arguments. Bytes are passed by their address."""

_VM: Final = 0x100
_STACK_BYTES: Final = 16 * 1024  # This is ample for a function that calls nothing.
_CAP_AMBIENT, _RAISE, _SYS_ADMIN = 47, 2, 21  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN
_EMPTY_PATH: Final = 0x1000  # AT_EMPTY_PATH
_STANDARD: Final = 64  # A number above those that programs use.
_CHANNEL: Final = 3  # The first process's end of a socket.
_READY: Final = b"+"
# These are the capabilities that Docker leaves to a container's root, except mknod, net_raw and audit_write:
# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, setfcap.
ROOT_KEEPS: Final = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31})
# The kernel counts these for this user namespace and those below it, and also for the machine's user, who
# starts other sandboxes, too.
_MOST_OF_USERS: Final = (("user_namespaces", "0"), ("inotify_instances", "16"), ("inotify_watches", "8192"))
_SERVER_KEEPS: Final = frozenset({18, 21})  # sys_chroot, sys_admin
_PAGE: Final = 4096
_CODE_AT, _CALLS_AT = 0x400000, 0x401000  # The addresses of the two pages.
_WORDS: Final = 8  # Each call has its number, six arguments, and the exit status if it fails.
_HEADER: Final = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_EXECUTABLE, _X86_64, _LOAD, _READ, _WRITE, _EXECUTE = 2, 62, 1, 4, 2, 1

_CODE: Final = bytes.fromhex(
    "48bb 0010400000000000"  # mov $_CALLS_AT, %rbx
    "488b03 488b7b08 488b7310 488b5318 4c8b5320 4c8b4328 4c8b4b30"  # next: number and arguments
    "0f05 4885c0 7910"  # syscall; test %rax, %rax; jns done
    "488b7b38 4885ff 7407"  # mov 56(%rbx), %rdi; test %rdi, %rdi; jz done
    "b8e7000000 0f05"  # exit_group with this status
    "4883c340 ebc8"  # done: add $64, %rbx; jmp next
)


def small_program(calls: Sequence[SmallCall]) -> bytes:
    """Return a program of two pages that makes a list of system calls and then waits forever.

    The first process of a pid namespace has little to do and lives as long as the namespace. As a fork of the
    server it would keep a copy of all of the server's pages. The program is an ELF file in memory for x86_64:
    its first page is a loop over the calls, and its second page holds them with what they point to.

    If a call fails, the program exits with the place of the call in the list, counted from 1.

    Raises:
        ValueError: The calls need more than a page.
    """
    table = len(calls) + 1
    data = bytearray()
    words: list[int] = []
    for number, (name, arguments) in enumerate([*calls, ("pause", ())], 1):
        row = [NUMBERS[name]]
        for argument in arguments:
            if isinstance(argument, bytes):
                row.append(_CALLS_AT + table * _WORDS * 8 + len(data))
                data += argument + b"\0"
            else:
                row.append(argument or 0)
        words += [*row, *[0] * (_WORDS - 1 - len(row)), number]
    second = struct.pack(f"<{len(words)}Q", *words) + data
    if len(second) > _PAGE:
        raise ValueError(f"the calls need {len(second)} bytes, and there is room for {_PAGE}")
    entry = _HEADER.size + 2 * _SEGMENT.size
    identity = (b"\x7fELF", 2, 1, 1, 0, 0, _EXECUTABLE, _X86_64, 1)
    segments = (_HEADER.size, _SEGMENT.size, 2)
    header = _HEADER.pack(*identity, _CODE_AT + entry, _HEADER.size, 0, 0, *segments, 0, 0, 0)
    first = header
    first += _SEGMENT.pack(_LOAD, _READ | _EXECUTE, 0, _CODE_AT, _CODE_AT, _PAGE, _PAGE, _PAGE)
    first += _SEGMENT.pack(_LOAD, _READ | _WRITE, _PAGE, _CALLS_AT, _CALLS_AT, _PAGE, _PAGE, _PAGE)
    return (first + _CODE).ljust(_PAGE, b"\0") + second.ljust(_PAGE, b"\0")


def _in_memory(content: bytes) -> int:
    """Return a descriptor of the program, which no other program inherits.

    Raises:
        OSError: The kernel has no files in memory.
    """
    descriptor = os.memfd_create("init")
    try:
        os.write(descriptor, content)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class NamespaceOptions:
    """The options of the namespaces of commands.

    Args:
        uid: The user and group that commands see themselves as. With None they are root of the image, as the
            server is, with the rights that a container's root usually has.
        hidden: The names in /proc that show nothing.
        eval_folder: An existing folder over which the place of an evaluation is mounted.
        eval_bytes: The size of that place in bytes.
    """

    def __init__(self, *, uid: int | None, hidden: Sequence[str], eval_folder: str, eval_bytes: int) -> None:
        self.uid = uid
        self.hidden = hidden
        self.eval_folder = eval_folder
        self.eval_bytes = eval_bytes


@cache
def first_program(hidden: tuple[str, ...]) -> bytes:
    """Return the program of the first process (see `small_program`).

    It is made once for this process and those that are forked from it.

    Args:
        hidden: The names in /proc that show nothing.

    Raises:
        ValueError: There are too many of them.
    """
    header, data = capability_sets(frozenset())
    mounts = [
        (source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
        for source, target, kind, flags, options in proc_mounts(hidden)
    ]
    return small_program(
        [
            ("prctl", (SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)),
            ("prctl", (SET_NAME, b"init", 0, 0, 0)),
            ("setsid", ()),
            ("chdir", (b"/",)),
            ("unshare", (NEWNS,)),
            *(("mount", arguments) for arguments in mounts),
            ("capset", (bytes(header), bytes(data))),
            ("write", (_CHANNEL, _READY, 1)),
            ("recvfrom", (_CHANNEL, b" ", 1, 0, 0, 0)),
            ("prctl", (SET_DUMPABLE, 0, 0, 0, 0)),
            ("close_range", (0, 0xFFFFFFFF, 0)),
        ]
    )


class CommandNamespaces:
    """The namespaces of one sandbox's commands.

    The process that makes them must have one thread, and all rights in its own namespaces.

    Raises:
        OSError: The kernel refuses a part of it.
    """

    def __init__(self, options: NamespaceOptions) -> None:
        self._options = options
        mount_terminals()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._users = None if options.uid is None else self._new_users(options.uid)
        for name, most in _MOST_OF_USERS:
            set_in_proc(f"sys/user/max_{name}", most)
        limit_rights(_SERVER_KEEPS | (ROOT_KEEPS if options.uid is None else frozenset()))
        self._pids = self._mounts = self._first = -1
        self._open()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Return a context in which a new process begins in the commands' pid namespace (see `add_to`).

        Raises:
            OSError: The namespaces cannot be made.
        """
        if not self.alive():
            self._close()
            self._open()
        self._join(self._pids, NEWPID)
        try:
            yield
        finally:
            self._join(self._own_pids, NEWPID)

    def add_to(self, calls: Calls, cwd: str) -> None:
        """Add the calls by which a new process enters the other namespaces and drops its rights.

        A command that is root of an image keeps `ROOT_KEEPS`.
        """
        calls.add("setns", self._mounts, NEWNS)
        calls.add("chdir", calls.text(cwd))
        if self._users is not None:
            calls.add("setns", self._users, NEWUSER)
        calls.include(dropped_rights(ROOT_KEEPS if self._users is None else frozenset()))

    def alive(self) -> bool:
        """Return whether the first process of the namespaces is alive."""
        return self._first >= 0 and not self._ended(self._first)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the first process, and return whether it has ended.

        The kernel ends every other process of the pid namespace before it.
        """
        return self._ended(self._first, seconds)

    @staticmethod
    def _ended(process: int, seconds: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def mount_place(self) -> str:
        """Mount a new, empty memory file system for an evaluation, and return its folder.

        Commands that start later see it.

        Raises:
            OSError: The kernel refuses it.
        """
        mount_memory(self._options.eval_folder, self._options.eval_bytes, 0o700)
        return self._options.eval_folder

    def remove_place(self) -> None:
        """Unmount that file system, and lose its contents."""
        unmount(self._options.eval_folder)

    def _join(self, namespace: int, kind: int) -> None:
        call("setns", namespace, kind)

    def _new_users(self, uid: int) -> int:
        """Return a new user namespace in which `uid` is the server's user and no other user exists.

        The process in it shares the memory of this one and only waits, in the C library. Such a process is
        made in a tenth of the time of a fork, which would copy the server's tables of pages.
        """
        stack = array("B", bytes(_STACK_BYTES))
        # The stack grows down from an aligned address.
        top = (stack.buffer_info()[0] + _STACK_BYTES) & ~15
        clone = libc().clone
        clone.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        waits = ctypes.cast(libc().pause, ctypes.c_void_p)
        child = clone(waits, top, NEWUSER | _VM | signal.SIGCHLD, None)
        if child < 0:
            raise last_error("no user namespace inside of the sandbox's")
        try:
            map_users(child, os.geteuid(), os.getegid(), uid)
            return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)  # The stack must exist until then.

    def _open(self) -> None:
        call("unshare", NEWPID)
        try:
            if not (starter().borrows and self._start_first()):
                # A namespace whose first process has ended gets no other one.
                self._join(self._own_pids, NEWPID)
                call("unshare", NEWPID)
                self._fork_first()
            self._pids = os.open("/proc/self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            self._join(self._own_pids, NEWPID)

    def _start_first(self) -> bool:
        """Start the first process as a small program, and return whether it does what it should.

        In the end it has no rights, no descriptors, and no memory of the server.
        """
        ours, theirs = socket.socketpair()
        with ours:
            opened: list[int] = []
            try:
                high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, _STANDARD)
                opened.append(high)
                opened.append(_in_memory(first_program(tuple(self._options.hidden))))
                calls = Calls()
                calls.ignore_signal(signal.SIGCHLD)  # With this the kernel reaps at once.
                calls.add("dup3", high, _CHANNEL, 0)
                calls.close_others((_CHANNEL,))
                # A user other than root loses rights that are not ambient when it executes a program.
                calls.add("capset", *capability_sets(frozenset({_SYS_ADMIN}), inheritable=True))
                calls.add("prctl", _CAP_AMBIENT, _RAISE, _SYS_ADMIN, 0, 0)
                nothing = calls.texts([])
                calls.add("execveat", opened[1], calls.text(""), calls.texts(["init"]), nothing, _EMPTY_PATH)
                child = calls.start(watched=False)
            except OSError:
                return False
            finally:
                theirs.close()
                for descriptor in opened:
                    os.close(descriptor)
            first = os.pidfd_open(child)
            try:
                # Commands may begin when it has closed its end, and nothing can look into it any more.
                if ours.recv(1) == _READY:
                    mounts = os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
                    ours.send(_READY)
                    if ours.recv(1) == b"" and not self._ended(first):
                        self._first, self._mounts = first, mounts
                        return True
                    os.close(mounts)
            except OSError:
                pass  # A process that is forked will say more.
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(first)
            return False

    def _fork_first(self) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            try:
                child = os.fork()
                if child == 0:
                    self._be_first(theirs)
                theirs.close()
                self._first = os.pidfd_open(child)
                message, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
                if message != _READY or len(descriptors) != 1:
                    words = message.decode(errors="replace") or "its first process has ended"
                    raise OSError(f"the commands' namespaces cannot be made: {words}")
                self._mounts = descriptors[0]
                os.set_inheritable(self._mounts, False)
            finally:
                theirs.close()

    def _close(self) -> None:
        for descriptor in (self._pids, self._mounts, self._first):
            if descriptor >= 0:
                os.close(descriptor)
        self._pids = self._mounts = self._first = -1

    def _be_first(self, server: socket.socket) -> NoReturn:
        """Be the first process: make the mounts, then reap until the server, which alone can, kills it."""
        try:
            call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            call("prctl", SET_DUMPABLE, 0, 0, 0, 0)
            call("prctl", SET_NAME, b"init", 0, 0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            os.setsid()
            os.chdir("/")
            call("unshare", NEWNS)
            mount_proc(self._options.hidden)
            mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY)
            socket.send_fds(server, [_READY], [mounts])
            os.closerange(0, 1 << 16)
            while True:
                signal.pause()
        except OSError as error:
            server.send(str(error).encode()[:4096])
        finally:
            os._exit(1)
