"""The routes of stage workers: leases and their results, sandbox claims, and the processes themselves.

In addition, the calls by which drivers fulfil claims, report dead workers, and give ready ones their jobs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from rollyard_crds.claims import Claim, ClaimList, ClaimRequest, ClaimStatus
from rollyard_crds.lease import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    LeaseRequest,
    LeaseResponse,
    OutcomeResponse,
    RewardRequest,
    RewardResponse,
    RouteRequest,
    RouteResponse,
)
from rollyard_crds.rolloutjob import StageName
from rollyard_crds.security.job_token import job_token
from rollyard_crds.workers import (
    Assignment,
    AssignmentOffer,
    AssignmentOffered,
    AssignmentRequest,
    WaitingImages,
    WorkerDeath,
    WorkerDied,
)
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.access import permissions
from rollyard_api.core.codec import encode
from rollyard_api.core.problems import Conflict, Forbidden, NotFound
from rollyard_api.core.wakeups import CLAIMS, QUEUE, claim_topic, queue_topic, ready_topic
from rollyard_api.jobs import job_views, reward_services
from rollyard_api.rollouts import assignments, claims, heartbeats, leasing, reports, sweeps
from rollyard_api.rollouts.leasing import Granted
from rollyard_api.routes.common import Call, Named, RestCall, StrictRoute, Wait, answer, body_schema
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import ClaimRow
from rollyard_api.views.rollout import live

log = logging.getLogger("rollyard.api")

router = APIRouter(prefix="/v1/leases", tags=["leases"], route_class=StrictRoute)
of_claims = APIRouter(prefix="/v1/claims", tags=["claims"], route_class=StrictRoute)
of_workers = APIRouter(prefix="/v1/workers", tags=["workers"], route_class=StrictRoute)


def _reply(request: Request, document: Any) -> Response:
    data, media_type = encode(document, request.headers.get("accept", ""))
    return Response(data, media_type=media_type)


@router.post("", responses={200: {"model": LeaseResponse}}, openapi_extra=body_schema(LeaseRequest))
async def lease(request: Request) -> Response:
    """Lease up to 64 rollouts. The call waits up to `wait` seconds for the first one."""
    call = RestCall(request)
    plane = call.plane
    body = await call.body(LeaseRequest)
    call.refuse_other_job(body.namespace or "default", body.job)
    job_id = None if call.bound is None else call.bound.id
    plane.views.seen_workers.heard(job_id, body.worker, body.node, time.time(), body.capacity)
    stages = sorted(stage for stage, places in body.capacity.items() if places > 0)
    with plane.worker_polls.held(body.namespace or "") if body.wait > 0 else nullcontext():
        granted, draining = await plane.bus.until(
            queue_topic(stages[0]) if len(stages) == 1 else QUEUE,
            partial(_granted, plane, body, job_id, stages),
            lambda got: bool(got[0].leases) or got[1],
            body.wait,
            request.is_disconnected,
        )
    return _reply(request, {**granted._asdict(), "draining": draining})


async def _granted(
    plane: ControlPlane, ask: LeaseRequest, job_id: int | None, stages: list[StageName]
) -> tuple[Granted, bool]:
    """Return the leases that can be granted now, and whether the requested job has ended."""
    now = asyncio.get_running_loop().time
    same = (ask.namespace, ask.job, job_id, ask.node, *stages)
    async with plane.grants.turn(ask.namespace or ""):
        changes, begun = plane.bus.queue_changes(stages), now()
        if plane.empty_answers.is_known(same, changes, begun):
            return Granted([]), False
        granted, over = await plane.database.write(partial(_grant, plane, ask, job_id), durable=False)
        if not granted.leases and not over:
            plane.empty_answers.note(same, changes, begun)
        return granted, over


def _grant(
    plane: ControlPlane, ask: LeaseRequest, job_id: int | None, tx: Transaction
) -> tuple[Granted, bool]:
    settings = plane.settings
    granted = leasing.grant(
        tx,
        ask,
        job_id,
        settings.lease_seconds,
        settings.page_bytes,
        settings.max_harness_runs_per_namespace,
    )
    if granted.leases:
        # Their sandboxes may wait for this node before the worker's next heartbeat.
        heartbeats.heard(tx, ask.node, job_id)
    if granted.leases or ask.job is None:
        return granted, False
    job = job_rows.named(tx.conn, ask.namespace or "default", ask.job)
    return granted, job is None or job.finished_at is not None or job_id not in (None, job.id)


@router.post(
    "/heartbeat", responses={200: {"model": HeartbeatResponse}}, openapi_extra=body_schema(HeartbeatRequest)
)
async def heartbeat(request: Request) -> Response:
    """Renew leases. The answer names lost and cancelled leases, and orphaned sandboxes."""
    call = RestCall(request)
    plane = call.plane
    beat = await call.body(HeartbeatRequest)
    leases = [(ref.rollout, ref.token) for ref in beat.leases]
    job_id = None if call.bound is None else call.bound.id
    # The list of one job's workers is kept separately, so it does not replace what other workers listed.
    node = beat.node if call.bound is None else f"{beat.node} {job_id}"
    watches = plane.views.watching.possible(time.time())

    def op(tx: Transaction) -> tuple[dict[str, Any], list[str], float | None, float]:
        lost, cancelled = heartbeats.renew(tx, leases, plane.settings.lease_seconds)
        unnamed, oldest_init = heartbeats.claims(tx, beat.node, beat.sandboxes)
        heartbeats.heard(tx, beat.node, job_id)
        renewed: dict[str, Any] = {
            "lost": [{"rollout": rollout, "token": token} for rollout, token in lost],
            "cancelled": [{"rollout": rollout, "token": token} for rollout, token in cancelled],
            "orphans": heartbeats.give_up(tx, beat.ending) if beat.ending else [],
            "watched": [],
        }
        if watches or beat.live:
            dropped = {rollout for rollout, _ in (*lost, *cancelled)}
            current = {rollout: token for rollout, token in leases if rollout not in dropped}
            live.take(tx, beat.live, current)
            renewed["watched"] = live.watched(tx, current) if watches else []
        return renewed, unnamed, oldest_init, tx.now

    renewed, unnamed, oldest_init, now = await call.write_own(
        op, [rollout for rollout, _ in leases], beat.ending, durable=False
    )
    plane.views.seen_workers.heard(job_id, beat.worker, beat.node, time.time())
    orphans = plane.unclaimed.orphans(node, unnamed, oldest_init, now)
    renewed["orphans"] = sorted({*orphans, *renewed["orphans"]})
    return _reply(request, renewed)


@router.post(
    "/complete", responses={200: {"model": OutcomeResponse}}, openapi_extra=body_schema(CompleteRequest)
)
async def complete(request: Request) -> Response:
    """Report stage results. Each is committed before it is answered."""
    call = RestCall(request)
    reported, sandboxes = reports.check_results(await call.document())
    return await _reported(call, reported, sandboxes)


@router.post("/fail", responses={200: {"model": OutcomeResponse}}, openapi_extra=body_schema(FailRequest))
async def fail(request: Request) -> Response:
    """Report infrastructure failures. The rollouts are retried while attempts are left."""
    call = RestCall(request)
    return await _reported(call, reports.check_failures(await call.document()))


async def _reported(
    call: RestCall, reported: Sequence[reports.ReportedEvent], sandboxes: Collection[str] = ()
) -> Response:
    await call.plane.refuse_when_full()
    op = partial(reports.accept, reports=reported)
    result = await call.write_own(op, [report.rollout for report in reported], sandboxes)
    return _reply(call.request, {"outcomes": result})


@router.post("/route", responses={200: {"model": RouteResponse}}, openapi_extra=body_schema(RouteRequest))
async def route(request: Request) -> Response:
    """Return another backend for a rollout whose backend failed, or, if none has room, a time to retry."""
    call = RestCall(request)
    body = await call.body(RouteRequest)
    rerouted = await call.write_own(partial(leasing.reroute, request=body), [body.rollout])
    if rerouted.opened:
        log.warning("backend %s: its circuit opens; last error: %s", body.failed_url, body.error)
    if rerouted.outcome == "unknown":
        raise NotFound(f"there is no rollout {body.rollout!r}", reason="RolloutNotFound")
    if rerouted.outcome == "stale":
        raise Conflict(
            f"the lease of {body.rollout!r} with token {body.token} is not held", reason="LeaseLost"
        )
    answered = {"backend": rerouted.backend, "retry_after": rerouted.retry_after, "reason": rerouted.reason}
    return _reply(request, answered)


@router.post("/reward", responses={200: {"model": RewardResponse}}, openapi_extra=body_schema(RewardRequest))
async def reward(request: Request) -> Response:
    """Send an episode to the reward service of its job, and return the score or why there is none.

    The call takes up to the service's `timeoutSeconds`, and the wait for a place before that.
    """
    call = RestCall(request)
    body = await call.body(RewardRequest)

    def query(conn: Connection) -> reward_services.ServiceCall:
        if (refusal := call.refusal(conn, [body.rollout])) is not None:
            raise refusal
        return reward_services.service_of(conn, body.rollout, body.token)

    service = await call.plane.database.read(query)
    turn = partial(call.plane.reward_turns.turn, service.namespace)
    return _reply(request, await call.plane.reward_services.ask(service, body.episode, turn))


@router.get("/job")
async def job_spec(job: Named, uid: str | None = None) -> Response:
    """Return a job's spec for workers, without inline tasks."""
    job.refuse_other_job(job.namespace, job.name)
    return answer(await job.read(job_views.worker_spec, uid, job.plane.sandbox_hosts.pinned))


