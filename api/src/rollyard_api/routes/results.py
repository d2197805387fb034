"""The results of a job: trajectories, groups and summaries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from rollyard_crds.trajectory import TrajectoryStatus
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core import cursors
from rollyard_api.core.codec import MSGPACK
from rollyard_api.core.problems import Invalid, TooLarge
from rollyard_api.machine.states import ENDED
from rollyard_api.routes.common import Namespace, StrictRoute, Wait, answer, is_older_client, plane_of
from rollyard_api.routes.page.records import record_line
from rollyard_api.routes.page.rollout_pages import check_plain_list, rollout_filter, slim_page
from rollyard_api.routes.result_pages import ResultPage, result_page
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.rows import EndedGroup, JobRow, RolloutSize
from rollyard_api.trajectories import attempts, delivery, group_records, grouping, records
from rollyard_api.trajectories.delivery import NDJSON, PARQUET, Delivery, Piece
from rollyard_api.trajectories.packed import ARRAYS
from rollyard_api.views.job.rollout_list import MAX_ROWS, RolloutFilter

router = APIRouter(prefix="/v1/rolloutjobs", tags=["results"], route_class=StrictRoute)

Cursor = Annotated[str, Query()]


@router.get("/{name}/trajectories")
async def trajectories(
    request: Request,
    name: str,
    namespace: Namespace = "default",
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
    plane = plane_of(request)
    wanted = [state for state in ENDED if status in (None, state.status)]
    most = plane.settings.page_bytes

    def look(conn: Connection, job_id: int, after: int) -> records.EndedRollouts:
        return records.ended_after(conn, job_id, after, limit, wanted, most)

    form = delivery.media_type(request.headers.get("accept", ""))
    async with result_page(
        request, "trajectories", namespace, name, cursor, wait, end=lambda job: job.ended, look=look
    ) as page:
        lines: Sequence[Piece] = []
        reached = None
        short = page.found.sizes
        if short:
            read = partial(
                records.rows_of, job_id=page.job.id, cursor=page.after, wanted=wanted, last=short[-1].end_seq
            )
            rows = await plane.database.read(read)
            if len(rows) < len(short):
                raise cursors.gone(name)
            lines = await page.records(rows, form)
            if len(lines) < len(rows):
                reached = rows[len(lines) - 1].end_seq
        places = [row.end_seq for row in short[: len(lines)]]
        return await page.answer(lines, form, reached, places)


@router.get("/{name}/groups")
async def groups(
    request: Request,
    name: str,
    namespace: Namespace = "default",
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
    form = delivery.media_type(request.headers.get("accept", ""))
    if form == PARQUET:
        raise Invalid("groups come as NDJSON or msgpack; Parquet is for /trajectories")
    plane = plane_of(request)
    most = plane.settings.page_bytes

    def look(conn: Connection, job_id: int, after: int) -> grouping.EndedGroups:
        return grouping.ended_after(
            conn, job_id, after, limit, informative=informative, dropped=dropped, max_bytes=most
        )

    async with result_page(
        request, "groups", namespace, name, cursor, wait, end=lambda job: job.groups_ended, look=look
    ) as page:
        found, short = page.found.groups, page.found.sizes
        lines: list[bytes] = []
        if not page.found.large:
            read = partial(grouping.rows_of, job_id=page.job.id, of=[group for group, _ in found])
            rows = await plane.database.read(read)
            if any(row.id not in rows for row in short):
                raise cursors.gone(name)
            got = await page.records([rows[row.id] for row in short], form)
            lines = group_records.whole(found, got, form)
        reached = found[max(len(lines), 1) - 1][0].seq if len(lines) < len(found) and len(found) > 1 else None
        if lines or not found:
            return await page.answer(lines, form, reached, [group.seq for group, _ in found[: len(lines)]])
        group, members = found[0]
        if form == MSGPACK:
            raise TooLarge(
                f"group {group.task_id!r} has more than {most} bytes: it comes as {NDJSON} or {ARRAYS} only",
                reason="GroupTooLarge",
            )
        return page.deliver(_large_group(page, group, members, form), form, reached, [group.seq])


async def _large_group(
    page: ResultPage[grouping.EndedGroups], group: EndedGroup, members: list[RolloutSize], form: str
) -> AsyncIterator[bytes]:
    """Read and send a group that has more bytes than a page, piece by piece.

    If it cannot be sent completely, the connection is cut, so no client takes a part for the whole group.
    """
    plane, job = page.plane, page.job
    begin, end = delivery.frame(1, form)
    yield begin + group_records.beginning(group, len(members), form)
    sent = 0
    while sent < len(members):
        after = members[sent - 1].sample if sent else -1
        most = plane.settings.page_bytes
        read = partial(grouping.some_members, job_id=job.id, group=group, after=after, max_bytes=most)
        rows = await plane.database.read(read)
        if not rows:
            raise cursors.gone(job.name)
        for record in await page.records(rows, form):
            yield (group_records.separator(form) if sent else b"") + bytes(record)
            sent += 1
    yield group_records.end(form) + end


@router.get("/{name}/rollouts")
async def list_rollouts(
    request: Request,
    name: str,
    asked: Annotated[RolloutFilter, Depends(rollout_filter)],
    namespace: Namespace = "default",
    slim: bool = False,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
    after: Annotated[str, Query(alias="continue")] = "",
) -> Response:
    """List rollouts in brief: stage, status, attempts so far, reward, timings and worker.

    `retried=true` leaves out those without an attempt that did not end well. With `slim=true` rows are
    shorter, at most 200 come at once, and they are sorted and filtered: an order by what only ended
    rollouts have, and a filter of it, lists these alone, and `sort=since` lists those that have not ended.
    """
    plane = plane_of(request)
    if slim:
        return await slim_page(plane, namespace, name, asked, min(limit, MAX_ROWS), after)
    check_plain_list(asked)
    most = plane.settings.page_bytes

    def query(conn: Connection) -> tuple[list[dict[str, Any]], str | None]:
        job = job_rows.find(conn, namespace, name)
        begin = _rollout_after(after, job)
        found, more = records.summaries(conn, job.id, asked.states, limit, begin, most, retried=asked.retried)
        return found, None if more is None else cursors.text("rollouts", job.uid, more)

    async with plane.looks.held(namespace):
        found, more = await plane.database.read(query)
    if is_older_client(request):
        found = [{k: v for k, v in item.items() if k not in attempts.FIELDS} for item in found]
    return answer({"items": found, "metadata": {} if more is None else {"continue": more}})


def _rollout_after(given: str, job: JobRow) -> str:
    """Return the rollout's id in `continue`. Older clients give the id alone, with the job's id prefix."""
    if not given or given.startswith(f"{job.name}-{job.uid[:8]}-"):
        return given
    return cursors.word(given, "rollouts", uid=job.uid, job=job.name, parameter="continue")


@router.get("/{name}/rollouts/{rollout}")
async def get_rollout(
    request: Request, name: str, rollout: str, namespace: Namespace = "default", download: bool = False
) -> Response:
    """Return the trajectory of a rollout that has ended.

    With `download=true` a browser saves it as a text, and shows and runs nothing of it.
    """
    plane = plane_of(request)
    async with AsyncExitStack() as held:
        _, line = await record_line(plane, held, namespace, name, rollout)
        if is_older_client(request):
            line = attempts.without(line)
        if not download:
            return Delivery(line, "application/json", {}, held.pop_all())
        headers = {
            "Content-Disposition": f'attachment; filename="{_file_name(rollout)}.json"',
            "X-Content-Type-Options": "nosniff",
        }
        return Delivery(line, "text/plain; charset=utf-8", headers, held.pop_all())


def _file_name(rollout: str) -> str:
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in rollout
    )
