"""Limits on the open waits, the simultaneous work and the stored things of one namespace.

A `Limit` bounds what is held at the same time: a caller who finds no place is refused, or waits for its turn.
A `Quota` bounds what is kept in the database. Both count by key, which is a namespace, and in total. A caller
that asks for too much therefore obstructs only itself. A `TokenBucket` bounds rates.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from rollyard_api.core.problems import RETRY_AFTER, ApiError, LimitReached

UNBOUNDED: Final = sys.maxsize

Refusal = Callable[[str | None, int], ApiError]
"""Returns the error for a key, or for None if the total is reached, given the largest number."""


def _too_many(text: str) -> LimitReached:
    return LimitReached(text, reason="TooManyWaits", headers=RETRY_AFTER)


def _whose(key: str) -> str:
    return f"namespace {key!r}" if key else "whoever asks for all namespaces"


@dataclass(slots=True)
class _Line:
    places: asyncio.Semaphore
    users: int = field(default=0)


class Limit:
    """A limit on the number of things of one kind that are held, for each key and in total.

    `held` refuses what is too much, and `turn` lets it wait in order. Each limit is used in one of these
    ways.

    Args:
        things: Their name in the plural, for messages.
        each: The largest number for one key.
        total: The largest number for all keys together.
        seconds: The longest wait for a turn, in seconds. None means that there is no limit.
        refusal: Returns the error for what is too much, or comes too late; default: LimitReached.
    """

    def __init__(
        self,
        things: str,
        *,
        each: int = UNBOUNDED,
        total: int = UNBOUNDED,
        seconds: float | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        self._things = things
        self._each = each
        self._total = total
        self._seconds = seconds
        self._refusal = refusal
        self._open: Counter[str] = Counter()
        self._lines: dict[str, _Line] = {}
        self._all = asyncio.Semaphore(total)

    def open(self, key: str) -> int:
        """Return the number of a key's places that `held` has given."""
        return self._open[key]

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Hold a place within the block.

        Raises:
            ApiError: No place is free.
        """
        refusal = self._refusal or self._too_many
        if self._open[key] >= self._each:
            raise refusal(key, self._each)
        if self._open.total() >= self._total:
            raise refusal(None, self._total)
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    @asynccontextmanager
    async def turn(self, key: str, each: int | None = None) -> AsyncIterator[None]:
        """Hold a place within the block, once one is free.

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
                    raise (self._refusal or self._too_late)(key, most) from error
                yield
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[key]

    def _too_many(self, key: str | None, most: int) -> ApiError:
        if key is None:
            return _too_many(f"{most} {self._things} are open, and no more may be")
        return _too_many(f"{_whose(key)} has {most} open {self._things}, and may have no more")

    def _too_late(self, key: str | None, _most: int) -> ApiError:
        return _too_many(
            f"{_whose(key or '')} has too many {self._things} at once; none of them ended within "
            f"{self._seconds:g} s"
        )


@dataclass(frozen=True, slots=True)
class Quota:
    """The largest numbers of things of one kind, so that no namespace takes the place of all others.

    Args:
        total: The largest number in all.
        each: The largest number for one namespace.
    """

    total: int
    each: int

    def without(self, part: int) -> Quota:
        """Return the quota that is left if one of every `part` things is reserved for others."""
        return Quota(self.total - self.total // part, self.each - self.each // part)

    def check(
        self, things: str, namespace: str, *, total: int, own: int, adding: int, retry_after: int
    ) -> None:
        """Check that there is room for more.

        Args:
            things: Their name in the plural, for messages.
            namespace: The namespace to which the new ones belong.
            total: How many there are now.
            own: How many of these belong to the namespace.
            adding: The number of new ones.
            retry_after: The seconds after which a caller should ask again.

        Raises:
            LimitReached: There is no room for so many.
        """
        if own + adding > self.each:
            where, there, most = f"namespace {namespace!r} has", own, self.each
        elif total + adding > self.total:
            where, there, most = "there are", total, self.total
        else:
            return
        raise LimitReached(
            f"{where} {there} {things}, at most {most} may be; {adding} more do not fit",
            headers={"Retry-After": str(retry_after)},
        )
