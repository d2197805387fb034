"""The events of the whole fleet as a stream, from one reader for all."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from rollyard_api.core.problems import QueryRefused
from rollyard_api.routes.common import Plane, StrictRoute
from rollyard_api.service import ControlPlane
from rollyard_api.trajectories.delivery import Delivery
from rollyard_api.views.fleet.feed import JobName

router = APIRouter(prefix="/v1", tags=["views"], route_class=StrictRoute)

_JOB = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}/[a-z0-9][a-z0-9.-]{0,62}")


@router.get("/events")
async def fleet_events(plane: Plane, job: Annotated[str, Query(max_length=127)] = "") -> Response:
    """Stream events of the fleet: `overview`, `job`, `gone` and `ended`, each at most once a second.

    `job=NAMESPACE/NAME` limits `job`, `gone` and `ended` to one job. The database is read once a second at
    most, however many streams are open. A consumer that falls behind is dropped with an event `dropped`.
    """
    only: JobName | None = None
    if job:
        if not _JOB.fullmatch(job):
            detail = f"job: must be NAMESPACE/NAME (got {job!r})"
            raise QueryRefused(detail, errors=[detail])
        namespace, _, name = job.partition("/")
        only = (namespace, name)
    await plane.views.fleet.look()  # An error of the database is answered before the stream begins.
    async with AsyncExitStack() as held:
        held.enter_context(plane.streams.held("" if only is None else only[0]))
        body = _stream(plane, only)
        return Delivery(body, "text/event-stream", {"Cache-Control": "no-store"}, held.pop_all())


async def _stream(plane: ControlPlane, only: JobName | None) -> AsyncIterator[bytes]:
    async for data in plane.views.feed.follow(only, lambda: plane.bus.closing):
        yield data