@router.get("/plugin")
async def plugin(
    job: Named, sha256: Annotated[str, Query(pattern=r"^[0-9a-f]{64}$")], uid: str | None = None
) -> Response:
    """Return the text of a plugin that a job uses, as it was when the job was submitted."""
    job.refuse_other_job(job.namespace, job.name)
    text = await job.look(job_views.plugin_text, uid, sha256)
    return Response(text, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})


@router.get("/images", responses={200: {"model": WaitingImages}})
async def waiting_images(job: Named, uid: str | None = None) -> Response:
    """Return the images that the next tasks in a job's Init queue name, in the order of the queue.

    Workers bring them to their nodes before they lease these rollouts.
    """
    job.refuse_other_job(job.namespace, job.name)
    images = await job.look(job_views.waiting_images, uid, job.plane.settings.page_bytes)
    return answer({"images": images})


async def _find_claim(call: RestCall, claim: str) -> ClaimRow | None:
    """Return the claim's row, or None if there is no such claim.

    Raises:
        Forbidden: The token is that of the workers of one job, and the claim belongs to another one.
    """
    row = await call.plane.database.read(partial(claims.find, claim=claim))
    job = call.bound
    if row is not None and job is not None and row.job_uid != job.uid:
        raise permissions.of_other_job(job)
    return row


