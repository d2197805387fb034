"""The long poll with which drivers wait for changes of jobs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from rollyard_crds.unfinished import UnfinishedJobs
from starlette.responses import Response

from rollyard_api.core.wakeups import UNFINISHED
from rollyard_api.jobs import job_views
from rollyard_api.routes.common import Plane, StrictRoute, Wait, answer

router = APIRouter(prefix="/v1/unfinished", tags=["rolloutjobs"], route_class=StrictRoute)


@router.get("", responses={200: {"model": UnfinishedJobs}})
async def unfinished(
    request: Request,
    plane: Plane,
    revision: Annotated[int | None, Query(ge=0)] = None,
    wait: Wait = 0.0,
) -> Response:
    """List the jobs of all namespaces that drivers have to handle, by name, generation and cancel reason.

    With the `revision` of the last answer, the call waits up to `wait` seconds for a change of this list.
    """
    return answer(
        await plane.poll(
            "",
            UNFINISHED,
            partial(plane.database.read, job_views.unfinished),
            lambda found: revision is None or found["revision"] != revision,
            wait,
            request.is_disconnected,
        )
    )
