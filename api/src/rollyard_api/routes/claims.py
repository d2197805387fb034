"""Sandbox claims: the routes for stage workers and for the driver that fulfils the claims."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from rollyard_crds.claims import Claim, ClaimList, ClaimRequest, ClaimStatus
from starlette.responses import Response

from rollyard_api.core.codec import validated
from rollyard_api.core.wakeups import CLAIMS, claim_topic
from rollyard_api.rollouts import claims
from rollyard_api.routes.common import (
    Plane,
    StrictRoute,
    Wait,
    answer,
    body_of,
    body_schema,
    bound_of,
    refuse_other_claim,
    refuse_others,
)
from rollyard_api.service import ControlPlane
from rollyard_api.storage.rows import ClaimRow

router = APIRouter(prefix="/v1/claims", tags=["claims"], route_class=StrictRoute)


async def _settled(plane: ControlPlane, request: Request, claim: str, wait: float) -> ClaimRow | None:
    """Wait up to `wait` seconds while the claim is Pending; return its row, or None once it is removed."""
    read = partial(plane.database.read, partial(claims.find, claim=claim))
    found = await read()
    if found is None or found.state != claims.PENDING or wait <= 0:
        return found
    with plane.worker_polls.held(found.namespace):
        return await plane.bus.until(
            claim_topic(claim),
            read,
            lambda row: row is None or row.state != claims.PENDING,
            wait,
            request.is_disconnected,
        )


async def _refuse_other(plane: ControlPlane, request: Request, claim: str) -> None:
    """Refuse the claims of other jobs if the token belongs to one job's workers.

    A claim never changes its job.

    Raises:
        Forbidden: The claim belongs to another job.
    """
    if bound_of(request) is not None:
        row = await plane.database.read(partial(claims.find, claim=claim))
        if row is not None:
            refuse_other_claim(request, row)


@router.post("", responses={200: {"model": Claim}}, openapi_extra=body_schema(ClaimRequest))
async def file(request: Request, plane: Plane) -> Response:
    """Request a sandbox under an Init or Eval lease. A repeat with the same lease returns the same claim.

    The call waits up to `wait` seconds until the claim is bound or refused.
    """
    asked = validated(ClaimRequest, await body_of(request))
    await refuse_others(request, [asked.rollout])
    op = partial(claims.file, asked=asked, room=plane.settings.claim_room)
    row: ClaimRow | None = await plane.database.write(op, durable=False)
    if row is not None and asked.wait and row.state == claims.PENDING:
        row = await _settled(plane, request, row.id, asked.wait)
    if row is None:
        raise claims.lease_lost(asked)
    return answer(claims.document(row, time.time()))


@router.get("", responses={200: {"model": ClaimList}})
async def list_claims(
    request: Request,
    plane: Plane,
    namespace: Annotated[str | None, Query(max_length=63)] = None,
    revision: Annotated[int | None, Query(ge=0)] = None,
    wait: Wait = 0.0,
) -> Response:
    """List the claims that drivers have to handle, and the sandboxes to keep warm.

    With the `revision` of the last answer, the call waits up to `wait` seconds for another revision.
    """
    return answer(
        await plane.poll(
            namespace or "",
            CLAIMS,
            partial(plane.database.read, partial(claims.listed, namespace=namespace)),
            lambda found: revision is None or found["revision"] != revision,
            wait,
            request.is_disconnected,
        )
    )


@router.get("/{claim}", responses={200: {"model": Claim}})
async def get_claim(request: Request, plane: Plane, claim: str, wait: Wait = 0.0) -> Response:
    """Return a claim. The call waits up to `wait` seconds while the claim is Pending."""
    await _refuse_other(plane, request, claim)
    row = await _settled(plane, request, claim, wait)
    if row is None:
        raise claims.unknown(claim)
    return answer(claims.document(row, time.time()))


@router.delete("/{claim}", status_code=204)
async def release(request: Request, plane: Plane, claim: str) -> Response:
    """Release a claim that no rollout needs, so that its sandbox is removed. A repeat changes nothing."""
    await _refuse_other(plane, request, claim)
    await plane.database.write(partial(claims.release, claim=claim), durable=False)
    return Response(status_code=204)


@router.put(
    "/{claim}/status",
    responses={200: {"model": Claim}, 204: {"description": "Removed"}},
    openapi_extra=body_schema(ClaimStatus),
)
async def put_status(request: Request, plane: Plane, claim: str) -> Response:
    """Take a driver's report: Bound, Failed, or Removed (answered 204). A late report changes nothing."""
    status = validated(ClaimStatus, await body_of(request))
    claims.check_status(status)
    row = await plane.database.write(partial(claims.report, claim=claim, status=status), durable=False)
    return Response(status_code=204) if row is None else answer(claims.document(row, time.time()))
