"""Leases: the routes with which stage workers lease rollouts, renew leases and report results."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from rollyard_crds.lease import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    LeaseRef,
    LeaseRequest,
    LeaseResponse,
    OutcomeResponse,
    RewardRequest,
    RewardResponse,
    RouteRequest,
    RouteResponse,
)
from rollyard_crds.rolloutjob import StageName
from rollyard_crds.workers import WaitingImages
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.codec import encode, validated
from rollyard_api.core.problems import Conflict, Forbidden, NotFound
from rollyard_api.core.wakeups import QUEUE, queue_topic
from rollyard_api.jobs import job_views, reward_services
from rollyard_api.rollouts import heartbeats, leasing, outcomes, wire
from rollyard_api.routes.common import (
    Namespace,
    Plane,
    StrictRoute,
    answer,
    body_of,
    body_schema,
    bound_of,
    others_among,
    plane_of,
    refuse_other_job,
    refuse_others,
)
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.views.rollout import live

log = logging.getLogger("rollyard.api")

router = APIRouter(prefix="/v1/leases", tags=["leases"], route_class=StrictRoute)


def _reply(request: Request, document: Any) -> Response:
    data, media_type = encode(document, request.headers.get("accept", ""))
    return Response(data, media_type=media_type)


def _over(conn: Connection, namespace: str | None, name: str, job_id: int | None) -> bool:
    try:
        job = job_rows.find(conn, namespace or "default", name)
    except NotFound:
        return True
    return job.finished_at is not None or job_id not in (None, job.id)


@router.post("", responses={200: {"model": LeaseResponse}}, openapi_extra=body_schema(LeaseRequest))
async def lease(request: Request) -> Response:
    """Lease up to 64 rollouts. The call waits up to `wait` seconds for the first one."""
    plane = plane_of(request)
    asked = validated(LeaseRequest, await body_of(request))
    refuse_other_job(request, asked.namespace or "default", asked.job)
    job = bound_of(request)
    job_id = None if job is None else job.id
    plane.views.seen_workers.heard(job_id, asked.worker, asked.node, time.time(), asked.capacity)
    stages = sorted(stage for stage, places in asked.capacity.items() if places > 0)
    with plane.worker_polls.held(asked.namespace or "") if asked.wait > 0 else nullcontext():
        leases, draining = await plane.bus.until(
            queue_topic(stages[0]) if len(stages) == 1 else QUEUE,
            partial(_granted, plane, asked, job_id, stages),
            lambda got: bool(got[0]) or got[1],
            asked.wait,
            request.is_disconnected,
        )
    return _reply(request, {"leases": leases, "draining": draining})


async def _granted(
    plane: ControlPlane, ask: LeaseRequest, job_id: int | None, stages: list[StageName]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the leases that can be granted now, and whether the requested job has ended."""
    now = asyncio.get_running_loop().time
    same = (ask.namespace, ask.job, job_id, ask.node, *stages)
    async with plane.grants.held(ask.namespace or ""):
        changes, begun = plane.bus.queue_changes(stages), now()
        if plane.idle.is_known(same, changes, begun):
            return [], False
        leases, over = await plane.database.write(partial(_grant, plane, ask, job_id), durable=False)
        if not leases and not over:
            plane.idle.note(same, changes, begun)
        return leases, over


def _grant(
    plane: ControlPlane, ask: LeaseRequest, job_id: int | None, tx: Transaction
) -> tuple[list[dict[str, Any]], bool]:
    leases = leasing.grant(tx, ask, job_id, plane.settings.lease_seconds, plane.settings.page_bytes)
    return leases, not leases and ask.job is not None and _over(tx.conn, ask.namespace, ask.job, job_id)


@router.post(
    "/heartbeat", responses={200: {"model": HeartbeatResponse}}, openapi_extra=body_schema(HeartbeatRequest)
)
async def heartbeat(request: Request) -> Response:
    """Renew leases. The answer names lost and cancelled leases, and orphaned sandboxes."""
    plane = plane_of(request)
    beat = validated(HeartbeatRequest, await body_of(request))
    held = [(ref.rollout, ref.token) for ref in beat.leases]
    await refuse_others(request, [rollout for rollout, _ in held], beat.ending)
    job = bound_of(request)
    job_id = None if job is None else job.id
    # The list of one job's workers is kept apart, so it does not replace what other workers listed.
    place = beat.node if job is None else f"{beat.node} {job_id}"
    watches = plane.views.watching.possible(time.time())

    def op(tx: Transaction) -> tuple[Any, Any, list[str], float | None, list[str], float, list[str]]:
        lost, cancelled = heartbeats.renew(tx, held, plane.settings.lease_seconds)
        unnamed, oldest = heartbeats.claims(tx, beat.node, beat.sandboxes)
        heartbeats.heard(tx, beat.node, job_id)
        unused = heartbeats.give_up(tx, beat.ending) if beat.ending else []
        watched: list[str] = []
        if watches or beat.live:
            gone = {rollout for rollout, _ in (*lost, *cancelled)}
            kept = {rollout: token for rollout, token in held if rollout not in gone}
            live.take(tx, beat.live, kept)
            watched = live.watched(tx, kept) if watches else []
        return lost, cancelled, unnamed, oldest, unused, tx.now, watched

    plane.views.seen_workers.heard(job_id, beat.worker, beat.node, time.time())
    told = await plane.database.write(op, durable=False)
    lost, cancelled, unnamed, oldest, unused, now, watched = told
    return _reply(
        request,
        {
            "lost": [LeaseRef(rollout=r, token=t).model_dump() for r, t in lost],
            "cancelled": [LeaseRef(rollout=r, token=t).model_dump() for r, t in cancelled],
            "orphans": sorted({*plane.unclaimed.orphans(place, unnamed, oldest, now), *unused}),
            "watched": watched,
        },
    )


