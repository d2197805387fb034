"""Stage workers as processes: drivers report dead ones, and those that stand ready get their jobs."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
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

from rollyard_api.core.problems import Conflict, Forbidden
from rollyard_api.core.wakeups import ready_topic
from rollyard_api.rollouts import assignments, sweeps
from rollyard_api.routes.common import Call, StrictRoute, answer, body_schema

router = APIRouter(prefix="/v1/workers", tags=["workers"], route_class=StrictRoute)


@router.post("/died", responses={200: {"model": WorkerDeath}}, openapi_extra=body_schema(WorkerDied))
async def died(call: Call) -> Response:
    """Take back the leases of a worker that its driver saw die. A repeat changes nothing."""
    report = await call.body(WorkerDied)
    death = await call.plane.database.write(partial(sweeps.worker_died, report=report), durable=False)
    return answer(death.model_dump())


@router.post(
    "/offers", responses={200: {"model": AssignmentOffered}}, openapi_extra=body_schema(AssignmentOffer)
)
async def offer(call: Call) -> Response:
    """Offer a job to one worker that stands ready. A repeat of the offer changes nothing."""
    body = await call.body(AssignmentOffer)
    return answer({"taken": await call.plane.database.write(partial(assignments.offer, request=body))})


@router.post(
    "/assignment",
    responses={200: {"model": Assignment}, 204: {"description": "No job was offered in time."}},
    openapi_extra=body_schema(AssignmentRequest),
)
async def assignment(call: Call) -> Response:
    """Hand a ready worker the job that it was offered, once, with the token of that job's workers.

    The call waits up to `wait` seconds for the offer.
    """
    plane = call.plane
    body = await call.body(AssignmentRequest)
    who = call.caller.ready
    if who is None or (who.namespace, who.worker) != (body.namespace, body.worker):
        raise Forbidden("this token is not that of the ready worker that the request names")

    async def offered() -> bool:
        return await plane.database.read(
            partial(assignments.is_offered, namespace=who.namespace, worker=who.worker)
        )

    with plane.worker_polls.held(who.namespace):
        topic = ready_topic(who.namespace, who.worker)
        arrived = await plane.bus.until(topic, offered, bool, body.wait, call.request.is_disconnected)
    if not arrived or await call.request.is_disconnected():
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
    token = job_token(plane.tokens.current("worker"), job.namespace, job.name, job.object_uid or job.uid)
    return answer(
        {"namespace": job.namespace, "job": job.name, "arguments": arguments, "token": token},
        headers={"Cache-Control": "no-store"},
    )
