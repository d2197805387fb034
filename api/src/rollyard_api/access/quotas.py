"""How much of the control plane one namespace may hold: open waits, and work at the same time.

A `Quota` counts what stands open for long, and refuses more. `Turns` bounds what is done at the same
time, and lets more wait for its turn. Both count by key, a namespace, and in all, so that whoever asks
for too much is in nobody's way but their own.
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
    """At most so many of something may stand open, for each key and in all.

    Args:
        what: plural, for messages.
        each: for one key.
        total: for all keys together.
    """

    def __init__(self, what: str, *, each: int, total: int) -> None:
        self._what = what
        self._each = each
        self._total = total
        self._open: Counter[str] = Counter()
        self._count = 0

    def open(self, key: str) -> int:
        """How many stand open for a key."""
        return self._open[key]

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """One of them stands open within the block.

        Raises:
            TooManyWaits: as many as may do already.
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
    """At most so much is done at the same time, for each key and in all; the rest waits in order.

    Args:
        what: plural, for messages.
        each: for one key.
        total: for all keys together.
        seconds: how long a turn is waited for; None: as long as it takes.
    """

    def __init__(self, what: str, *, each: int, total: int, seconds: float | None = None) -> None:
        self._what = what
        self._each = each
        self._seconds = seconds
        self._lines: dict[str, _Line] = {}
        self._all = asyncio.Semaphore(total)

    @asynccontextmanager
    async def held(self, key: str) -> AsyncIterator[None]:
        """A turn within the block.

        Raises:
            TooManyWaits: it did not come in time.
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
        # A key's own line first: in the common one there are never more of a key than it has places.
        await line.places.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            line.places.release()
            raise


IDLE_SECONDS = 1.0
"""How long an empty answer stands for other requests like it, where nothing says otherwise."""
IDLE_REQUESTS = 4096


class Idle:
    """Which lease requests were answered with nothing since the queues last changed.

    A change of the queues wakes every waiting lease request. Those that ask for the same are answered by
    one look at the database: a thousand idle workers of one job cost as much as one.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[int, float]] = {}

    def is_known(self, asked: Hashable, changes: int, now: float) -> bool:
        """Whether the same was asked in vain, and nothing has changed since.

        Args:
            asked: what a request asks for, whoever makes it.
            changes: how often the queues have changed.
            now: a monotonic time in seconds.
        """
        found = self._found.get(asked)
        return found is not None and found[0] == changes and now - found[1] < IDLE_SECONDS

    def note(self, asked: Hashable, changes: int, now: float) -> None:
        """There was nothing for it when the queues had changed so often; read before the look."""
        if len(self._found) >= IDLE_REQUESTS:
            self._found.clear()
        self._found[asked] = (changes, now)
