"""The server's event loop: it handles descriptors (by epoll), timers, ended children and calls from threads.

It is hand-written because one `echo hi` passes through it four times: epoll and a dict look-up cost a few
microseconds per pass, and importing asyncio would double the server's start time.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import select
import signal
import struct
import sys
from time import monotonic

from rollyard_sandbox.isolation.system_calls import last_error, libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Final

MAX_FAULTS: Final = 100
"""The number of callback exceptions that are survived. One that recurs at once would spin forever."""
READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_NONBLOCK, _CLOEXEC = 0o4000, 0o2000000  # sys/signalfd.h
_INFO: Final = struct.Struct("=IiiI112x")  # signalfd_siginfo: signo, errno, code, pid, …
_SENT_BY_KILL: Final = 0  # With SI_USER the kernel has filled in the sender, which programs cannot forge.


class Timer:
    """A call at a later time, which `cancel` prevents."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Prevent the call. This does nothing if the call has already happened."""
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class OutsideSignals:
    """A descriptor that is readable when one of the signals `numbers` has come, from wherever.

    The server is process 1 of its pid namespace, and its commands run as its user, so any of them may send it
    a signal. The kernel drops signals that process 1 does not handle, but SIGTERM ends the server: a command
    that sent it would take the sandbox away from its own evaluation. The kernel reports who sent a signal. A
    process outside the namespace has no number inside, and therefore appears as process 0.

    From now on these signals are blocked in this thread, and its children must unblock them.

    Raises:
        OSError: The kernel has no signalfd(2).
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        mask = (ctypes.c_uint64 * 16)()  # This is a sigset_t of the C library.
        blocked = set(numbers)
        for number in blocked:
            mask[0] |= 1 << (number - 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        self.fd: int = libc().signalfd(-1, ctypes.byref(mask), _NONBLOCK | _CLOEXEC)
        if self.fd < 0:
            raise last_error("signalfd")

    def read(self) -> set[int]:
        """Return the signals that came from outside since the last call, and drop those of commands."""
        try:
            data = os.read(self.fd, 64 * _INFO.size)
        except BlockingIOError:
            return set()
        return {
            number for number, _, code, pid in _INFO.iter_unpack(data) if code == _SENT_BY_KILL and pid == 0
        }


class EventLoop:
    """An event loop of one thread with one epoll; see the module's docstring."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[Timer] = []
        self._children: dict[int, Callable[[int], None]] = {}
        self._from_threads: list[Callable[[], None]] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._running = False
        self._faults = 0
        self._signals: dict[int, Callable[[], None]] = {}
        self.watch(self._wake_read, self._woken)

    def install_signals(self, handlers: dict[int, Callable[[], None]]) -> None:
        """Reap children at SIGCHLD, and call `handlers` in the loop, never inside a signal handler.

        In process 1 of a namespace the handlers are called only for signals from outside, because commands
        may send others.
        """
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        if os.getpid() == 1:
            outside = OutsideSignals(handlers)
            self.watch(outside.fd, lambda events: self._signalled(outside.read(), handlers))
        else:
            self._signals = handlers
        for number in (signal.SIGCHLD, *self._signals):
            signal.signal(number, lambda number, frame: None)

    @staticmethod
    def _signalled(numbers: set[int], handlers: dict[int, Callable[[], None]]) -> None:
        for number in numbers:
            handlers[number]()

    def watch(self, fd: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Call `handler(events)` whenever `fd` is ready."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Change the events for which a descriptor is watched."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`. This must be called before closing it, and may be called repeatedly."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` in `delay` seconds."""
        timer = Timer(monotonic() + delay, callback)
        heapq.heappush(self._timers, timer)
        if len(self._timers) > 64 and sum(t.callback is None for t in self._timers) > len(self._timers) // 2:
            self._timers = [t for t in self._timers if t.callback is not None]
            heapq.heapify(self._timers)
        return timer

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the loop's thread. This is the only method that another thread may use."""
        self._from_threads.append(callback)
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # The pipe is full, so the loop is about to wake anyway.

    def on_exit(self, pid: int, callback: Callable[[int], None]) -> None:
        """Call `callback` with the wait status of child `pid` when it has ended."""
        self._children[pid] = callback

    def forget_child(self, pid: int) -> None:
        """Undo `on_exit`."""
        self._children.pop(pid, None)

    def reap(self) -> bool:
        """Collect every ended child, including adopted orphans, and return whether any children are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            callback = self._children.pop(pid, None)
            if callback is not None:
                try:
                    callback(status)
                except Exception as error:
                    self._survive(error)

    def stop(self) -> None:
        """End `run` after the current round."""
        self._running = False

    def run(self) -> None:
        """Run until `stop` is called."""
        self._running = True
        poll, handlers = self._epoll.poll, self._handlers
        while self._running:
            timers = self._timers
            while timers and timers[0].callback is None:
                heapq.heappop(timers)
            timeout = max(0.0, timers[0].when - monotonic()) if timers else -1
            for fd, events in poll(timeout):
                handler = handlers.get(fd)
                if handler is not None:
                    try:
                        handler(events)
                    except Exception as error:
                        self._survive(error)
            if timers:
                now = monotonic()
                while self._timers and self._timers[0].when <= now:
                    callback = heapq.heappop(self._timers).callback
                    if callback is not None:
                        try:
                            callback()
                        except Exception as error:
                            self._survive(error)

    def _survive(self, error: Exception) -> None:
        """Print an exception of a callback. It is a bug of ours, which must not cost anybody's work.

        Raises:
            Exception: The same, if there have been more than `MAX_FAULTS`.
        """
        self._faults += 1
        if self._faults > MAX_FAULTS:
            raise error
        sys.excepthook(type(error), error, error.__traceback__)

    def _woken(self, events: int) -> None:
        try:
            data = os.read(self._wake_read, 4096)
        except BlockingIOError:
            return
        if signal.SIGCHLD in data:
            self.reap()
        for number, handler in self._signals.items():
            if number in data:
                handler()
        calls, self._from_threads = self._from_threads, []
        for call in calls:
            try:
                call()
            except Exception as error:
                self._survive(error)
