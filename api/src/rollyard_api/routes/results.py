"""What comes out of a job: trajectories, groups, summaries, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from rollyard_crds.rolloutjob import StageName
from rollyard_crds.trajectory import TrajectoryStatus
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core import cursors
from rollyard_api.core.codec import MSGPACK, dumps
from rollyard_api.core.problems import Conflict, Invalid, NotFound, TooLarge
from rollyard_api.core.states import ENDED, RolloutState
from rollyard_api.core.wakeups import job_topic
from rollyard_api.jobs import job_views, jobs
from rollyard_api.jobs.events import Event, SlowConsumer
from rollyard_api.routes.common import Namespace, Plane, Wait, answer, plane_of
from rollyard_api.service import ControlPlane
from rollyard_api.storage.rows import EndedGroup, JobRow, RolloutSize
from rollyard_api.storage.schema import rollouts
from rollyard_api.trajectories import delivery, grouping, records
from rollyard_api.trajectories.delivery import NDJSON, PARQUET, Delivery

router = APIRouter(prefix="/v1/rolloutjobs", tags=["results"])

COUNTS_SECONDS = 1.0
"""Between two looks at the counts of a job that somebody watches."""

Cursor = Annotated[str, Query()]


def _pages(kind: cursors.Kind, job: JobRow, after: int, finished: bool) -> dict[str, str]:
    return {
        "Rollyard-Cursor": cursors.text(kind, job.uid, after),
        "Rollyard-Finished": "true" if finished else "false",
    }


def _still(conn: Connection, job: JobRow) -> JobRow:
    """The job's row as it is now.

    Raises:
        NotFound: it was deleted.
        Gone: it was deleted, and another job has its name.
    """
    now = jobs.find(conn, job.namespace, job.name)
    if now.uid != job.uid:
        raise cursors.gone(job.name)
    return now


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
    """Ended rollouts after a cursor, as they come; NDJSON, Parquet or msgpack by Accept.

    A page may hold fewer than `limit`: it is bounded in bytes too.
    Header `Rollyard-Cursor`: where to go on. `Rollyard-Finished`: true when nothing will follow it.
    """
    plane = plane_of(request)
    job = await plane.database.read(partial(jobs.find, namespace=namespace, name=name))
    after = cursors.number(cursor, "trajectories", uid=job.uid, job=name, end=job.ended)
    wanted = [state for state in ENDED if status in (None, state.status)]
    most = plane.settings.page_bytes

    def query(conn: Connection) -> tuple[records.Ended, bool]:
        now = _still(conn, job)
        found = records.ended_after(conn, job.id, after, limit, wanted, most)
        return found, now.finished_at is not None and found.after >= found.ended

    async with AsyncExitStack() as held:
        found, finished = await plane.poll(
            namespace,
            job_topic(job.id),
            partial(plane.database.read, query),
            lambda got: bool(got[0].found) or got[1],
            wait,
            request.is_disconnected,
        )
        # The records themselves are in memory only while a place for the answer is held.
        await held.enter_async_context(plane.pages_of(found.found).held(namespace))
        lines: list[bytes] = []
        reached = found.after
        if found.found:
            last = found.found[-1].end_seq
            read = partial(records.rows_of, job_id=job.id, cursor=after, wanted=wanted, last=last)
            rows = await plane.database.read(read)
            if len(rows) < len(found.found):
                raise cursors.gone(name)
            lines = await plane.archive.lines(rows, namespace, name, job.uid, most)
            if len(lines) < len(rows):
                reached, finished = rows[len(lines) - 1].end_seq, False
        form = delivery.media_type(request.headers.get("accept", ""))
        data = await plane.archive.builds.run(partial(delivery.encode, lines, form), namespace)
        return Delivery(data, form, _pages("trajectories", job, reached, finished), held.pop_all())


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
    """Whole groups after a cursor: {group_id, task_id, delivered, informative, reason, trajectories}.

    A delivered group's trajectories are those with a reward; `dropped=true` adds the groups with
    too few of them, without trajectories. A page may hold fewer than `limit`. Headers as with
    trajectories.
    """
    form = delivery.media_type(request.headers.get("accept", ""))
    if form == PARQUET:
        raise Invalid("groups come as NDJSON or msgpack; Parquet is for /trajectories")
    plane = plane_of(request)
    job = await plane.database.read(partial(jobs.find, namespace=namespace, name=name))
    after = cursors.number(cursor, "groups", uid=job.uid, job=name, end=job.groups_ended)
    most = plane.settings.page_bytes

    def query(conn: Connection) -> tuple[grouping.Ended, bool]:
        now = _still(conn, job)
        found = grouping.ended_after(
            conn, job.id, after, limit, informative=informative, dropped=dropped, max_bytes=most
        )
        return found, now.finished_at is not None and found.after >= found.ended

    async with AsyncExitStack() as held:
        found, finished = await plane.poll(
            namespace,
            job_topic(job.id),
            partial(plane.database.read, query),
            lambda got: bool(got[0].groups) or got[1],
            wait,
            request.is_disconnected,
        )
        short = [row for _, members in found.groups for row in members]
        await held.enter_async_context(plane.pages_of(short).held(namespace))
        lines: list[bytes] = []
        if not found.large:
            read = partial(grouping.rows_of, job_id=job.id, of=[group for group, _ in found.groups])
            rows = await plane.database.read(read)
            if any(row.id not in rows for row in short):
                raise cursors.gone(name)
            ordered = [rows[row.id] for row in short]
            records_of = await plane.archive.lines(ordered, namespace, name, job.uid, most)
            lines = _whole_groups(found.groups, records_of)
        reached = found.after
        if 0 < len(lines) < len(found.groups):
            reached, finished = found.groups[len(lines) - 1][0].seq, False
        elif not lines and len(found.groups) > 1:
            reached, finished = found.groups[0][0].seq, False
        headers = _pages("groups", job, reached, finished)
        if found.groups and not lines:
            if form == MSGPACK:
                raise TooLarge(
                    f"group {found.groups[0][0].task_id!r} has more than {most} bytes: it comes as "
                    f"{NDJSON} only",
                    reason="GroupTooLarge",
                )
            return Delivery(_large_group(plane, job, *found.groups[0]), form, headers, held.pop_all())
        data = await plane.archive.builds.run(partial(delivery.encode, lines, form), namespace)
        return Delivery(data, form, headers, held.pop_all())


def _group_head(group: EndedGroup) -> bytes:
    head = dumps(
        {
            "group_id": group.task_id,
            "task_id": group.task_id,
            "delivered": bool(group.delivered),
            "informative": bool(group.informative),
            "reason": group.reason or "",
        }
    )
    return head[:-1] + b',"trajectories":['


def _whole_groups(found: list[tuple[EndedGroup, list[RolloutSize]]], lines: list[bytes]) -> list[bytes]:
    """The groups all of whose members' records are at hand, as JSON."""
    whole, at = [], 0
    for group, members in found:
        if at + len(members) > len(lines):
            break
        whole.append(_group_head(group) + b",".join(lines[at : at + len(members)]) + b"]}")
        at += len(members)
    return whole


