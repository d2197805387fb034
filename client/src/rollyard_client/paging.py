"""Iteration over pages, without I/O. Each client sends the calls of these classes over its own transport."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from rollyard_client.call import Call, Steps
from rollyard_client.errors import Invalid, NotFound
from rollyard_client.finish import FOLLOW_SECONDS, check_success, deleted, late
from rollyard_client.requests import cursors, results
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


@dataclass(frozen=True, slots=True)
class Following:
    """How an iteration over the results of a job is begun, and how long it waits.

    Raises:
        Invalid: An argument is wrong.
    """

    name: str
    namespace: str
    follow: bool = False
    """Whether it waits for further results until the job has ended."""
    timeout: float | None = FOLLOW_SECONDS
    """The seconds that it waits for the next result. None stands for no limit."""
    cursor: str = ""
    consumer: str | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout >= 0:
            raise Invalid(f"timeout: must be at least 0 seconds, or None for no limit (got {self.timeout})")
        if self.consumer is not None and self.cursor:
            raise Invalid("give 'cursor' or 'consumer', not both")


@dataclass(slots=True)
class Cursor(Generic[T]):
    """An iteration over a job's results. `make(cursor, wait)` builds the call of the next page.

    Attributes:
        cursor: The cursor after the last result that was handed out, or the one to begin with.
    """

    make: Callable[[str, float], Call[Page]]
    parse: Callable[[bytes], T]
    following: Following
    cursor: str = field(init=False)
    done: bool = False
    """Whether the last page was fetched. Some of its results may still wait to be handed out."""
    _begun: bool = field(init=False)
    """Whether it is known where to begin."""
    _succeeded: bool = False
    """Whether the job is known to have ended without failing, so that nothing more is asked."""
    _after: str | None = None
    _waiting: deque[tuple[bytes, str]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.cursor = self.following.cursor
        self._begun = self.following.consumer is None

    def fetch(self) -> Steps[None]:
        """Yield the calls that fetch results, until some are waiting or no more will follow.

        If a call fails, the next iteration begins with the same call.

        Raises:
            JobFailed: The job is followed, and has ended without success.
            WaitTimeout: The job is followed, and no result has come in time.
        """
        job = self.following
        if not self._begun:
            try:
                position = yield cursors.acknowledged(job.name, job.namespace, job.consumer or "")
                self.cursor = position.cursor
            except NotFound as error:
                self.cursor = begin_at(error)
            self._begun = True
        limit = inf if job.timeout is None else job.timeout
        end = time.monotonic() + limit
        while not self.waiting and not self.done:
            left = end - time.monotonic()
            after = self.cursor if self._after is None else self._after
            # The first page shows that the job is there, so that its end is not mistaken for a wrong name.
            waits = job.follow and self._after is not None
            try:
                page = yield self.make(after, max(0.0, min(LONG_POLL, left)) if waits else 0.0)
            except NotFound as error:
                if self._after is None:
                    raise
                raise deleted(job.name) from error
            self.take(page)
            if page.cursor != after:
                # The job makes progress, although there may be no result of the kind that was asked for.
                end = time.monotonic() + limit
            elif left <= 0 and not self.done:
                text = f"RolloutJob {job.name!r}: no further result within {limit:g} s"
                yield from late(text, job.name, job.namespace, end="; the iterator can still be used")
        if job.follow and not self.waiting and not self._succeeded:
            yield from check_success(job.name, job.namespace)
            self._succeeded = True

    @property
    def waiting(self) -> bool:
        """Whether results were fetched that have not been handed out."""
        return bool(self._waiting)

    def take(self, page: Page) -> None:
        """Keep the results of the page until they are handed out, and set `done` after the last page."""
        self._waiting.extend(zip(page.lines, page.cursors_after, strict=True))
        self._after = page.cursor
        if not self._waiting:
            self.cursor = page.cursor  # The page may have skipped results that were not asked for.
        self.done = page.finished or (not page.lines and not self.following.follow)

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


def trajectory_pages(following: Following, *, status: str | None) -> Cursor[Trajectory]:
    """Return the pages of a job's ended rollouts."""
    build = partial(results.trajectories, following.name, following.namespace, limit=100, status=status)
    return Cursor(lambda at, wait: build(cursor=at, wait=wait), results.trajectory, following)


def unscored_pages(following: Following, *, wait: float) -> Cursor[UnscoredTrajectory]:
    """Return the pages of a job's rollouts that wait for the trainer's reward; `wait` is for the first."""
    build = partial(results.unscored, following.name, following.namespace, limit=100)
    return Cursor(
        lambda at, poll: build(cursor=at, wait=max(poll, wait if at == following.cursor else 0.0)),
        results.unscored_trajectory,
        following,
    )


def group_pages(following: Following, *, informative: bool, dropped: bool) -> Cursor[Group]:
    """Return the pages of a job's ended groups."""
    read = partial(results.groups, following.name, following.namespace)
    build = partial(read, limit=16, informative=informative, dropped=dropped)
    return Cursor(lambda at, wait: build(cursor=at, wait=wait), results.group, following)


def begin_at(error: NotFound) -> str:
    """Return the cursor at which a consumer begins that has acknowledged none yet, or raise the error."""
    if error.reason != "CursorNotFound":
        raise error
    return ""
