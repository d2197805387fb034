"""Pages of a job's results: a long poll after a cursor, and the answer with the cursor of the next page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from fastapi import Request
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core import cursors
from rollyard_api.core.problems import ApiError
from rollyard_api.core.wakeups import job_topic
from rollyard_api.routes.common import is_older_client, plane_of
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.rows import EndedRollout, JobRow, RolloutSize
from rollyard_api.trajectories import attempts, delivery, unread
from rollyard_api.trajectories.delivery import Delivery, Piece
from rollyard_api.trajectories.packed import ARRAYS


class FoundResults(Protocol):
    """The ended results of a job, as `records` and `grouping` find them."""

    @property
    def after(self) -> int:
        """The place of the last result that was found or passed over."""

    @property
    def ended(self) -> int:
        """The place of the job's newest result."""

    @property
    def empty(self) -> bool:
        """Whether there are no results."""

    @property
    def sizes(self) -> list[RolloutSize]:
        """The rollouts whose records belong to the results, with their sizes."""


E = TypeVar("E", bound=FoundResults)


@dataclass(frozen=True, slots=True)
class ResultPage(Generic[E]):
    """The results that one long poll found, with a place held for the answer."""

    plane: ControlPlane
    kind: cursors.Kind
    job: JobRow
    after: int
    """The place of the cursor, after which results were requested."""
    found: E
    finished: bool
    """Whether no results will follow those that were found."""
    held: AsyncExitStack
    older: bool
    """Whether the client is an older one, which refuses attempts."""

    async def lines(self, rows: Sequence[EndedRollout]) -> list[bytes]:
        """Return the records of these rows, as many as a page holds."""
        job = self.job
        lines = await self.plane.archive.lines(
            rows, job.namespace, job.name, job.uid, self.plane.settings.page_bytes
        )
        return [attempts.without(line) for line in lines] if self.older else lines

    async def arrays(self, rows: Sequence[EndedRollout]) -> list[Piece]:
        """Return the records of these rows with their token lists as raw arrays, as many as a page holds.

        Older clients do not know this form, so nothing is left out for them.
        """
        job = self.job
        return await self.plane.archive.arrays(
            rows, job.namespace, job.name, job.uid, self.plane.settings.page_bytes
        )

    async def records(self, rows: Sequence[EndedRollout], form: str) -> Sequence[Piece]:
        """Return the records of these rows as `answer` takes them for the media type `form`."""
        return await (self.arrays(rows) if form == ARRAYS else self.lines(rows))

    async def answer(
        self, lines: Sequence[Piece], form: str, reached: int | None, places: Sequence[int]
    ) -> Response:
        """Return the answer with these documents.

        Args:
            reached: The place of the last one, or None for all that were found.
            places: The place of each document.
        """
        omitted = attempts.FIELDS if self.older else ()
        encode = partial(delivery.encode, lines, form, omitted)
        data = await self.plane.archive.builds.run(encode, self.job.namespace)
        return self.deliver(data, form, reached, places)

    def deliver(
        self, data: bytes | AsyncIterator[Piece], form: str, reached: int | None, places: Sequence[int]
    ) -> Response:
        """Return the answer with this body, which keeps the held place until it is sent."""
        place = self.found.after if reached is None else reached
        headers = {
            "Rollyard-Cursor": cursors.text(self.kind, self.job.uid, place),
            "Rollyard-Cursors": cursors.listed(self.kind, self.job.uid, places),
            "Rollyard-Finished": "true" if self.finished and reached is None else "false",
        }
        return Delivery(data, form, headers, self.held.pop_all())


@asynccontextmanager
async def result_page(
    request: Request,
    kind: cursors.Kind,
    namespace: str,
    name: str,
    cursor: str,
    wait: float,
    *,
    end: Callable[[JobRow], int],
    look: Callable[[Connection, int, int], E],
) -> AsyncIterator[ResultPage[E]]:
    """Wait for results of a job after a cursor, and hold a place for the answer with them.

    Args:
        end: Returns the place of the newest result of the job, beyond which no cursor may lie.
        look: Reads results, given the job's number and the cursor's place.

    Raises:
        NotFound: There is no such job, or it was deleted in the meantime.
        Gone: The cursor belongs to another job of this name, or the job was replaced in the meantime.
        TooManyWaits: No further long poll or page may be open.
    """
    plane = plane_of(request)
    job = await plane.database.read(partial(job_rows.find, namespace=namespace, name=name))
    after = cursors.number(cursor, kind, uid=job.uid, job=name, end=end(job))
    if unread.is_ahead(job, kind, after, plane.settings.max_unread):
        with suppress(ApiError):  # A full disk must not prevent reading.
            await plane.database.write(partial(job_rows.note_read, job_id=job.id, kind=kind, position=after))

    def query(conn: Connection) -> tuple[E, bool]:
        now = job_rows.find(conn, namespace, name)
        if now.uid != job.uid:
            raise cursors.gone(name)
        found = look(conn, job.id, after)
        return found, now.finished_at is not None and found.after >= found.ended

    async with AsyncExitStack() as held:
        found, finished = await plane.poll(
            namespace,
            job_topic(job.id),
            partial(plane.database.read, query),
            lambda got: not got[0].empty or got[1],
            wait,
            request.is_disconnected,
        )
        # The records themselves are in memory only while a place for the answer is held.
        await held.enter_async_context(plane.pages_of(found.sizes).held(namespace))
        yield ResultPage(plane, kind, job, after, found, finished, held, is_older_client(request))
