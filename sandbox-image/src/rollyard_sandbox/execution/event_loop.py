"""The server's event loop: epoll, timers, reaped children, calls from threads.

Hand-written because one `echo hi` passes through it four times: epoll and a dict look-up cost a few
microseconds a pass, and importing asyncio would double the server's start time.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
from time import monotonic

from rollyard_sandbox.isolation.signal_senders import OutsideSignals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class Timer:
    """A call at a later time; `cancel` forgets it."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Does nothing where the call already happened."""
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class EventLoop:
    """One thread, one epoll; see the module's text."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[Timer] = []
        self._children: dict[int, Callable[[int], None]] = {}
        self._from_threads: list[Callable[[], None]] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._running = False
        self._signals: dict[int, Callable[[], None]] = {}
        self.watch(self._wake_read, self._woken)

    def install_signals(self, handlers: dict[int, Callable[[], None]]) -> None:
        """SIGCHLD reaps; `handlers` are called in the loop, never inside a signal handler.

        In process 1 of a namespace they are called for signals from outside only: commands may send others.
        """
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        if os.getpid() == 1:
            outside = OutsideSignals(handlers)
            self.watch(outside.fd, lambda events: self._signalled(outside.read(), handlers))
            handlers = {}
        self._signals = handlers
        for number in (signal.SIGCHLD, *handlers):
            signal.signal(number, lambda number, frame: None)

    @staticmethod
    def _signalled(numbers: set[int], handlers: dict[int, Callable[[], None]]) -> None:
        for number in numbers:
            handlers[number]()

    def watch(self, fd: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Calls `handler(events)` whenever `fd` is ready."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Changes what a watched descriptor is watched for."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Forgets `fd`; call it before closing, and as often as you like."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Calls back in `delay` seconds."""
        timer = Timer(monotonic() + delay, callback)
        heapq.heappush(self._timers, timer)
        if len(self._timers) > 64 and sum(t.callback is None for t in self._timers) > len(self._timers) // 2:
            self._timers = [t for t in self._timers if t.callback is not None]
            heapq.heapify(self._timers)
        return timer

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        """Calls back in the loop's thread; the only method that another thread may use."""
        self._from_threads.append(callback)
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # the pipe is full, so the loop is about to wake anyway

    def on_exit(self, pid: int, callback: Callable[[int], None]) -> None:
        """Calls back with the wait status of child `pid`."""
        self._children[pid] = callback

    def forget_child(self, pid: int) -> None:
        """Undoes `on_exit`."""
        self._children.pop(pid, None)

    def reap(self) -> bool:
        """Collects every ended child, adopted orphans too; False where there are no children at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            callback = self._children.pop(pid, None)
            if callback is not None:
                callback(status)

    def stop(self) -> None:
        """Ends `run` after the current round."""
        self._running = False

    def run(self) -> None:
        """Runs until `stop`."""
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
                    handler(events)
            if timers:
                now = monotonic()
                while self._timers and self._timers[0].when <= now:
                    callback = heapq.heappop(self._timers).callback
                    if callback is not None:
                        callback()

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
            call()
