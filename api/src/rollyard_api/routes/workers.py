"""Stage workers as processes: the route on which drivers report that a worker has died."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from rollyard_crds.workers import WorkerDeath, WorkerDied
from starlette.responses import Response

from rollyard_api.core.validation import validated
from rollyard_api.rollouts import worker_deaths
from rollyard_api.routes.common import answer, body_of, body_schema, plane_of

router = APIRouter(prefix="/v1/workers", tags=["workers"])


@router.post(
    "/died",
    responses={200: {"model": WorkerDeath}},
    openapi_extra=body_schema(WorkerDied.model_json_schema()),
)
async def died(request: Request) -> Response:
    """Take back the leases of a worker that its driver saw die. A repeat changes nothing."""
    plane = plane_of(request)
    report = validated(WorkerDied, await body_of(request))
    op = partial(
        worker_deaths.take_back,
        namespace=report.namespace,
        job=report.job,
        worker=report.worker,
        max_expiries=plane.settings.max_expiries,
    )
    death = await plane.database.write(op, durable=False)
    return answer({"returned": death.returned, "completed": death.completed})
