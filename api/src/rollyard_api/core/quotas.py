"""Quotas limit the open waits and the simultaneous work of one namespace.

A `Quota` counts what is open for a long time, and refuses more. `Turns` limits what is done at the same time,
and lets the rest wait in order. Both count by key, which is a namespace, and in total. A caller that asks for
too much therefore obstructs only itself. A `Room` says the same of things that are kept in the database.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from rollyard_api.core.problems import RETRY_AFTER, ApiError, QueueFull, TooManyWaits

UNBOUNDED: Final = sys.maxsize

Refusal = Callable[[str | None, int], ApiError]
"""Returns the error for a key, or for None if the total is reached, given the largest number."""


def _whose(key: str) -> str:
    return f"namespace {key!r}" if key else "whoever asks for all namespaces"


class Quota:
    """A limit on the number of things of one kind that are open, for each key and in total.

    Args:
        what: The name of the things in the plural, for messages.
        each: The largest number for one key.
        total: The largest number for all keys together.
        refusal: Returns the error for what is too much; default: TooManyWaits.
    """

    def __init__(
        self, what: str, *, each: int, total: int = UNBOUNDED, refusal: Refusal | None = None
    ) -> None:
        self._what = what
        self._each = each
        self._total = total
        self._refusal = refusal or self._too_many
        self._open: Counter[str] = Counter()

    def open(self, key: str) -> int:
        """Return the number of open things of a key."""
        return self._open[key]

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Keep one thing open within the block.

        Raises:
            ApiError: The largest number is already open.
        """
        if self._open[key] >= self._each:
            raise self._refusal(key, self._each)
        if self._open.total() >= self._total:
            raise self._refusal(None, self._total)
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    def _too_many(self, key: str | None, most: int) -> ApiError:
        if key is None:
            return TooManyWaits(f"{most} {self._what} are open, and no more may be", headers=RETRY_AFTER)
        text = f"{_whose(key)} has {most} open {self._what}, and may have no more"
        return TooManyWaits(text, headers=RETRY_AFTER)


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
        refusal: Returns the error if no place of a key became free in time; default: TooManyWaits.
    """

    def __init__(
        self,
        what: str,
        *,
        each: int = UNBOUNDED,
        total: int = UNBOUNDED,
        seconds: float | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        self._what = what
        self._each = each
        self._seconds = seconds
        self._refusal = refusal or self._too_many
        self._lines: dict[str, _Line] = {}
        self._all = asyncio.Semaphore(total)

    @asynccontextmanager
    async def held(self, key: str, each: int | None = None) -> AsyncIterator[None]:
        """Hold a place within the block.

        Args:
            key: The key.
            each: The largest number for this key; default: that of every key.

        Raises:
            ApiError: No place became free in time.
        """
        most = self._each if each is None else each
        line = self._lines.setdefault(key, _Line(asyncio.Semaphore(most)))
        line.users += 1
        try:
            async with AsyncExitStack() as places:
                try:
                    async with asyncio.timeout(self._seconds):
                        # The key's own line comes first. The common line then never holds more of a key than
                        # the key has places.
                        await places.enter_async_context(line.places)
                        await places.enter_async_context(self._all)
                except TimeoutError as error:
                    raise self._refusal(key, most) from error
                yield
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[key]

    def _too_many(self, key: str | None, _most: int) -> ApiError:
        return TooManyWaits(
            f"{_whose(key or '')} has too many {self._what} at once; none of them ended within "
            f"{self._seconds:g} s",
            headers=RETRY_AFTER,
        )


@dataclass(frozen=True, slots=True)
class Room:
    """The largest numbers of things of one kind, so that no namespace takes the room of all others.

    Args:
        total: The largest number in all.
        each: The largest number for one namespace.
    """

    total: int
    each: int

    def without(self, part: int) -> Room:
        """Return the room that is left if one in `part` things is reserved for others."""
        return Room(self.total - self.total // part, self.each - self.each // part)

    def check(
        self, what: str, namespace: str, *, total: int, own: int, adding: int, retry_after: int
    ) -> None:
        """Check that there is room for more.

        Args:
            what: The name of the things in the plural, for messages.
            namespace: The namespace to which the new ones belong.
            total: How many there are now.
            own: How many of these belong to the namespace.
            adding: The number of new ones.
            retry_after: The seconds after which a caller should ask again.

        Raises:
            QueueFull: There is no room for so many.
        """
        if own + adding > self.each:
            where, there, most = f"namespace {namespace!r} has", own, self.each
        elif total + adding > self.total:
            where, there, most = "there are", total, self.total
        else:
            return
        raise QueueFull(
            f"{where} {there} {what}, at most {most} may be; {adding} more do not fit",
            headers={"Retry-After": str(retry_after)},
        )
