"""Stage workers as processes: drivers report dead ones, and those that stand ready get their jobs."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from rollyard_crds.security.job_token import job_token
from rollyard_crds.workers import (
    Assignment,
    AssignmentOffer,
    AssignmentOffered,
    AssignmentRequest,
    WorkerDeath,
    WorkerDied,
)
from starlette.responses import Response

from rollyard_api.core.codec import validated
from rollyard_api.core.problems import Conflict, Forbidden
from rollyard_api.core.wakeups import ready_topic
from rollyard_api.rollouts import assignments, sweeps
from rollyard_api.routes.common import Plane, StrictRoute, answer, body_of, body_schema, caller_of

router = APIRouter(prefix="/v1/workers", tags=["workers"], route_class=StrictRoute)


@router.post("/died", responses={200: {"model": WorkerDeath}}, openapi_extra=body_schema(WorkerDied))
async def died(request: Request, plane: Plane) -> Response:
    """Take back the leases of a worker that its driver saw die. A repeat changes nothing."""
    report = validated(WorkerDied, await body_of(request))
    op = partial(sweeps.worker_died, report=report, max_expiries=plane.settings.max_expiries)
    death = await plane.database.write(op, durable=False)
    return answer(death.model_dump())


@router.post(
    "/offers", responses={200: {"model": AssignmentOffered}}, openapi_extra=body_schema(AssignmentOffer)
)
async def offer(request: Request, plane: Plane) -> Response:
    """Offer a job to one worker that stands ready. A repeat of the offer changes nothing."""
    given = validated(AssignmentOffer, await body_of(request))
    return answer({"taken": await plane.database.write(partial(assignments.offer, given=given))})


@router.post(
    "/assignment",
    responses={200: {"model": Assignment}, 204: {"description": "No job was offered in time."}},
    openapi_extra=body_schema(AssignmentRequest),
)
async def assignment(request: Request, plane: Plane) -> Response:
    """Hand a ready worker the job that it was offered, once, with the token of that job's workers.

    The call waits up to `wait` seconds for the offer.
    """
    asked = validated(AssignmentRequest, await body_of(request))
    who = caller_of(request).ready
    if who is None or (who.namespace, who.worker) != (asked.namespace, asked.worker):
        raise Forbidden("this token is not that of the ready worker that the request names")

    async def offered() -> bool:
        return await plane.database.read(
            partial(assignments.is_offered, namespace=who.namespace, worker=who.worker)
        )

    with plane.worker_polls.held(who.namespace):
        topic = ready_topic(who.namespace, who.worker)
        found = await plane.bus.until(topic, offered, bool, asked.wait, request.is_disconnected)
    if not found or await request.is_disconnected():
        return Response(status_code=204)
    op = partial(assignments.take, namespace=who.namespace, worker=who.worker)
    # A token is spent for good, even if the machine loses its power now.
    taken = await plane.database.write(op)
    if taken == "taken":
        raise Conflict(
            f"the assignment of the ready worker {who.worker!r} was handed out already",
            reason="AssignmentTaken",
        )
    if taken == "withdrawn":
        raise Conflict(
            f"the job that was offered to the ready worker {who.worker!r} has ended or was deleted",
            reason="AssignmentWithdrawn",
        )
    job, arguments = taken
    token = job_token(plane.tokens.worker, job.namespace, job.name, job.object_uid or job.uid)
    return answer(
        {"namespace": job.namespace, "job": job.name, "arguments": arguments, "token": token},
        headers={"Cache-Control": "no-store"},
    )
