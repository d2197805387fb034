"""Walking through pages, without I/O: both clients drive these with their own transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rollyard_client.call import Call
from rollyard_client.requests import Page

P = TypeVar("P")
T = TypeVar("T")

LONG_POLL = 20.0
"""Seconds of one long poll while following."""


class Walk(Protocol[P, T]):
    """What all of them have in common: pages of type P, items of type T."""

    done: bool

    def next(self) -> Call[P]:
        """Return the call that fetches the next page."""
        ...

    def take(self, page: P) -> list[T]:
        """Return the items of `page`, and remember where the next page begins."""
        ...


@dataclass(slots=True)
class Cursor(Generic[T]):
    """Through a job's results; `make(cursor, wait)` builds the call of the next page."""

    make: Callable[[str, float], Call[Page]]
    parse: Callable[[bytes], T]
    follow: bool
    cursor: str = ""
    done: bool = False

    def next(self) -> Call[Page]:
        """The call of the next page."""
        return self.make(self.cursor, LONG_POLL if self.follow else 0.0)

    def take(self, page: Page) -> list[T]:
        """What the page held; `done` is set after the last one."""
        self.cursor = page.cursor
        self.done = page.finished or (not page.lines and not self.follow)
        return [self.parse(line) for line in page.lines]


@dataclass(slots=True)
class Listing(Generic[T]):
    """Through a list with `continue`; `make(after)` builds the call of the next page."""

    make: Callable[[str | None], Call[tuple[list[T], str | None]]]
    after: str | None = None
    done: bool = False

    def next(self) -> Call[tuple[list[T], str | None]]:
        """The call of the next page."""
        return self.make(self.after)

    def take(self, page: tuple[list[T], str | None]) -> list[T]:
        """What the page held; `done` is set after the last one."""
        found, self.after = page
        self.done = self.after is None
        return found


@dataclass(slots=True)
class Files:
    """Through a job's Parquet files; `make(cursor)` builds the call of the next one."""

    make: Callable[[str], Call[tuple[bytes, str, bool]]]
    cursor: str = ""
    done: bool = False

    def next(self) -> Call[tuple[bytes, str, bool]]:
        """The call of the next file."""
        return self.make(self.cursor)

    def take(self, page: tuple[bytes, str, bool]) -> list[bytes]:
        """The file, unless it is empty and another came before it."""
        data, after, finished = page
        # A page that leaves the cursor where it is has no rows. What a cursor looks like is the server's
        # business: an empty first page is known by the one after it.
        empty = after == self.cursor
        self.done = finished or empty
        self.cursor = after
        return [] if empty else [data]
