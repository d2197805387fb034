"""Iteration over pages, without I/O. Each client sends the calls of these classes over its own transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from rollyard_client.call import Call
from rollyard_client.errors import Invalid, NotFound
from rollyard_client.requests import cursors, results
from rollyard_client.requests.cursors import Acknowledged
from rollyard_client.requests.results import Group, Page

if TYPE_CHECKING:
    from rollyard_crds.trajectory import Trajectory, UnscoredTrajectory

P = TypeVar("P")
T = TypeVar("T")

LONG_POLL: Final = 20.0
"""The length of one long poll while a job is followed, in seconds."""


class Walk(Protocol[P, T]):
    """The interface of all iterations, which have pages of type P and items of type T."""

    done: bool

    def next(self) -> Call[P]:
        """Return the call that fetches the next page."""
        ...

    def take(self, page: P) -> list[T]:
        """Return the items of `page`, and remember where the next page begins."""
        ...


@dataclass(slots=True)
class Cursor(Generic[T]):
    """An iteration over a job's results. `make(cursor, wait)` builds the call of the next page.

    Attributes:
        cursor: The cursor after the last result that was handed out, or the one to begin with.
    """

    make: Callable[[str, float], Call[Page]]
    parse: Callable[[bytes], T]
    follow: bool
    cursor: str = ""
    done: bool = False
    """Whether the last page was fetched. Some of its results may still wait to be handed out."""
    _after: str | None = None
    _waiting: deque[tuple[bytes, str]] = field(default_factory=deque)

    @property
    def waiting(self) -> bool:
        """Whether results were fetched that have not been handed out."""
        return bool(self._waiting)

    def next(self) -> Call[Page]:
        """Return the call that fetches the next page."""
        after = self.cursor if self._after is None else self._after
        return self.make(after, LONG_POLL if self.follow else 0.0)

    def take(self, page: Page) -> None:
        """Keep the results of the page until they are handed out, and set `done` after the last page."""
        self._waiting.extend(zip(page.lines, page.cursors_after, strict=True))
        self._after = page.cursor
        if not self._waiting:
            self.cursor = page.cursor  # The page may have skipped results that were not asked for.
        self.done = page.finished or (not page.lines and not self.follow)

    def hand_out(self) -> T:
        """Return the next waiting result, and move the cursor past it.

        A result that cannot be read remains the next one.
        """
        line, cursor = self._waiting[0]
        item = self.parse(line)
        self._waiting.popleft()
        self.cursor = cursor
        return item


@dataclass(slots=True)
class Listing(Generic[T]):
    """An iteration over a list with `continue`. `make(after)` builds the call of the next page."""

    make: Callable[[str | None], Call[tuple[list[T], str | None]]]
    after: str | None = None
    done: bool = False

    def next(self) -> Call[tuple[list[T], str | None]]:
        """Return the call that fetches the next page."""
        return self.make(self.after)

    def take(self, page: tuple[list[T], str | None]) -> list[T]:
        """Return the items of the page, and set `done` after the last page."""
        items, self.after = page
        self.done = self.after is None
        return items


@dataclass(slots=True)
class Files:
    """An iteration over a job's Parquet files. `make(cursor)` builds the call of the next file."""

    make: Callable[[str], Call[tuple[bytes, str, bool]]]
    cursor: str = ""
    done: bool = False

    def next(self) -> Call[tuple[bytes, str, bool]]:
        """Return the call that fetches the next file."""
        return self.make(self.cursor)

    def take(self, page: tuple[bytes, str, bool]) -> list[bytes]:
        """Return the file as the only item, or no item if the file has no rows."""
        data, after, finished = page
        # A page that leaves the cursor where it is has no rows. Only the server knows the form of a cursor,
        # so an empty first page is recognized by the page after it.
        empty = after == self.cursor
        self.done = finished or empty
        self.cursor = after
        return [] if empty else [data]


def trajectory_pages(
    name: str, namespace: str, *, follow: bool, cursor: str, status: str | None
) -> Cursor[Trajectory]:
    """Return the pages of a job's ended rollouts."""
    build = partial(results.trajectories, name, namespace, limit=100, status=status)
    return Cursor(lambda at, wait: build(cursor=at, wait=wait), results.trajectory, follow, cursor)


def unscored_pages(
    name: str, namespace: str, *, follow: bool, wait: float, cursor: str
) -> Cursor[UnscoredTrajectory]:
    """Return the pages of a job's rollouts that wait for the trainer's reward; `wait` is for the first."""
    build = partial(results.unscored, name, namespace, limit=100)
    return Cursor(
        lambda at, poll: build(cursor=at, wait=max(poll, wait if at == cursor else 0.0)),
        results.unscored_trajectory,
        follow,
        cursor,
    )


def group_pages(
    name: str, namespace: str, *, follow: bool, cursor: str, informative: bool, dropped: bool
) -> Cursor[Group]:
    """Return the pages of a job's ended groups."""
    build = partial(results.groups, name, namespace, limit=16, informative=informative, dropped=dropped)
    return Cursor(lambda at, wait: build(cursor=at, wait=wait), results.group, follow, cursor)


def resume_call(name: str, namespace: str, cursor: str, consumer: str | None) -> Call[Acknowledged] | None:
    """Return the call that reads where a consumer left off, if one is given.

    Raises:
        Invalid: Both a cursor and a consumer are given.
    """
    if consumer is None:
        return None
    if cursor:
        raise Invalid("give 'cursor' or 'consumer', not both")
    return cursors.acknowledged(name, namespace, consumer)


def begin_at(error: NotFound) -> str:
    """Return the cursor at which a consumer begins that has acknowledged none yet, or raise the error."""
    if error.reason != "CursorNotFound":
        raise error
    return ""
