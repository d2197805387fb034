"""Quotas limit the open waits and the simultaneous work of one namespace.

A `Quota` counts what is open for a long time, and refuses more. `Turns` limits what is done at the same time,
and lets the rest wait in order. Both count by key, which is a namespace, and in total. A caller that asks for
too much therefore obstructs only itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from rollyard_api.core.problems import TooManyWaits

RETRY_AFTER = {"Retry-After": "2"}


def _whose(key: str) -> str:
    return f"namespace {key!r}" if key else "whoever asks for all namespaces"


class Quota:
    """A limit on the number of things of one kind that are open, for each key and in total.

    Args:
        what: The name of the things in the plural, for messages.
        each: The largest number for one key.
        total: The largest number for all keys together.
    """

    def __init__(self, what: str, *, each: int, total: int) -> None:
        self._what = what
        self._each = each
        self._total = total
        self._open: Counter[str] = Counter()
        self._count = 0

    def open(self, key: str) -> int:
        """Return the number of open things of a key."""
        return self._open[key]

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Keep one thing open within the block.

        Raises:
            TooManyWaits: The largest number is already open.
        """
        if self._open[key] >= self._each:
            raise TooManyWaits(
                f"{_whose(key)} has {self._each} open {self._what}, and may have no more",
                headers=RETRY_AFTER,
            )
        if self._count >= self._total:
            raise TooManyWaits(
                f"{self._total} {self._what} are open, and no more may be", headers=RETRY_AFTER
            )
        self._open[key] += 1
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


@dataclass(slots=True)
class _Line:
    places: asyncio.Semaphore
    users: int = field(default=0)


class Turns:
    """A limit on what is done at the same time, for each key and in total; the rest waits in order.

    Args:
        what: The name of the work in the plural, for messages.
        each: The largest number for one key.
        total: The largest number for all keys together.
        seconds: The longest wait for a place, in seconds. None means that there is no limit.
    """

    def __init__(self, what: str, *, each: int, total: int, seconds: float | None = None) -> None:
        self._what = what
        self._each = each
        self._seconds = seconds
        self._lines: dict[str, _Line] = {}
        self._all = asyncio.Semaphore(total)

    @asynccontextmanager
    async def held(self, key: str) -> AsyncIterator[None]:
        """Hold a place within the block.

        Raises:
            TooManyWaits: No place became free in time.
        """
        line = self._lines.setdefault(key, _Line(asyncio.Semaphore(self._each)))
        line.users += 1
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._acquire(line)
            except TimeoutError as error:
                raise TooManyWaits(
                    f"{_whose(key)} has too many {self._what} at once; none of them ended within "
                    f"{self._seconds:g} s",
                    headers=RETRY_AFTER,
                ) from error
            try:
                yield
            finally:
                self._all.release()
                line.places.release()
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[key]

    async def _acquire(self, line: _Line) -> None:
        # The key's own line comes first. The common line then never holds more of a key than the key has
        # places.
        await line.places.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            line.places.release()
            raise


IDLE_SECONDS = 1.0
"""The number of seconds for which an empty answer holds for equal requests, unless the queues change."""
IDLE_REQUESTS = 4096


class Idle:
    """The lease requests that were answered with nothing since the queues last changed.

    A change of the queues wakes every waiting lease request. Equal requests are answered by one look at the
    database, and a thousand idle workers of one job therefore cost as much as one.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[int, float]] = {}

    def is_known(self, asked: Hashable, changes: int, now: float) -> bool:
        """Return whether an equal request found nothing and the queues have not changed since.

        Args:
            asked: What a request asks for, without the worker that makes it.
            changes: The number of changes of the queues so far.
            now: A monotonic time in seconds.
        """
        found = self._found.get(asked)
        return found is not None and found[0] == changes and now - found[1] < IDLE_SECONDS

    def note(self, asked: Hashable, changes: int, now: float) -> None:
        """Record that a request found nothing; `changes` is the number of changes read before the look."""
        if len(self._found) >= IDLE_REQUESTS:
            self._found.clear()
        self._found[asked] = (changes, now)
