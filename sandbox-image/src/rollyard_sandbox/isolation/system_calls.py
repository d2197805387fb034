"""System calls: those that the standard library lacks, and lists of those that a new process makes.

See mount(2), capabilities(7) and sysvipc(7) for the first. The last call of a list executes a program.

A fork of a Python process costs milliseconds: the kernel copies its tables of pages, and each page that
either process writes later. A child of vfork(2) borrows the memory instead, while its parent waits, but it
may then run no Python. Between its beginning and execve(2) a command only makes system calls whose arguments
are known before, so a few instructions of machine code that go through a list are all that it needs. Where
these cannot be used (another processor, or a kernel or policy that refuses them), a forked process makes the
same calls.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import mmap
import os
import platform
import resource
import signal
import time
from array import array
from contextlib import contextmanager, suppress
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Final

_VM, _VFORK = 0x100, 0x4000
_CLOSE_ON_EXEC: Final = 4  # CLOSE_RANGE_CLOEXEC
_ALL: Final = 0xFFFFFFFF
_WORDS: Final = 9  # Each call has its number, six arguments, its result, and whether it may fail.
_RESULT, _MAY_FAIL = 7, 8
_LARGEST: Final = 0xFFFFFFFFFFFFFFFF
_SIGSET_WORDS: Final = 16  # The size of libc's sigset_t in words.
_SET_MASK, _SET_FLAGS = 2, 2  # SIG_SETMASK and F_SETFD
STOPPED_SECONDS: Final = 1.0
"""The seconds after which a child that a signal has stopped before it executed its program is killed."""
_CLOSE_TIMER_ON_EXEC: Final = 0o2000000  # TFD_CLOEXEC
_FORKED: Final = 0x40  # PF_FORKNOEXEC, among the flags in proc_pid_stat(5)
_LAST: Final = 127  # The exit status of a child that executed nothing.
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
"""The flags of clone(2) and unshare(2) for new namespaces."""
SET_PDEATHSIG, SET_DUMPABLE, SET_NAME, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 15, 36, 38
"""The operations of prctl(2)."""
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 1 << 14, 1 << 18
# statvfs(3) reports these mount flags with the numbers of mount(2), and ST_RELATIME with another number.
_SAME, _ST_RELATIME, _RELATIME = 2 | 4 | 8 | 1024 | 2048, 4096, 1 << 21
_DETACH: Final = 2
_IPC_RMID: Final = 0  # linux/ipc.h
_CAPBSET_DROP: Final = 24
_CAPABILITIES: Final = 64  # A kernel's sets have room for this many.
_CAPABILITY_VERSION_3: Final = 0x20080522

# The numbers of the calls on x86_64 (arch/x86/entry/syscalls/syscall_64.tbl).
NUMBERS: Final = {
    "capset": 126,
    "chdir": 80,
    "close_range": 436,
    "dup3": 292,
    "execve": 59,
    "execveat": 322,
    "exit_group": 231,
    "fcntl": 72,
    "ioctl": 16,
    "mount": 165,
    "pause": 34,
    "prctl": 157,
    "recvfrom": 45,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "setns": 308,
    "setpriority": 141,
    "setsid": 112,
    "unshare": 272,
    "write": 1,
}

# long start(unsigned long clone_flags, uint64_t *calls) for x86_64. The child uses no stack and no libc.
_CODE: Final = bytes.fromhex(
    "53"  # push %rbx
    "4889f3"  # mov %rsi, %rbx
    "31f6 31d2 4d31d2 4d31c0"  # xor: clone's other arguments are 0, and the stack stays the same
    "b838000000 0f05"  # mov $56, %eax; syscall (clone)
    "4885c0 7402"  # test %rax, %rax; jz child
    "5b c3"  # pop %rbx; ret
    "488b03"  # child: mov (%rbx), %rax
    "488b7b08 488b7310 488b5318"  # mov 8(%rbx), %rdi; 16 to %rsi; 24 to %rdx
    "4c8b5320 4c8b4328 4c8b4b30"  # 32 to %r10; 40 to %r8; 48 to %r9
    "0f05 48894338"  # syscall; mov %rax, 56(%rbx)
    "4885c0 7907"  # test %rax, %rax; jns next
    "48837b4000 7406"  # cmpq $0, 64(%rbx); je failed
    "4883c348 ebcd"  # next: add $72, %rbx; jmp child
    "b8e7000000 bf01000000 0f05"  # failed: exit_group(1)
)


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, whose functions keep their error number for `ctypes.get_errno`.

    Each object of it, and each function when it is first used, costs a new process time and memory. They are
    made once for this process and those that are forked from it.
    """
    return ctypes.CDLL(None, use_errno=True)


