"""Iterators of a job's results that know their cursor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, Generic, Self, TypeVar

from rollyard_client.call import Call
from rollyard_client.errors import NotFound
from rollyard_client.paging import Cursor
from rollyard_client.requests.cursors import Acknowledged

T = TypeVar("T")

_NOBODY: Final = "CursorNotFound"


def begin_at(error: NotFound) -> str:
    """Return the cursor at which a reader begins whose name has none yet, or raise the error."""
    if error.reason != _NOBODY:
        raise error
    return ""


class ResultIterator(Iterator[T], Generic[T]):
    """An iterator of a job's results. It keeps its place if a call fails, so it can be used further."""

    def __init__(
        self, pages: Cursor[T], send: Callable[[Call[Any]], Any], resume: Call[Acknowledged] | None
    ) -> None:
        self._pages = pages
        self._send = send
        self._resume = resume

    @property
    def cursor(self) -> str:
        """The cursor after the last result that was returned.

        An iteration with this cursor begins with the result that follows. It is the cursor of the call, or
        empty, before the first result.
        """
        return self._pages.cursor

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._resume is not None:
            try:
                self._pages.cursor = self._send(self._resume).cursor
            except NotFound as error:
                self._pages.cursor = begin_at(error)
            self._resume = None
        while not self._pages.waiting:
            if self._pages.done:
                raise StopIteration
            self._pages.take(self._send(self._pages.next()))
        return self._pages.hand_out()


class AsyncResultIterator(AsyncIterator[T], Generic[T]):
    """The iterator of results that the async client returns."""

    def __init__(
        self,
        pages: Cursor[T],
        send: Callable[[Call[Any]], Coroutine[Any, Any, Any]],
        resume: Call[Acknowledged] | None,
    ) -> None:
        self._pages = pages
        self._send = send
        self._resume = resume

    @property
    def cursor(self) -> str:
        """The cursor after the last result that was returned, as that of `ResultIterator`."""
        return self._pages.cursor

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._resume is not None:
            try:
                self._pages.cursor = (await self._send(self._resume)).cursor
            except NotFound as error:
                self._pages.cursor = begin_at(error)
            self._resume = None
        while not self._pages.waiting:
            if self._pages.done:
                raise StopAsyncIteration
            self._pages.take(await self._send(self._pages.next()))
        return self._pages.hand_out()