@router.post(
    "/complete", responses={200: {"model": OutcomeResponse}}, openapi_extra=body_schema(CompleteRequest)
)
async def complete(request: Request) -> Response:
    """Report stage results. Each is committed before it is answered."""
    plane = plane_of(request)
    reports, sandboxes = wire.check_results(await body_of(request))
    of_others = others_among(request, [report.rollout for report in reports], sandboxes)
    await plane.refuse_when_full()

    def op(tx: Transaction) -> list[dict[str, str]] | Forbidden:
        # A refusal is returned, because an exception would make the writer run all ops beside this one again.
        return of_others(tx.conn) or outcomes.report(tx, reports)

    told = await plane.database.write(op)
    if isinstance(told, Forbidden):
        raise told
    return _reply(request, {"outcomes": told})


@router.post("/fail", responses={200: {"model": OutcomeResponse}}, openapi_extra=body_schema(FailRequest))
async def fail(request: Request) -> Response:
    """Report infrastructure failures. The rollouts are retried while attempts are left."""
    plane = plane_of(request)
    failures = wire.check_failures(await body_of(request))
    await refuse_others(request, [report.rollout for report in failures])
    await plane.refuse_when_full()
    told = await plane.database.write(partial(outcomes.report, reports=failures))
    return _reply(request, {"outcomes": told})


@router.post("/route", responses={200: {"model": RouteResponse}}, openapi_extra=body_schema(RouteRequest))
async def route(request: Request) -> Response:
    """Return another backend for a rollout whose backend failed, or, if none has room, a time to retry."""
    plane = plane_of(request)
    asked = validated(RouteRequest, await body_of(request))
    await refuse_others(request, [asked.rollout])
    told = await plane.database.write(partial(leasing.reroute, asked=asked))
    if told.opened:
        log.warning("backend %s: its circuit opens; last error: %s", asked.failed_url, asked.error)
    if told.outcome == "unknown":
        raise NotFound(f"there is no rollout {asked.rollout!r}", reason="RolloutNotFound")
    if told.outcome == "stale":
        raise Conflict(
            f"the lease of {asked.rollout!r} with token {asked.token} is not held", reason="LeaseLost"
        )
    answered = {"backend": told.backend, "retry_after": told.retry_after, "reason": told.reason}
    return _reply(request, answered)


@router.post("/reward", responses={200: {"model": RewardResponse}}, openapi_extra=body_schema(RewardRequest))
async def reward(request: Request) -> Response:
    """Send an episode to the reward service of its job, and return the score or why there is none.

    The call takes up to the service's `timeoutSeconds`, and the wait for a place before that.
    """
    plane = plane_of(request)
    asked = validated(RewardRequest, await body_of(request))
    await refuse_others(request, [asked.rollout])
    call = await plane.database.read(
        partial(reward_services.service_of, rollout=asked.rollout, token=asked.token)
    )
    turn = partial(plane.reward_turns.held, call.namespace)
    return _reply(request, await plane.reward_services.ask(call, asked.episode, turn))


@router.get("/job")
async def job_spec(
    request: Request, plane: Plane, name: str, namespace: Namespace = "default", uid: str | None = None
) -> Response:
    """Return a job's spec for workers, without inline tasks."""
    refuse_other_job(request, namespace, name)
    pinned = plane.sandbox_hosts.pinned
    read = partial(job_views.worker_spec, namespace=namespace, name=name, uid=uid, pinned=pinned)
    return answer(await plane.database.read(read))


@router.get("/images", responses={200: {"model": WaitingImages}})
async def waiting_images(
    request: Request, plane: Plane, name: str, namespace: Namespace = "default", uid: str | None = None
) -> Response:
    """Return the images that the next tasks in a job's queue of Init name, in the order of the queue.

    Workers bring them to their nodes before they lease these rollouts.
    """
    refuse_other_job(request, namespace, name)
    look = partial(
        job_views.waiting_images, namespace=namespace, name=name, uid=uid, max_bytes=plane.settings.page_bytes
    )
    async with plane.looks.held(namespace):
        return answer({"images": await plane.database.read(look)})