async def _large_group(
    plane: ControlPlane, job: JobRow, group: EndedGroup, members: list[RolloutSize]
) -> AsyncIterator[bytes]:
    """A group that has more bytes than a page, read and sent piece by piece.

    Where it cannot be sent to its end, the connection is cut, so that nobody takes the part for the whole.
    """
    most = plane.settings.page_bytes
    yield _group_head(group)
    sent = 0
    while sent < len(members):
        after = members[sent - 1].sample if sent else -1
        read = partial(grouping.some_members, job_id=job.id, group=group, after=after, max_bytes=most)
        rows = await plane.database.read(read)
        if not rows:
            raise cursors.gone(job.name)
        for line in await plane.archive.lines(rows, job.namespace, job.name, job.uid, most):
            yield (b"," if sent else b"") + line
            sent += 1
    yield b"]}\n"


@router.get("/{name}/rollouts")
async def list_rollouts(
    plane: Plane,
    name: str,
    namespace: Namespace = "default",
    stage: StageName | None = None,
    status: Literal["queued", "leased", "succeeded", "failed", "cancelled"] | None = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
    after: Annotated[str, Query(alias="continue")] = "",
) -> Response:
    """Rollouts in short: stage, status, attempt, reward, timings, worker."""
    wanted = RolloutState.matching(stage, status)
    most = plane.settings.page_bytes

    def query(conn: Connection) -> tuple[list[dict[str, Any]], str | None]:
        job = jobs.find(conn, namespace, name)
        begin = _rollout_after(after, job)
        found, more = records.summaries(conn, job.id, wanted, limit, begin, most)
        return found, None if more is None else cursors.text("rollouts", job.uid, more)

    async with plane.looks.held(namespace):
        found, more = await plane.database.read(query)
    return answer({"items": found, "metadata": {} if more is None else {"continue": more}})


