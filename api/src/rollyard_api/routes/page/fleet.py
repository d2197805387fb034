"""The fleet at a glance and as a stream of events, its jobs as slim rows, and what a worker holds."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.problems import QueryRefused
from rollyard_api.routes.common import Plane, StrictRoute, answer, from_query, page_answer
from rollyard_api.storage import jobs as job_rows
from rollyard_api.trajectories.delivery import Delivery
from rollyard_api.views.fleet import jobs as slim_jobs
from rollyard_api.views.fleet.feed import JobName
from rollyard_api.views.fleet.jobs import JobFilter
from rollyard_api.views.job import rollout_list

router = APIRouter(prefix="/v1", tags=["views"], route_class=StrictRoute)

MAX_ROWS: Final = 200
"""The largest number of slim rows in an answer."""
_Namespace = Annotated[str | None, Query(max_length=63)]


@router.get("/overview")
async def overview(plane: Plane) -> Response:
    """Return the fleet at a glance: jobs by phase, queues, rates, pools, nodes and workers.

    All who ask within a second get the same answer. `time` says when it was read.
    """
    return answer((await plane.views.fleet.look()).overview)


@router.get("/jobs")
async def list_slim_jobs(
    plane: Plane,
    filters: Annotated[JobFilter, from_query(JobFilter)],
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 100,
    after: Annotated[str, Query(alias="continue", max_length=512)] = "",
) -> Response:
    """List jobs as slim rows, those that are late first; `metadata.continue` begins the next page."""
    fleet = await plane.views.fleet.look()
    return page_answer(*slim_jobs.page(fleet.jobs, filters, limit, after))


@router.get("/workers/{name}/rollouts")
async def worker_rollouts(plane: Plane, name: str, namespace: _Namespace = None) -> Response:
    """List the rollouts that a worker of this name holds, as slim rows with `namespace` and `job`.

    At most 200 are listed, those that it has held for longest first.
    """

    def query(conn: Connection) -> list[dict[str, Any]]:
        leased = rollout_list.held_by(conn, name, MAX_ROWS)
        items = []
        for job_id in dict.fromkeys(row.job_id for row in leased):
            job = job_rows.by_id(conn, job_id)
            if job is not None and namespace in (None, job.namespace):
                rows = rollout_list.slim(conn, job, [row for row in leased if row.job_id == job_id])
                items += [row | {"namespace": job.namespace, "job": job.name} for row in rows]
        return sorted(items, key=lambda row: row["since"])

    return page_answer(await plane.look(namespace or "", query), None)


_JOB: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}/[a-z0-9][a-z0-9.-]{0,62}")


@router.get("/events")
async def fleet_events(plane: Plane, job: Annotated[str, Query(max_length=127)] = "") -> Response:
    """Stream events of the fleet: `overview`, `job`, `gone` and `ended`, each at most once a second.

    `job=NAMESPACE/NAME` limits `job`, `gone` and `ended` to one job. The database is read once a second at
    most, however many streams are open. A consumer that falls behind is dropped with an event `dropped`.
    """
    only: JobName | None = None
    if job:
        if not _JOB.fullmatch(job):
            raise QueryRefused.of(f"job: must be NAMESPACE/NAME (got {job!r})")
        namespace, _, name = job.partition("/")
        only = (namespace, name)
    await plane.views.fleet.look()  # An error of the database is answered before the stream begins.
    async with AsyncExitStack() as stack:
        stack.enter_context(plane.streams.held("" if only is None else only[0]))
        body = plane.views.feed.follow(only, lambda: plane.bus.closing)
        return Delivery(body, "text/event-stream", {"Cache-Control": "no-store"}, stack.pop_all())
