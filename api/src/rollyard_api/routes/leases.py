"""Leases: the routes with which stage workers lease rollouts, renew leases and report results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
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
from rollyard_crds.workers import WaitingImages
from sqlalchemy.engine import Connection
from starlette.responses import Response

from rollyard_api.core.codec import encode
from rollyard_api.core.problems import Conflict, NotFound
from rollyard_api.core.wakeups import QUEUE, queue_topic
from rollyard_api.jobs import job_views, reward_services
from rollyard_api.rollouts import heartbeats, leasing, reports
from rollyard_api.routes.common import Named, RestCall, StrictRoute, answer, body_schema
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.views.rollout import live

log = logging.getLogger("rollyard.api")

router = APIRouter(prefix="/v1/leases", tags=["leases"], route_class=StrictRoute)


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
        leases, draining = await plane.bus.until(
            queue_topic(stages[0]) if len(stages) == 1 else QUEUE,
            partial(_granted, plane, body, job_id, stages),
            lambda got: bool(got[0]) or got[1],
            body.wait,
            request.is_disconnected,
        )
    return _reply(request, {"leases": leases, "draining": draining})


async def _granted(
    plane: ControlPlane, ask: LeaseRequest, job_id: int | None, stages: list[StageName]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the leases that can be granted now, and whether the requested job has ended."""
    now = asyncio.get_running_loop().time
    same = (ask.namespace, ask.job, job_id, ask.node, *stages)
    async with plane.grants.turn(ask.namespace or ""):
        changes, begun = plane.bus.queue_changes(stages), now()
        if plane.empty_answers.is_known(same, changes, begun):
            return [], False
        leases, over = await plane.database.write(partial(_grant, plane, ask, job_id), durable=False)
        if not leases and not over:
            plane.empty_answers.note(same, changes, begun)
        return leases, over


def _grant(
    plane: ControlPlane, ask: LeaseRequest, job_id: int | None, tx: Transaction
) -> tuple[list[dict[str, Any]], bool]:
    leases = leasing.grant(tx, ask, job_id, plane.settings.lease_seconds, plane.settings.page_bytes)
    if leases or ask.job is None:
        return leases, False
    job = job_rows.named(tx.conn, ask.namespace or "default", ask.job)
    return [], job is None or job.finished_at is not None or job_id not in (None, job.id)


class _Renewed(NamedTuple):
    """What a heartbeat has changed and read."""

    lost: list[tuple[str, int]]
    """The rollouts and fencing tokens of the leases that the worker no longer holds."""
    cancelled: list[tuple[str, int]]
    """Those of the leases whose rollouts have been cancelled."""
    unnamed: list[str]
    """The sandboxes of the node that no rollout names."""
    oldest_init: float | None
    """The time at which the oldest Init lease of the node began, or None if there is none."""
    unused: list[str]
    """The sandboxes that end and that no leased rollout uses."""
    now: float
    watched: list[str]


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
    # The list of one job's workers is kept apart, so it does not replace what other workers listed.
    node = beat.node if call.bound is None else f"{beat.node} {job_id}"
    watches = plane.views.watching.possible(time.time())

    def op(tx: Transaction) -> _Renewed:
        lost, cancelled = heartbeats.renew(tx, leases, plane.settings.lease_seconds)
        unnamed, oldest = heartbeats.claims(tx, beat.node, beat.sandboxes)
        heartbeats.heard(tx, beat.node, job_id)
        unused = heartbeats.give_up(tx, beat.ending) if beat.ending else []
        watched: list[str] = []
        if watches or beat.live:
            dropped = {rollout for rollout, _ in (*lost, *cancelled)}
            current = {rollout: token for rollout, token in leases if rollout not in dropped}
            live.take(tx, beat.live, current)
            watched = live.watched(tx, current) if watches else []
        return _Renewed(lost, cancelled, unnamed, oldest, unused, tx.now, watched)

    renewed: _Renewed = await call.write_own(
        op, [rollout for rollout, _ in leases], beat.ending, durable=False
    )
    plane.views.seen_workers.heard(job_id, beat.worker, beat.node, time.time())
    orphans = plane.unclaimed.orphans(node, renewed.unnamed, renewed.oldest_init, renewed.now)
    return _reply(
        request,
        {
            "lost": [{"rollout": rollout, "token": token} for rollout, token in renewed.lost],
            "cancelled": [{"rollout": rollout, "token": token} for rollout, token in renewed.cancelled],
            "orphans": sorted({*orphans, *renewed.unused}),
            "watched": renewed.watched,
        },
    )


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


@router.get("/images", responses={200: {"model": WaitingImages}})
async def waiting_images(job: Named, uid: str | None = None) -> Response:
    """Return the images that the next tasks in a job's queue of Init name, in the order of the queue.

    Workers bring them to their nodes before they lease these rollouts.
    """
    job.refuse_other_job(job.namespace, job.name)
    images = await job.look(job_views.waiting_images, uid, job.plane.settings.page_bytes)
    return answer({"images": images})
