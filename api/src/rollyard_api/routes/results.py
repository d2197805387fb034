"""The results of a job: trajectories and groups, page by page after a cursor, and summaries of rollouts.

In addition, the events of the job as a stream, and the cursors that readers of results acknowledge under a
name and resume from.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Path, Query
from pydantic import Field
from rollyard_crds.base import Model
from rollyard_crds.trajectory import TrajectoryStatus
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core import cursors
from rollyard_api.core.codec import MSGPACK, dumps
from rollyard_api.core.problems import ApiError, Invalid, Malformed, TooLarge
from rollyard_api.core.wakeups import job_topic
from rollyard_api.jobs import job_views
from rollyard_api.jobs.events import Event
from rollyard_api.machine.states import ENDED
from rollyard_api.rollouts import unscored as waiting
from rollyard_api.rollouts.unscored import TrainerRewards
from rollyard_api.routes.common import (
    Named,
    NamedCall,
    StrictRoute,
    Wait,
    answer,
    body_schema,
    from_query,
    page_answer,
)
from rollyard_api.routes.views import record_line, slim_page
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.rows import EndedGroup, EndedRollout, JobRow, RolloutSize
from rollyard_api.trajectories import acknowledged, delivery, packed, records
from rollyard_api.trajectories.archive import made
from rollyard_api.trajectories.delivery import NDJSON, PARQUET, Delivery, Piece
from rollyard_api.trajectories.packed import ARRAYS
from rollyard_api.trajectories.records import EndedResults
from rollyard_api.views.job.lists import MAX_ROWS, RolloutFilter

router = APIRouter(prefix="/v1/rolloutjobs", tags=["results"], route_class=StrictRoute)
of_cursors = APIRouter(prefix="/v1/rolloutjobs", tags=["cursors"], route_class=StrictRoute)

COUNTS_SECONDS: Final = 1.0
"""The seconds between two reads of the counts of a job whose events a client follows."""

Cursor = Annotated[str, Query()]
CursorName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]


@dataclass(frozen=True, slots=True)
class ResultPage:
    """The results of one long poll, with a place held for the answer."""

    plane: ControlPlane
    kind: cursors.Kind
    job: JobRow
    after: int
    """The place of the cursor, after which results were requested."""
    results: EndedResults
    finished: bool
    """Whether no results will follow these."""
    form: str
    """The media type of the answer."""
    stack: AsyncExitStack
    """Gives the place back."""

    async def records(self, rows: Sequence[EndedRollout]) -> Sequence[Piece]:
        """Return the records of these rows as `answer` takes them."""
        archive = self.plane.archive
        read = archive.arrays if self.form == ARRAYS else archive.lines
        return await read(rows, self.job, self.plane.settings.page_bytes)

    async def answer(self, lines: Sequence[Piece], places: Sequence[int]) -> Response:
        """Return the answer with these documents, which are the first of the results at these places."""
        encode = partial(delivery.encode, lines, self.form)
        data = await self.plane.archive.builds.run(encode, self.job.namespace)
        return self.deliver(data, places, len(lines))

    def deliver(self, data: bytes | AsyncIterator[Piece], places: Sequence[int], sent: int) -> Response:
        """Return the answer with this body, which keeps the held place until it is sent.

        Args:
            places: The place of each result that was found.
            sent: How many of them the body has.
        """
        whole = sent == len(places)
        position = self.results.after if whole else places[sent - 1]
        headers = {
            "Rollyard-Cursor": cursors.text(self.kind, self.job.uid, position),
            "Rollyard-Cursors": cursors.listed(self.kind, self.job.uid, places[:sent]),
            "Rollyard-Finished": "true" if self.finished and whole else "false",
        }
        return Delivery(data, self.form, headers, self.stack.pop_all())


@asynccontextmanager
async def result_page(
    call: NamedCall,
    kind: cursors.Kind,
    cursor: str,
    wait: float,
    look: Callable[[Connection, int, int], EndedResults],
) -> AsyncIterator[ResultPage]:
    """Wait for results of a job after a cursor, and hold a place for the answer.

    Args:
        look: Reads results, given the job's number and the cursor's place.

    Raises:
        NotFound: There is no such job, or it was deleted in the meantime.
        Invalid: Something else than trajectories is asked for as Parquet.
        Gone: The cursor belongs to another job of this name, or the job was replaced in the meantime.
        LimitReached: No further long poll or page may be open.
    """
    plane = call.plane
    form = delivery.media_type(call.request.headers.get("accept", ""))
    if kind != "trajectories" and form == PARQUET:
        raise Invalid(f"{kind} come as NDJSON or msgpack; Parquet is for /trajectories")
    job = await call.read(job_rows.find)
    after = cursors.number(cursor, kind, uid=job.uid, job=job.name, end=acknowledged.end_of(job, kind))
    if acknowledged.is_ahead(job, kind, after, plane.settings.max_unread):
        with suppress(ApiError):  # A full disk must not prevent reading.
            await plane.database.write(partial(job_rows.note_read, job_id=job.id, kind=kind, position=after))

    def query(conn: Connection, namespace: str, name: str) -> tuple[EndedResults, bool]:
        now = job_rows.find(conn, namespace, name)
        if now.uid != job.uid:
            raise cursors.gone(name)
        results = look(conn, job.id, after)
        return results, now.finished_at is not None and results.after >= results.ended

    async with AsyncExitStack() as stack:
        results, finished = await call.follow(
            job_topic(job.id), query, lambda got: bool(got[0].sizes or got[0].groups) or got[1], wait
        )
        # The records themselves are in memory only while a place for the answer is held.
        await stack.enter_async_context(plane.pages_of(results.sizes).turn(job.namespace))
        yield ResultPage(plane, kind, job, after, results, finished, form, stack)


@router.get("/{name}/trajectories")
async def trajectories(
    call: Named,
    cursor: Cursor = "",
    wait: Wait = 0.0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    status: TrajectoryStatus | None = None,
) -> Response:
    """Return ended rollouts after a cursor, as NDJSON, Parquet or msgpack according to Accept.

    With `application/vnd.rollyard.arrays+msgpack` the token lists are raw arrays.

    A page may hold fewer than `limit`, because it is limited in bytes too. The header `Rollyard-Cursor` is
    the cursor of the next page, and `Rollyard-Cursors` lists the cursors after each result: their common
    beginning, a semicolon, the number that follows it for the first result, and for each other result the
    difference of its number from the one before. `Rollyard-Finished` is true when no results will follow.
    """
    plane = call.plane
    states = [state for state in ENDED if status in (None, state.status)]
    look = partial(records.ended_after, limit=limit, states=states, max_bytes=plane.settings.page_bytes)
    async with result_page(call, "trajectories", cursor, wait, look) as page:
        lines: Sequence[Piece] = []
        short = page.results.sizes
        if short:
            read = partial(
                records.rows_of, job_id=page.job.id, cursor=page.after, states=states, last=short[-1].end_seq
            )
            rows = await plane.database.read(read)
            if len(rows) < len(short):
                raise cursors.gone(call.name)
            lines = await page.records(rows)
        return await page.answer(lines, [row.end_seq for row in short])


@router.get("/{name}/unscored")
async def unscored(
    call: Named,
    cursor: Cursor = "",
    wait: Wait = 0.0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Return rollouts that wait for the trainer's reward after a cursor, in the order in which they began to.

    Each is an UnscoredTrajectory. Those that have their reward by now, or have ended without one, are left
    out; without a cursor, all that still wait are returned. The headers are those of `trajectories`.
    """
    plane = call.plane
    most = plane.settings.page_bytes
    look = partial(waiting.waiting_after, limit=limit, max_bytes=most)
    async with result_page(call, "unscored", cursor, wait, look) as page:
        job, short = page.job, page.results.sizes
        if not short:
            return await page.answer([], [])
        read = partial(waiting.rows_of, job_id=job.id, cursor=page.after, last=short[-1].end_seq)
        rows = await plane.database.read(read)

        def make(row: waiting.UnscoredRow) -> bytes:
            head = waiting.head_of(row, job)
            segments = row.row.segments
            return packed.packed(head, segments) if page.form == ARRAYS else records.line_of(head, row.row)

        lines = await plane.archive.builds.run(partial(made, rows, make, most), job.namespace)
        return await page.answer(lines, [row.seq for row in rows])