class Calls:
    """A list of system calls, in the order in which they are made.

    The first that fails ends the process, unless it may fail.
    """

    def __init__(self) -> None:
        self.purpose = ""
        """What the calls are for that are added from now on."""
        self._names: list[str] = []
        self._purposes: list[str] = []
        self._words: list[int] = []  # _WORDS for each call.
        self._kept: list[object] = []  # The memory to which the arguments point.

    def add(self, name: str, *arguments: int | array[int], may_fail: bool = False) -> None:
        """Add a call.

        Args:
            name: The name of the call, which libc has as a function with the same arguments.
            arguments: Numbers, or arrays whose addresses are passed.
            may_fail: Whether the next call is made even if this one fails.
        """
        self._names.append(name)
        self._purposes.append(self.purpose)
        numbers = [self._number(argument) for argument in arguments]
        self._words += (NUMBERS[name], *numbers, *[0] * (_RESULT - len(numbers)), may_fail)

    def include(self, other: Calls) -> None:
        """Add all calls of another list, which must not change after that."""
        self._names += other._names
        self._purposes += [self.purpose] * len(other._names)
        self._words += other._words
        self._kept.append(other)

    def _number(self, argument: int | array[int]) -> int:
        if isinstance(argument, int):
            return argument & _LARGEST
        self._kept.append(argument)
        return argument.buffer_info()[0]

    def text(self, value: str | bytes) -> array[int]:
        """Return a text as a call takes it.

        Raises:
            ValueError: It holds a null byte.
        """
        data = os.fsencode(value)
        if b"\0" in data:
            raise ValueError("embedded null byte")
        # ctypes would make a type for each length of a text.
        return array("B", data + b"\0")

    def texts(self, values: list[str]) -> array[int]:
        """Return a list of texts that ends with a null pointer.

        Raises:
            ValueError: One of them holds a null byte.
        """
        data = [os.fsencode(value) for value in values]
        if any(b"\0" in item for item in data):
            raise ValueError("embedded null byte")
        # One buffer for all of them takes a fraction of the time that one for each would take.
        buffer = array("B", b"\0".join(data) + b"\0")
        address = self._number(buffer)
        pointers = array("Q")
        for item in data:
            pointers.append(address)
            address += len(item) + 1
        pointers.append(0)
        return pointers

    def default_signals(self, numbers: tuple[int, ...]) -> None:
        """Let these signals do what they do by default. Python ignores or handles some of them."""
        default = array("Q", bytes(32))  # A struct sigaction of the kernel, with SIG_DFL and no flag.
        for number in numbers:
            self.add("rt_sigaction", int(number), default, 0, 8)

    def ignore_signal(self, number: int) -> None:
        """Let the program ignore a signal until it says otherwise."""
        self.add("rt_sigaction", int(number), array("Q", [1, 0, 0, 0]), 0, 8)  # With SIG_IGN.

    def unblock_signals(self) -> None:
        """Unblock all signals."""
        self.add("rt_sigprocmask", _SET_MASK, array("Q", [0]), 0, 8)

    def close_others(self, inherited: tuple[int, ...] = ()) -> None:
        """Let the program inherit no descriptors from 3 on other than `inherited`."""
        self.add("close_range", 3, _ALL, _CLOSE_ON_EXEC)
        for descriptor in inherited:
            self.add("fcntl", descriptor, _SET_FLAGS, 0)

    def start(self, *, watched: bool = True) -> int:
        """Start a process that makes the calls, and return its number once it has executed a program.

        Args:
            watched: Whether hostile commands may see the process, and stop it before it has done that.

        Raises:
            OSError: One of the calls failed, and its purpose is the `filename` of the error; or there is no
                room for a process.
        """
        self.add("exit_group", _LAST)
        table = _Table(self._names, self._words)
        child = starter().start(table, watched=watched)
        self._check(child, table)
        return child

    def _check(self, child: int, table: _Table) -> None:
        """Reap a child that executed nothing, and raise what kept it from that."""
        failed: tuple[int, str, str] | None = None
        may_fail = self._words[_MAY_FAIL::_WORDS]
        calls = zip(self._names, self._purposes, table.results(), may_fail, strict=True)
        for name, purpose, result, excused in calls:
            if name in ("execve", "execveat"):
                if result >= 0:
                    return  # The kernel never returned to the list.
                # The first of the places that has a program decides.
                absent = -result in (errno.ENOENT, errno.ENOTDIR)
                if failed is None or (not absent and failed[0] in (errno.ENOENT, errno.ENOTDIR)):
                    failed = (-result, purpose, name)
            elif name == "exit_group":
                break
            elif result < 0 and not excused:
                failed = (-result, purpose, name)
                break
        os.waitpid(child, 0)
        assert failed is not None
        number, purpose, name = failed
        raise OSError(number, f"{name}: {os.strerror(number)}", purpose)