def _rollout_after(given: str, job: JobRow) -> str:
    """The rollout's id in `continue`; older clients give the id alone, which begins as the job's ids do."""
    if not given or given.startswith(f"{job.name}-{job.uid[:8]}-"):
        return given
    return cursors.word(given, "rollouts", uid=job.uid, job=job.name, parameter="continue")


@router.get("/{name}/rollouts/{rollout}")
async def get_rollout(plane: Plane, name: str, rollout: str, namespace: Namespace = "default") -> Response:
    """One ended rollout's trajectory."""

    def query(conn: Connection) -> tuple[JobRow, RolloutSize]:
        job = jobs.find(conn, namespace, name)
        short = records.sizes().add_columns(rollouts.c.state)
        row = conn.execute(short.where(rollouts.c.job_id == job.id, rollouts.c.id == rollout)).one_or_none()
        if row is None:
            raise NotFound(f"RolloutJob {name!r} has no rollout {rollout!r}", reason="RolloutNotFound")
        if row.end_seq is None:
            raise Conflict(
                f"rollout {rollout!r} has not ended: {row.state.status} in stage "
                f"{row.state.stage}; its trajectory is there once it has",
                reason="RolloutNotEnded",
            )
        *size, _state = row
        return job, RolloutSize(*size)

    async with AsyncExitStack() as held:
        job, short = await plane.database.read(query)
        await held.enter_async_context(plane.pages_of([short]).held(namespace))
        at = short.end_seq
        every = ENDED
        rows = await plane.database.read(
            partial(records.rows_of, job_id=job.id, cursor=at - 1, wanted=every, last=at)
        )
        if not rows:
            raise NotFound(f"no RolloutJob {name!r} in namespace {namespace!r}", reason="JobNotFound")
        (line,) = await plane.archive.lines(rows, namespace, name, job.uid, plane.settings.page_bytes)
        return Delivery(line, "application/json", {}, held.pop_all())


@router.get("/{name}/events")
async def events(
    request: Request,
    name: str,
    namespace: Namespace = "default",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Server-sent events: `transition` per stage transition, `counts` when counts have changed.

    Ends once the job has. A consumer that falls behind by a whole buffer is dropped with an
    event `dropped`; it may resume by Last-Event-ID while the past is kept. Where events after that
    id are not kept, an event `missed` says so first.
    """
    plane = plane_of(request)
    job = await plane.database.read(partial(jobs.find, namespace=namespace, name=name))
    after = plane.events.resume_after(job, last_event_id)
    async with AsyncExitStack() as held:
        held.enter_context(plane.streams.held(namespace))
        body = _told_when_dropped(_stream(plane, job, after))
        return Delivery(body, "text/event-stream", {"Cache-Control": "no-store"}, held.pop_all())


def _counts(conn: Connection, job_id: int) -> tuple[dict[str, Any], bool] | None:
    row = jobs.by_id(conn, job_id)
    return None if row is None else (job_views.counts(conn, row), row.finished_at is not None)


async def _stream(plane: ControlPlane, job: JobRow, after: int | None) -> AsyncIterator[bytes]:
    told: dict[str, Any] | None = None
    looked = -COUNTS_SECONDS
    now = asyncio.get_running_loop().time
    async for item in plane.events.subscribe(job.id, after, COUNTS_SECONDS / 4):
        if isinstance(item, Event):
            yield plane.events.format(job.uid, item)
        if item is not None and now() - looked < COUNTS_SECONDS:
            continue
        looked = now()
        async with plane.looks.held(job.namespace):
            found = await plane.database.read(partial(_counts, job_id=job.id))
        if found is None or plane.bus.closing:
            return
        if found[0] != told:
            told = found[0]
            yield b"event: counts\ndata: " + dumps(told) + b"\n\n"
        elif item is None:
            yield b": idle\n\n"
        if found[1] and item is None:
            yield b"event: end\ndata: {}\n\n"
            return


async def _told_when_dropped(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in stream:
            yield chunk
    except SlowConsumer as error:
        yield b"event: dropped\ndata: " + dumps({"reason": error.reason}) + b"\n\n"
