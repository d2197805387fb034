"""Bounded threads for each kind of blocking work, so that work that hangs obstructs no other kind.

A thread that hangs in a system call cannot be killed. A bulkhead therefore gives each kind of input and
output a few threads of its own, a timeout for its callers, and a bounded queue. While all of its places hang,
callers are refused at once. A single call is let through from time to time to find out whether the other side
is back.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from rollyard_process.backoff import Backoff

from rollyard_api.core.problems import RETRY_AFTER, TimedOut, Unavailable

T = TypeVar("T")

SPARE: Final = 4
"""The largest number of threads of a bulkhead, as a multiple of its places. It includes threads that hang
for ever."""
PROBES: Final = Backoff(first=1.0, longest=60.0)


@dataclass(eq=False, slots=True)
class _Call(Generic[T]):
    function: Callable[[], T]
    future: asyncio.Future[T]
    key: str
    started: float = field(init=False)
    overdue: asyncio.TimerHandle = field(init=False)
    """The timer that marks the call as hanging."""


class Bulkhead:
    """Threads and a queue for one kind of blocking work, to be used from one event loop.

    Args:
        what: What the calls work with, as the subject of error messages.
        threads: The number of calls that may run at the same time.
        waiting: The number of calls that may wait for a thread. Keys take turns.
        seconds: The time in seconds that a caller waits for a thread and for the answer together.
    """

    def __init__(self, what: str, *, threads: int, waiting: int, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        self._places = threads
        self._limit = SPARE * threads
        self._max_waiting = waiting
        self._waiting: OrderedDict[str, deque[_Call[Any]]] = OrderedDict()
        self._running: set[_Call[Any]] = set()
        self.hanging: set[_Call[Any]] = set()
        """The calls that have not returned and have taken longer than a caller waits."""
        self._written_off: set[_Call[Any]] = set()
        """The calls that hang although later ones were answered. They hold a thread but no place."""
        self._work: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._idle = 0
        self.threads = 0
        """The number of threads that exist now, including idle and hanging ones."""
        self._probe_at = 0.0
        self._probes = 0
        self._closed = False

    async def run(self, function: Callable[[], T], key: str = "") -> T:
        """Call `function` in a thread of the bulkhead, and return its result.

        Args:
            function: The function to call.
            key: The party for which the call is made. Where calls wait, keys take turns.

        Raises:
            Unavailable: Every place hangs, or too many calls wait.
            TimedOut: The call was not answered within `seconds`.
            Exception: The function raised this exception.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise Unavailable("shutting down", headers=RETRY_AFTER)
        if self._blocked() and not self._may_probe(loop.time()):
            raise self._refusal()
        if sum(map(len, self._waiting.values())) >= self._max_waiting:
            raise Unavailable(f"too many requests wait for the {self.what}", headers=RETRY_AFTER)
        future: asyncio.Future[T] = loop.create_future()
        call = _Call(function, future, key)
        self._waiting.setdefault(key, deque()).append(call)
        self._start_some(loop)
        try:
            done, _ = await asyncio.wait([call.future], timeout=self.seconds)
        finally:
            if call not in self._running:
                self._forget(call)
            if not call.future.done():
                call.future.cancel()
        if not done:
            raise TimedOut(f"the {self.what} has not answered within {self.seconds:g} s", headers=RETRY_AFTER)
        return future.result()

    def close(self) -> None:
        """Stop idle threads now and the others once they return, without waiting for any of them."""
        self._closed = True
        for _ in range(self.threads):
            self._work.put(None)

    def _room(self) -> int:
        busy = len(self._running) - len(self._written_off)
        return min(self._places - busy, self._limit - len(self._running))

    def _blocked(self) -> bool:
        """Return whether no place can become free until a hanging call returns."""
        lost = len(self.hanging) - len(self._written_off)
        return lost >= self._places or len(self.hanging) >= self._limit

    def _may_probe(self, now: float) -> bool:
        return now >= self._probe_at and len(self._running) < self._limit

    def _refusal(self) -> Unavailable:
        return Unavailable(
            f"the {self.what} does not answer: all of its {self._places} places wait for it",
            headers=RETRY_AFTER,
        )

    def _forget(self, call: _Call[Any]) -> None:
        """Drop a call that was not started."""
        line = self._waiting.get(call.key)
        if line is not None and call in line:
            line.remove(call)
            if not line:
                del self._waiting[call.key]

    def _next(self) -> _Call[Any]:
        """Return the oldest call of the next key, and move the key to the end of the line."""
        key, line = next(iter(self._waiting.items()))
        call = line.popleft()
        del self._waiting[key]
        if line:
            self._waiting[key] = line
        return call

    def _start_some(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._room() > 0:
            self._start(self._next(), loop)
        if self._waiting and self._blocked() and self._may_probe(loop.time()):
            # The next probe comes later if this one hangs, too.
            self._probes += 1
            self._probe_at = loop.time() + PROBES.pause(self._probes)
            self._start(self._next(), loop)

    def _start(self, call: _Call[Any], loop: asyncio.AbstractEventLoop) -> None:
        call.started = loop.time()
        call.overdue = loop.call_later(self.seconds, self._hangs, call, loop)
        self._running.add(call)
        if self._idle:
            self._idle -= 1
        else:
            self.threads += 1
            threading.Thread(
                target=self._serve, args=(loop,), name=f"bulkhead: {self.what}", daemon=True
            ).start()
        self._work.put(call)

    def _hangs(self, call: _Call[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.hanging.add(call)
        if self._blocked():
            self._probe_at = max(self._probe_at, loop.time() + PROBES.first)
            while self._waiting:
                waiting = self._next()
                if not waiting.future.done():
                    waiting.future.set_exception(self._refusal())

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._work.get()) is not None:
            result, error = None, None
            try:
                result = call.function()
            except BaseException as raised:  # A thread of the bulkhead must outlive what it calls.
                error = raised
            try:
                loop.call_soon_threadsafe(self._returned, call, result, error, loop)
            except RuntimeError:
                return  # The loop is closed, and no caller waits for the answer.
            del call, result, error

    def _returned(
        self, call: _Call[Any], result: Any, error: BaseException | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        call.overdue.cancel()
        self._running.discard(call)
        self._idle += 1
        self.hanging.discard(call)
        self._written_off.discard(call)
        # An earlier call that has not returned will not return soon. It gives up its place.
        self._written_off |= {old for old in self.hanging if old.started <= call.started}
        self._probes = 0
        if not call.future.done():
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(error)
        self._start_some(loop)