class _Table:
    """The calls as the machine code reads them, with what each has returned."""

    def __init__(self, names: list[str], words: list[int]) -> None:
        self.names = names
        self.words = array("Q", words)

    def results(self) -> list[int]:
        """Return what each call returned: a negative error number if it failed, and 0 if it was not made."""
        return array("q", self.words[_RESULT::_WORDS].tobytes()).tolist()

    def disposition(self, index: int) -> signal.Handlers:
        """Return what a call of rt_sigaction sets."""
        return signal.Handlers(ctypes.c_uint64.from_address(self.arguments(index)[1]).value)

    def arguments(self, index: int) -> list[int]:
        """Return the six arguments of a call."""
        return list(self.words[index * _WORDS + 1 : index * _WORDS + _RESULT])


class Launcher:
    """Starts processes that make a table of calls.

    Args:
        code: The machine code as a function, or None if it cannot be used here.
    """

    def __init__(self, code: Callable[[int, int], int] | None) -> None:
        self._code = code
        self._watch: tuple[int, _Watch] | None = None
        # The module `signal` makes an object of each signal in a mask.
        self._set_mask = libc().pthread_sigmask
        self._every_signal = (ctypes.c_uint64 * _SIGSET_WORDS)(*[_LARGEST] * _SIGSET_WORDS)

    @property
    def borrows(self) -> bool:
        """Whether the processes borrow the memory of this one, so that they are cheap."""
        return self._code is not None

    def prepare(self) -> None:
        """Start the thread that watches starts, if this process has none.

        There can be no new thread while children are to begin in another pid namespace than this process.
        """
        if self._watch is None or self._watch[0] != os.getpid():
            with self._signals_blocked():
                self._watch = (os.getpid(), _Watch())  # A fork has no threads.

    def start(self, table: _Table, *, watched: bool) -> int:
        """Start a process, and return its number once it has executed a program or ended.

        Raises:
            OSError: There is no room for a process.
        """
        if not watched:
            return self._make(table)
        self.prepare()
        assert self._watch is not None
        with self._watch[1]:
            return self._make(table)

    def _make(self, table: _Table) -> int:
        if self._code is None:
            return _fork(table)
        # A handler of this process must not run in the child, in the same memory. The list unblocks signals.
        with self._signals_blocked():
            child = self._code(_VM | _VFORK | signal.SIGCHLD, table.words.buffer_info()[0])
        if child < 0:
            raise OSError(-child, f"clone: {os.strerror(-child)}")
        return child

    @contextmanager
    def _signals_blocked(self) -> Iterator[None]:
        """Block all signals in this thread, and in the threads and processes that begin meanwhile."""
        before = (ctypes.c_uint64 * _SIGSET_WORDS)()
        self._set_mask(_SET_MASK, ctypes.byref(self._every_signal), ctypes.byref(before))
        try:
            yield
        finally:
            self._set_mask(_SET_MASK, ctypes.byref(before), None)


class _Watch:
    """Watches that no start takes long, from a thread that a timer wakes only then.

    The process waits for its child to execute its program. A hostile command that stops the child before
    that would keep it waiting, so stopped children are killed after STOPPED_SECONDS.

    It must begin while all signals are blocked, because none is to be handled by the thread.

    Raises:
        OSError: There is no room for a timer or a thread.
    """

    def __init__(self) -> None:
        self._timer: int = libc().timerfd_create(time.CLOCK_MONOTONIC, _CLOSE_TIMER_ON_EXEC)
        if self._timer < 0:
            raise last_error("timerfd_create")
        # An object of the module `threading` would wait for the thread to run, and remake its locks at forks.
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:
            os.close(self._timer)
            raise OSError(errno.EAGAIN, str(error)) from error

    def __enter__(self) -> None:
        self._set(STOPPED_SECONDS)

    def __exit__(self, *_: object) -> None:
        self._set(0.0)

    def _set(self, seconds: float) -> None:
        """Let the timer expire at this interval in seconds from now on, or never for 0."""
        whole, part = divmod(round(seconds * 1e9), 10**9)
        times = array("q", (whole, part, whole, part))  # A struct itimerspec.
        libc().timerfd_settime(self._timer, 0, ctypes.c_void_p(times.buffer_info()[0]), None)

    def _run(self) -> None:
        while os.read(self._timer, 8):
            # A child or a thread may end meanwhile, which must not end this one. The timer expires again.
            with suppress(OSError):
                for child in _stopped_children():
                    os.kill(child, signal.SIGKILL)