@router.post("/{name}/rewards", openapi_extra=body_schema(TrainerRewards))
async def rewards(call: Named) -> Response:
    """Hand in the trainer's rewards: {"rewards": {id: number or {reward, components, reason, fence}}}.

    Either all are taken or none: 404 names unknown rollouts, 409 those that do not wait yet or have another
    reward, 422 wrong values. The answer is {accepted, repeated, late}: a reward that a rollout has already is
    `repeated`, and `late` says by id why a reward is no longer needed, such as TargetMet or PlaysAgain.
    """
    body = await call.body(TrainerRewards)
    await call.plane.refuse_when_full()
    return answer(await call.write(waiting.hand_in, body.rewards))


@router.get("/{name}/groups")
async def groups(
    call: Named,
    cursor: Cursor = "",
    wait: Wait = 0.0,
    limit: Annotated[int, Query(ge=1, le=256)] = 16,
    informative: bool = False,
    dropped: bool = False,
) -> Response:
    """Return whole groups after a cursor: {group_id, task_id, delivered, informative, reason, trajectories}.

    A delivered group's trajectories are those with a reward. `dropped=true` adds the groups with too few
    of them, without trajectories. A page may hold fewer than `limit`. The headers are those of
    `trajectories`.
    """
    plane = call.plane
    most = plane.settings.page_bytes
    look = partial(
        records.ended_groups_after, limit=limit, informative=informative, dropped=dropped, max_bytes=most
    )
    async with result_page(call, "groups", cursor, wait, look) as page:
        form, ended, short = page.form, page.results.groups, page.results.sizes
        lines: list[bytes] = []
        if not page.results.large:
            read = partial(records.rows_of_groups, job_id=page.job.id, of=[group for group, _ in ended])
            rows = await plane.database.read(read)
            if any(row.id not in rows for row in short):
                raise cursors.gone(call.name)
            got = await page.records([rows[row.id] for row in short])
            lines = delivery.whole_groups(ended, got, form)
        places = [group.seq for group, _ in ended]
        if lines or not ended:
            return await page.answer(lines, places)
        group, members = ended[0]
        if form == MSGPACK:
            raise TooLarge(
                f"group {group.task_id!r} has more than {most} bytes: it comes as {NDJSON} or {ARRAYS} only",
                reason="GroupTooLarge",
            )
        return page.deliver(_large_group(page, group, members), places, 1)


