"""The system calls that commands may not make: a seccomp filter, assembled here (seccomp(2)).

The filter refuses what Docker's default profile refuses to a container without privileges: tracing other
processes and reading their memory and descriptors, mounting, new namespaces, key rings, BPF, io_uring, and
what only a machine's administrator needs. Contexts of asynchronous I/O are refused, too, because the kernel
counts them for the whole machine (fs.aio-max-nr). Calls of other ABIs of the same processor (i386, x32) end
the process or are unknown, because a second set of numbers would lead around the filter. On a processor that
is not listed here there is no filter.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from functools import cache

from rollyard_sandbox.isolation.system_calls import SET_NO_NEW_PRIVS, libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from rollyard_sandbox.isolation.system_calls import Calls

_GET_SECCOMP, _SET_SECCOMP = 21, 22
_MODE_FILTER: Final = 2
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
# These instructions of classic BPF load a word of the call's data, compare it, and return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32: Final = 0x40000000
_AF_VSOCK: Final = 40
# These are CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}. In the place of unshare(2)'s NEWTIME clone(2) has
# a signal's number.
_NEW_NAMESPACES: Final = 0x7E020000
_NEW_TIME: Final = 0x80

# Each name has its number on x86_64 and its number on aarch64.
_REFUSED: Final[dict[str, tuple[int | None, int | None]]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
}
# These fail as in a kernel that lacks them, so that libraries use something else. The flags of clone3 lie in
# memory, where a filter cannot see them.
_ABSENT: Final = {"clone3": (435, 435), "io_setup": (206, 0)}
_SPECIAL: Final = {"clone": (56, 220), "socket": (41, 198), "unshare": (272, 97)}
_AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_LEAF: Final = 4  # Up to this many calls are compared one after the other.


def refused_calls(machine: str) -> dict[str, int]:
    """Return the calls that always fail with EPERM, and their numbers on this processor."""
    column = list(_AUDIT).index(machine)
    return {name: number for name, row in _REFUSED.items() if (number := row[column]) is not None}


@cache
def program(machine: str) -> bytes | None:
    """Return the filter as an array of `struct sock_filter`, or None for an unknown processor."""
    if machine not in _AUDIT:
        return None
    column = list(_AUDIT).index(machine)
    actions = {number: _answer(errno.EPERM) for number in refused_calls(machine).values()}
    actions |= {row[column]: _answer(errno.ENOSYS) for row in _ABSENT.values()}
    special = {name: row[column] for name, row in _SPECIAL.items()}
    actions[special["clone"]] = _if_any_bit(_NEW_NAMESPACES)
    actions[special["unshare"]] = _if_any_bit(_NEW_NAMESPACES | _NEW_TIME)
    # No network namespace contains these sockets, which lead from a virtual machine to its host.
    actions[special["socket"]] = [
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, _AF_VSOCK),
        *_answer(errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), *_answer(errno.ENOSYS)]
    code += _search(sorted(actions.items()))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _answer(number: int) -> list[tuple[int, int, int, int]]:
    return [(_RETURN, 0, 0, _ERRNO | number)]


def _if_any_bit(bits: int) -> list[tuple[int, int, int, int]]:
    return [
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, bits),
        *_answer(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _search(
    actions: Sequence[tuple[int, list[tuple[int, int, int, int]]]],
) -> list[tuple[int, int, int, int]]:
    """Return instructions that find the call's number by bisection, which takes few of them for any call."""
    if len(actions) <= _LEAF:
        code: list[tuple[int, int, int, int]] = []
        for number, answer in actions:
            code += [(_EQUAL, 0, len(answer), number), *answer]
        return [*code, (_RETURN, 0, 0, _ALLOW)]
    middle = len(actions) // 2
    below, above = _search(actions[:middle]), _search(actions[middle:])
    return [(_AT_LEAST, len(below), 0, actions[middle][0]), *below, *above]


class CallFilter:
    """The filter of this machine, ready to be installed in any number of children."""

    def __init__(self) -> None:
        code = program(os.uname().machine)
        # A kernel that was built without seccomp returns EINVAL.
        if code is not None and libc().prctl(_GET_SECCOMP, 0, 0, 0, 0) < 0:
            code = None
        self._code = array("B", code or b"")
        # A struct sock_fprog: the number of instructions, in the first bytes of a word, and where they are.
        self._program = array("Q", (len(self._code) // 8, self._code.buffer_info()[0]))

    def add_to(self, calls: Calls) -> None:
        """Add the calls that install the filter in a new process that is about to become a command.

        From then on the calls are refused in that process and in those below it. In addition, no program
        gains rights by being executed (no_new_privs).
        """
        calls.add("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self._code:
            calls.add("prctl", _SET_SECCOMP, _MODE_FILTER, self._program, 0, 0)
