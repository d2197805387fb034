"""Telling signals from outside the sandbox apart from those that its commands send.

The server is process 1 of its pid namespace, and its commands run as its user, so any of them may send it a
signal. The kernel drops signals that process 1 does not handle, but SIGTERM ends the server: a command that
sent it would take the sandbox away from its own evaluation. The kernel reports who sent a signal. A process
outside the namespace has no number inside, and therefore appears as process 0.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct

from rollyard_sandbox.isolation.system_calls import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_NONBLOCK, _CLOEXEC = 0o4000, 0o2000000  # sys/signalfd.h
_INFO = struct.Struct("=IiiI112x")  # signalfd_siginfo: signo, errno, code, pid, …
_SENT_BY_KILL = 0  # With SI_USER the kernel has filled in the sender, which programs cannot forge.


class OutsideSignals:
    """A descriptor that is readable when one of the signals `numbers` has come, from wherever.

    From now on these signals are blocked in this thread, and its children must unblock them.

    Raises:
        OSError: The kernel has no signalfd(2).
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        mask = (ctypes.c_uint64 * 16)()  # This is a sigset_t of the C library.
        wanted = set(numbers)
        for number in wanted:
            mask[0] |= 1 << (number - 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        self.fd: int = libc().signalfd(-1, ctypes.byref(mask), _NONBLOCK | _CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"signalfd: {os.strerror(number)}")

    def read(self) -> set[int]:
        """Return the signals that came from outside since the last call, and drop those of commands."""
        try:
            data = os.read(self.fd, 64 * _INFO.size)
        except BlockingIOError:
            return set()
        return {
            number for number, _, code, pid in _INFO.iter_unpack(data) if code == _SENT_BY_KILL and pid == 0
        }