def _stopped_children() -> list[int]:
    """Return the children of this process that a signal has stopped before they executed a program."""
    stopped = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            children = file.read().split()
        for child in children:
            try:
                with open(f"/proc/{child}/stat", "rb") as file:
                    state, *fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # It has ended.
            if state == b"T" and int(fields[5]) & _FORKED:
                stopped.append(int(child))
    return stopped


@cache
def starter() -> Launcher:
    """Return what starts processes here. It is made once for a process and those that are forked from it."""
    return Launcher(_machine_code())


def _machine_code() -> Callable[[int, int], int] | None:
    """Return the machine code as a function, or None if it cannot be used here."""
    if platform.machine() != "x86_64" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    # Linux has close_range since 5.9 and its flag since 5.11. The range holds no descriptor.
    if libc().syscall(NUMBERS["close_range"], ctypes.c_uint(_ALL - 1), ctypes.c_uint(_ALL), _CLOSE_ON_EXEC):
        return None
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    memory.write(_CODE)
    code = (ctypes.c_char * mmap.PAGESIZE).from_buffer(memory)
    address = ctypes.addressof(code)
    if libc().mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        return None  # A security module may forbid memory that was writable to be executed.
    function = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_ulong, ctypes.c_void_p)(address)
    function.memory = code  # type: ignore[attr-defined]
    return function


def _fork(table: _Table) -> int:
    """Let a forked process make the calls, and return its number once it has executed a program, or ended."""
    results = memoryview(mmap.mmap(-1, 8 * len(table.names))).cast("Q")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _make(table, results)
        finally:
            os._exit(1)
    os.close(write)
    os.read(read, 1)  # The end of file comes when execve, or the end of the process, closes the other end.
    os.close(read)
    table.words[_RESULT::_WORDS] = array("Q", results.tolist())
    return child


def _make(table: _Table, results: memoryview[int]) -> None:
    """Make the calls in this process, and note what they return in memory that the other process sees."""
    for index, name in enumerate(table.names):
        arguments = table.arguments(index)
        number = 0
        if name == "rt_sigaction":
            signal.signal(arguments[0], table.disposition(index))
        elif name == "rt_sigprocmask":
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        elif name == "close_range":
            for entry in os.listdir("/proc/self/fd"):
                if int(entry) >= arguments[0]:
                    _close_on_exec(int(entry))
        elif name == "exit_group":
            os._exit(arguments[0])
        elif getattr(libc(), name)(*map(ctypes.c_ulong, arguments)) == -1:
            number = ctypes.get_errno()
        results[index] = -number & _LARGEST
        if number and not table.words[index * _WORDS + _MAY_FAIL]:
            return


def _close_on_exec(descriptor: int) -> None:
    try:
        os.set_inheritable(descriptor, False)
    except OSError as error:
        if error.errno != errno.EBADF:  # The descriptor with which the folder was listed is closed.
            raise


# The functions below make system calls in this process.


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library.

    Raises:
        OSError: The function did not return 0.
    """
    if getattr(libc(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        shown = ", ".join(a.decode(errors="replace") for a in arguments if isinstance(a, bytes))
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")


def last_error(name: str) -> OSError:
    """Return the error of the function of the C library that was called last."""
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")


def map_users(process: int | str, user: int, group: int, inside: int) -> None:
    """Map one user and one group into the new user namespace of a process, and no others.

    Args:
        process: The number of the process, or `self`.
        user: The user outside.
        group: The group outside.
        inside: What both are in the namespace.

    Raises:
        OSError: The kernel refuses it.
    """
    set_in_proc(f"{process}/setgroups", "deny")
    set_in_proc(f"{process}/uid_map", f"{inside} {user} 1")
    set_in_proc(f"{process}/gid_map", f"{inside} {group} 1")


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
        hidden: The names below /proc that must show nothing. Missing ones are skipped.
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

    It has room for one file per page, because files without content take only kernel memory.
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
