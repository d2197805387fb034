"""What comes out of a job: trajectories, groups, summaries, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

import msgpack
from fastapi import APIRouter, Header, Query, Request
from rollyard_crds.rolloutjob import StageName
from rollyard_crds.trajectory import TrajectoryStatus
from sqlalchemy.engine import Connection
from starlette.responses import Response, StreamingResponse

from rollyard_api import grouping, jobs, jobviews, records, states
from rollyard_api.bus import job_topic
from rollyard_api.codec import MSGPACK, dumps, loads
from rollyard_api.events import Event, SlowConsumer
from rollyard_api.problems import Conflict, Invalid, NotFound
from rollyard_api.routes.common import Namespace, Plane, Wait, answer, plane_of
from rollyard_api.schema import rollouts
from rollyard_api.service import ControlPlane

router = APIRouter(prefix="/v1/rolloutjobs", tags=["results"])

PARQUET = "application/vnd.apache.parquet"
NDJSON = "application/x-ndjson"
COUNTS_SECONDS = 1.0
"""Between two looks at the counts of a job that somebody watches."""

Cursor = Annotated[str, Query(pattern=r"^[0-9]*$", max_length=18)]


def _encoded(lines: list[bytes], accept: str) -> tuple[bytes, str]:
    if PARQUET in accept:
        from rollyard_api.parquet import encode

        return encode(lines), PARQUET
    if MSGPACK in accept:
        return bytes(msgpack.packb([loads(line) for line in lines])), MSGPACK
    return b"".join(line + b"\n" for line in lines), NDJSON


def _pages(after: int, finished: bool) -> dict[str, str]:
    return {"Rollyard-Cursor": str(after), "Rollyard-Finished": "true" if finished else "false"}


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

    Header `Rollyard-Cursor`: where to go on. `Rollyard-Finished`: true when nothing will follow it.
    """
    plane = plane_of(request)
    job = await plane.database.read(partial(jobs.find, namespace=namespace, name=name))
    wanted = [state for state, word in states.ENDED.items() if status in (None, word)]
    after = int(cursor or 0)

    def query(conn: Connection) -> tuple[list[bytes], int, bool]:
        rows, reached, ended = records.ended_after(conn, job.id, after, limit, wanted)
        now = jobs.find(conn, namespace, name)
        lines = [plane.archive.fetch(row, namespace, name, job.uid) for row in rows]
        return lines, reached, now.finished_at is not None and reached >= ended

    async def look() -> tuple[list[bytes], int, bool]:
        return await plane.database.read(query)

    lines, reached, finished = await plane.bus.until(
        job_topic(job.id), look, lambda got: bool(got[0]) or got[2], wait, request.is_disconnected
    )
    data, media_type = await asyncio.to_thread(_encoded, lines, request.headers.get("accept", ""))
    return Response(data, media_type=media_type, headers=_pages(reached, finished))


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
    too few of them, without trajectories. Headers as with trajectories.
    """
    plane = plane_of(request)
    job = await plane.database.read(partial(jobs.find, namespace=namespace, name=name))
    after = int(cursor or 0)

    def query(conn: Connection) -> tuple[list[bytes], int, bool]:
        found, reached = grouping.ended_after(
            conn, job.id, after, limit, informative=informative, dropped=dropped
        )
        now = jobs.find(conn, namespace, name)
        lines = [_group(plane, group, members, namespace, name, job.uid) for group, members in found]
        return lines, reached, now.finished_at is not None and reached >= now.groups_ended

    async def look() -> tuple[list[bytes], int, bool]:
        return await plane.database.read(query)

    lines, reached, finished = await plane.bus.until(
        job_topic(job.id), look, lambda got: bool(got[0]) or got[2], wait, request.is_disconnected
    )
    accept = request.headers.get("accept", "")
    if PARQUET in accept:
        raise Invalid("groups come as NDJSON or msgpack; Parquet is for /trajectories")
    data, media_type = _encoded(lines, accept)
    return Response(data, media_type=media_type, headers=_pages(reached, finished))


def _group(plane: ControlPlane, group: Any, members: list[Any], namespace: str, name: str, uid: str) -> bytes:
    kept = grouping.trained_on(members) if group.delivered else []
    head = dumps(
        {
            "group_id": group.task_id,
            "task_id": group.task_id,
            "delivered": bool(group.delivered),
            "informative": bool(group.informative),
            "reason": group.reason or "",
        }
    )
    lines = [plane.archive.fetch(row, namespace, name, uid) for row in kept]
    return head[:-1] + b',"trajectories":[' + b",".join(lines) + b"]}"


@router.get("/{name}/rollouts")
async def list_rollouts(
    plane: Plane,
    name: str,
    namespace: Namespace = "default",
    stage: StageName | None = None,
    status: Literal["queued", "leased", "succeeded", "failed", "cancelled"] | None = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
    after: Annotated[str, Query(alias="continue", max_length=128)] = "",
) -> Response:
    """Rollouts in short: stage, status, attempt, reward, timings, worker."""
    wanted = states.states_matching(stage, status)

    def query(conn: Connection) -> tuple[list[dict[str, Any]], str | None]:
        job = jobs.find(conn, namespace, name)
        return records.summaries(conn, job.id, wanted, limit, after)

    found, more = await plane.database.read(query)
    return answer({"items": found, "metadata": {} if more is None else {"continue": more}})


@router.get("/{name}/rollouts/{rollout}")
async def get_rollout(plane: Plane, name: str, rollout: str, namespace: Namespace = "default") -> Response:
    """One ended rollout's trajectory."""

    def query(conn: Connection) -> bytes:
        job = jobs.find(conn, namespace, name)
        row = conn.execute(
            records.select().where(rollouts.c.job_id == job.id, rollouts.c.id == rollout)
        ).one_or_none()
        if row is None:
            raise NotFound(f"RolloutJob {name!r} has no rollout {rollout!r}", reason="RolloutNotFound")
        if row.end_seq is None:
            raise Conflict(
                f"rollout {rollout!r} has not ended: {states.status_of(row.state)} in stage "
                f"{states.stage_of(row.state)}; its trajectory is there once it has",
                reason="RolloutNotEnded",
            )
        return plane.archive.fetch(row, namespace, name, job.uid)

    return Response(await plane.database.read(query), media_type="application/json")


@router.get("/{name}/events")
async def events(
    request: Request,
    name: str,
    namespace: Namespace = "default",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Server-sent events: `transition` per stage transition, `counts` when counts have changed.

    Ends once the job has. A consumer that falls behind by a whole buffer is dropped with an
    event `dropped`; it may resume by Last-Event-ID while the past is kept.
    """
    plane = plane_of(request)
    job = await plane.database.read(partial(jobs.find, namespace=namespace, name=name))
    body = _told_when_dropped(_stream(plane, job.id, last_event_id))
    return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _counts(conn: Connection, job_id: int) -> tuple[dict[str, Any], bool] | None:
    row = jobs.by_id(conn, job_id)
    return None if row is None else (jobviews.counts(conn, row), row.finished_at is not None)


async def _stream(plane: ControlPlane, job_id: int, last_id: str) -> AsyncIterator[bytes]:
    told: dict[str, Any] | None = None
    looked = -COUNTS_SECONDS
    now = asyncio.get_running_loop().time
    async for item in plane.events.subscribe(job_id, last_id, COUNTS_SECONDS / 4):
        if isinstance(item, Event):
            yield plane.events.format(item)
        if item is not None and now() - looked < COUNTS_SECONDS:
            continue
        looked = now()
        found = await plane.database.read(partial(_counts, job_id=job_id))
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