async def _large_group(
    page: ResultPage, group: EndedGroup, members: list[RolloutSize]
) -> AsyncIterator[bytes]:
    """Read and send a group that has more bytes than a page, piece by piece.

    If it cannot be sent completely, the connection is cut, so no client takes a part for the whole group.
    """
    plane, job, form = page.plane, page.job, page.form
    begin, end = delivery.frame(1, form)
    yield begin + delivery.group_beginning(group, len(members), form)
    sent = 0
    while sent < len(members):
        after = members[sent - 1].sample if sent else -1
        most = plane.settings.page_bytes
        read = partial(records.some_members, job_id=job.id, group=group, after=after, max_bytes=most)
        rows = await plane.database.read(read)
        if not rows:
            raise cursors.gone(job.name)
        for record in await page.records(rows):
            yield (delivery.group_separator(form) if sent else b"") + bytes(record)
            sent += 1
    yield delivery.group_end(form) + end


@router.get("/{name}/rollouts")
async def list_rollouts(
    call: Named,
    filters: Annotated[RolloutFilter, from_query(RolloutFilter)],
    slim: bool = False,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
    after: Annotated[str, Query(alias="continue")] = "",
) -> Response:
    """List rollouts in brief: stage, status, attempts so far, reward, timings and worker.

    `retried=true` leaves out those without an attempt that did not end well. With `slim=true` rows are
    shorter, at most 200 come at once, and they are sorted and filtered: an order or a filter by what only
    ended rollouts have lists only these, and `sort=since` lists those that have not ended.
    """
    if slim:
        return await slim_page(call, filters, min(limit, MAX_ROWS), after)
    if not filters.is_plain:
        raise Malformed.of(
            "slim: must be true where rollouts are sorted, searched or filtered by more than stage and status"
        )

    def query(conn: Connection, namespace: str, name: str) -> tuple[list[dict[str, Any]], str | None]:
        job = job_rows.find(conn, namespace, name)
        begin = ""
        if after:
            begin = cursors.word(after, "rollouts", uid=job.uid, job=job.name, parameter="continue")
        most = call.plane.settings.page_bytes
        items, more = records.summaries(
            conn, job.id, filters.states, limit, begin, most, retried=filters.retried
        )
        return items, None if more is None else cursors.text("rollouts", job.uid, more)

    return page_answer(*await call.look(query))