async def _settled_claim(call: RestCall, claim: str, wait: float) -> ClaimRow | None:
    """Wait up to `wait` seconds while the claim is Pending; return its row, or None once it is removed."""
    read = partial(_find_claim, call, claim)
    current = await read()
    if current is None or current.state != claims.PENDING or wait <= 0:
        return current
    with call.plane.worker_polls.held(current.namespace):
        return await call.plane.bus.until(
            claim_topic(claim),
            read,
            lambda row: row is None or row.state != claims.PENDING,
            wait,
            call.request.is_disconnected,
        )


@of_claims.post("", responses={200: {"model": Claim}}, openapi_extra=body_schema(ClaimRequest))
async def file(call: Call) -> Response:
    """Request a sandbox under an Init or Eval lease. A repeat with the same lease returns the same claim.

    The call waits up to `wait` seconds until the claim is bound or refused.
    """
    body = await call.body(ClaimRequest)
    op = partial(claims.file, request=body, quota=call.plane.settings.claim_quota)
    row: ClaimRow | None = await call.write_own(op, [body.rollout], durable=False)
    if row is not None and body.wait and row.state == claims.PENDING:
        row = await _settled_claim(call, row.id, body.wait)
    if row is None:
        raise claims.lease_lost(body)
    return answer(claims.document(row, time.time()))


@of_claims.get("", responses={200: {"model": ClaimList}})
async def list_claims(
    call: Call,
    namespace: Annotated[str | None, Query(max_length=63)] = None,
    revision: Annotated[int | None, Query(ge=0)] = None,
    wait: Wait = 0.0,
) -> Response:
    """List the claims that drivers have to handle, and the sandboxes to keep warm.

    With the `revision` of the last answer, the call waits up to `wait` seconds for another revision.
    """
    look = partial(claims.listed, namespace=namespace)
    # A call without a revision gets the first answer.
    changed = await call.poll(
        namespace or "", CLAIMS, look, lambda listing: listing["revision"] != revision, wait
    )
    return answer(changed)


@of_claims.get("/{claim}", responses={200: {"model": Claim}})
async def get_claim(call: Call, claim: str, wait: Wait = 0.0) -> Response:
    """Return a claim. The call waits up to `wait` seconds while the claim is Pending."""
    row = await _settled_claim(call, claim, wait)
    if row is None:
        raise claims.unknown(claim)
    return answer(claims.document(row, time.time()))


@of_claims.delete("/{claim}", status_code=204)
async def release(call: Call, claim: str) -> Response:
    """Release a claim that no rollout needs, so that its sandbox is removed. A repeat changes nothing."""
    if call.bound is not None:
        await _find_claim(call, claim)  # A claim of another job is refused. A claim never changes its job.
    await call.plane.database.write(partial(claims.release, claim=claim), durable=False)
    return Response(status_code=204)


@of_claims.put(
    "/{claim}/status",
    responses={200: {"model": Claim}, 204: {"description": "Removed"}},
    openapi_extra=body_schema(ClaimStatus),
)
async def put_status(call: Call, claim: str) -> Response:
    """Take a driver's report: Bound, Failed, or Removed (answered 204). A late report changes nothing."""
    status = await call.body(ClaimStatus)
    claims.check_status(status)
    op = partial(claims.report, claim=claim, status=status)
    row = await call.plane.database.write(op, durable=False)
    return Response(status_code=204) if row is None else answer(claims.document(row, time.time()))


@of_workers.post("/died", responses={200: {"model": WorkerDeath}}, openapi_extra=body_schema(WorkerDied))
async def died(call: Call) -> Response:
    """Take back the leases of a worker that its driver saw die. A repeat changes nothing."""
    report = await call.body(WorkerDied)
    death = await call.plane.database.write(partial(sweeps.worker_died, report=report), durable=False)
    return answer(death.model_dump())


@of_workers.post(
    "/offers", responses={200: {"model": AssignmentOffered}}, openapi_extra=body_schema(AssignmentOffer)
)
async def offer(call: Call) -> Response:
    """Offer a job to one ready worker. Repeating the offer changes nothing."""
    body = await call.body(AssignmentOffer)
    return answer({"taken": await call.plane.database.write(partial(assignments.offer, request=body))})


@of_workers.post(
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
