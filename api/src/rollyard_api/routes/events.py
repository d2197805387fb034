"""The events of a job as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.codec import dumps
from rollyard_api.jobs import job_views
from rollyard_api.jobs.events import Event, SlowConsumer
from rollyard_api.routes.common import Named, StrictRoute
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.rows import JobRow
from rollyard_api.trajectories.delivery import Delivery

router = APIRouter(prefix="/v1/rolloutjobs", tags=["results"], route_class=StrictRoute)

COUNTS_SECONDS = 1.0
"""The seconds between two reads of the counts of a job whose events a client follows."""


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
    async with AsyncExitStack() as held:
        held.enter_context(plane.streams.held(job.namespace))
        body = _stream(plane, job, after)
        return Delivery(body, "text/event-stream", {"Cache-Control": "no-store"}, held.pop_all())


def _counts(conn: Connection, job_id: int) -> tuple[dict[str, Any], bool] | None:
    row = job_rows.by_id(conn, job_id)
    return None if row is None else (job_views.counts(conn, row), row.finished_at is not None)


async def _stream(plane: ControlPlane, job: JobRow, after: int | None) -> AsyncIterator[bytes]:
    sent: dict[str, Any] | None = None
    looked = -COUNTS_SECONDS
    now = asyncio.get_running_loop().time
    try:
        async for item in plane.events.subscribe(job.id, after, COUNTS_SECONDS / 4):
            if isinstance(item, Event):
                yield plane.events.format(job.uid, item)
            if item is not None and now() - looked < COUNTS_SECONDS:
                continue
            looked = now()
            found = await plane.look(job.namespace, partial(_counts, job_id=job.id))
            if found is None or plane.bus.closing:
                return
            if found[0] != sent:
                sent = found[0]
                yield b"event: counts\ndata: " + dumps(sent) + b"\n\n"
            elif item is None:
                yield b": idle\n\n"
            if found[1] and item is None:
                yield b"event: end\ndata: {}\n\n"
                return
    except SlowConsumer as error:
        yield b"event: dropped\ndata: " + dumps({"reason": error.reason}) + b"\n\n"