@router.get("/{name}/rollouts/{rollout}")
async def get_rollout(call: Named, rollout: str, download: bool = False) -> Response:
    """Return the trajectory of a rollout that has ended.

    With `download=true` a browser saves it as text, and shows and runs nothing of it.
    """
    async with AsyncExitStack() as stack:
        line = await record_line(call.plane, stack, call.namespace, call.name, rollout)
        if not download:
            return Delivery(line, "application/json", {}, stack.pop_all())
        file_name = re.sub(r"[^A-Za-z0-9._-]", "_", rollout)
        headers = {
            "Content-Disposition": f'attachment; filename="{file_name}.json"',
            "X-Content-Type-Options": "nosniff",
        }
        return Delivery(line, "text/plain; charset=utf-8", headers, stack.pop_all())


@router.get("/{name}/events")
async def events(call: Named, last_event_id: Annotated[str, Header()] = "") -> Response:
    """Stream server-sent events: `transition` per stage transition, `counts` when counts have changed.

    The stream ends when the job has ended. A consumer that falls behind by a whole buffer is dropped with
    an event `dropped`. It may resume with Last-Event-ID while past events are kept. If events after that
    id are no longer kept, an event `missed` is sent first.
    """
    plane = call.plane
    job = await call.read(job_rows.find)
    after = plane.events.resume_after(job, last_event_id)
    async with AsyncExitStack() as stack:
        stack.enter_context(plane.streams.held(job.namespace))
        body = _stream(plane, job, after)
        return Delivery(body, "text/event-stream", {"Cache-Control": "no-store"}, stack.pop_all())


def _counts(conn: Connection, job_id: int) -> tuple[dict[str, Any], bool] | None:
    row = job_rows.by_id(conn, job_id)
    return None if row is None else (job_views.counts(conn, row), row.finished_at is not None)


async def _stream(plane: ControlPlane, job: JobRow, after: int | None) -> AsyncIterator[bytes]:
    sent: dict[str, Any] | None = None
    looked = -COUNTS_SECONDS
    now = asyncio.get_running_loop().time
    async for item in plane.events.subscribe(job.id, after, COUNTS_SECONDS / 4):
        if isinstance(item, Event):
            yield plane.events.format(job.uid, item)
        if item is not None and now() - looked < COUNTS_SECONDS:
            continue
        looked = now()
        counts = await plane.look(job.namespace, partial(_counts, job_id=job.id))
        if counts is None or plane.bus.closing:
            return
        if counts[0] != sent:
            sent = counts[0]
            yield b"event: counts\ndata: " + dumps(sent) + b"\n\n"
        elif item is None:
            yield b": idle\n\n"
        if counts[1] and item is None:
            yield b"event: end\ndata: {}\n\n"
            return


class Acknowledge(Model, strict=True):
    """A cursor that a reader has dealt with."""

    cursor: Annotated[str, Field(min_length=1, max_length=cursors.MAX_LENGTH)]
    """The cursor after the last result that need not be read again."""
    expected: Annotated[str, Field(max_length=cursors.MAX_LENGTH)] | None = None
    """The cursor that it replaces, or "" for none; default: whichever is kept."""
    rewind: bool = False
    """Whether the cursor may move backwards."""


@of_cursors.get("/{name}/cursors")
async def list_cursors(job: Named) -> Response:
    """List the acknowledged cursors of a job: {name, kind, cursor, movedAt}."""
    return answer({"items": await job.read(acknowledged.listed)})


@of_cursors.get("/{name}/cursors/{cursor}")
async def get_cursor(job: Named, cursor: CursorName) -> Response:
    """Return the cursor that was last acknowledged under this name."""
    return answer(await job.read(acknowledged.one, cursor))


@of_cursors.put("/{name}/cursors/{cursor}", openapi_extra=body_schema(Acknowledge))
async def acknowledge(job: Named, cursor: CursorName) -> Response:
    """Acknowledge the results before a cursor: 200 kept, 409 it would move backwards or was moved by another.

    A repeat with the same cursor changes nothing.
    """
    body = await job.body(Acknowledge)
    return answer(
        await job.write(acknowledged.acknowledge, cursor, body.cursor, body.expected, rewind=body.rewind)
    )


@of_cursors.delete("/{name}/cursors/{cursor}")
async def delete_cursor(job: Named, cursor: CursorName) -> Response:
    """Forget a cursor."""
    await job.write(acknowledged.forget, cursor)
    return answer({"name": cursor, "job": job.name, "namespace": job.namespace, "deleted": True})
