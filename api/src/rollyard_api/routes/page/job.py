"""What people look at of one job: its groups as a grid, its statistics, and its stages over time."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.machine.jobs import prefix_of
from rollyard_api.routes.common import Namespace, Plane, StrictRoute, answer, from_query, page_answer
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.rows import JobRow
from rollyard_api.views.job import folding, rollout_list
from rollyard_api.views.job import gantt as gantt_rows
from rollyard_api.views.job import grid as grid_rows
from rollyard_api.views.job.gantt import GanttSort
from rollyard_api.views.job.grid import GroupFilter

router = APIRouter(prefix="/v1/rolloutjobs", tags=["views"], route_class=StrictRoute)

FOLDS = 20
"""The number of transactions with which a request folds what has just ended, before it answers."""


async def folded(plane: Plane, name: str, namespace: Namespace = "default") -> JobRow:
    """Return a job after what has ended of it was folded, as far as FOLDS transactions go.

    Raises:
        NotFound: There is no such job.
    """

    def query(conn: Connection) -> tuple[JobRow, bool]:
        job = job_rows.find(conn, namespace, name)
        return job, folding.is_behind(conn, job)

    async with plane.looks.held(namespace):
        job, behind = await plane.database.read(query)
        if behind:
            await plane.views.folding.fold(job.id, FOLDS)
    return job


_Folded = Annotated[JobRow, Depends(folded)]


@router.get("/{name}/grid")
async def grid(
    plane: Plane,
    job: _Folded,
    asked: Annotated[GroupFilter, from_query(GroupFilter)],
    limit: Annotated[int, Query(ge=1, le=grid_rows.MAX_GROUPS)] = 100,
    after: Annotated[str, Query(alias="continue", max_length=256)] = "",
) -> Response:
    """List groups with one cell a sample: [id after `prefix`, q|l|s|f|c, reward], without trajectories.

    Any order but `no` lists the groups that have ended. `status` selects groups of which a sample has it.
    """
    look = partial(grid_rows.page, job=job, asked=asked, limit=limit, given=after)
    items, more = await plane.look(job.namespace, look)
    return page_answer(items, more, prefix=f"{prefix_of(job.name, job.uid)}-")


@router.get("/{name}/statistics")
async def statistics(plane: Plane, job: _Folded) -> Response:
    """Return the statistics that are kept of a job: rewards, versions, time, failures, stages.

    `upto` is the number of ended rollouts that they hold. `by_time` has the width of its buckets in seconds.
    """

    def look(conn: Connection) -> dict[str, Any]:
        return folding.statistics(conn, job, rollout_list.labels(conn, job))

    return answer(await plane.look(job.namespace, look))


@router.get("/{name}/gantt")
async def gantt(
    plane: Plane,
    job: _Folded,
    sort: GanttSort = "-duration",
    limit: Annotated[int, Query(ge=1, le=gantt_rows.MAX_ROWS)] = 100,
) -> Response:
    """List rollouts with their time in each state: [state, begin, end] in seconds since the epoch.

    Those that worked longest come first, or with `sort=started` the newest in the order of their begins. A
    rollout that has not ended has `open` and ends at `time`.
    """
    now = time.time()
    look = partial(gantt_rows.rows, job=job, sort=sort, limit=limit, now=now)
    items = await plane.look(job.namespace, look)
    return answer({"time": now, "items": items, "metadata": {}})
