"""Sandbox claims: calls of stage workers, and of the driver that fulfils them."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from rollyard_crds.claims import Claim, ClaimList, ClaimRequest, ClaimStatus
from starlette.responses import Response

from rollyard_api.core.validation import validated
from rollyard_api.core.wakeups import CLAIMS, claim_topic
from rollyard_api.rollouts import claims
from rollyard_api.routes.common import (
    Plane,
    Wait,
    answer,
    body_of,
    body_schema,
    bound_of,
    plane_of,
    refuse_other_claim,
    refuse_others,
)
from rollyard_api.service import ControlPlane
from rollyard_api.storage.rows import ClaimRow

router = APIRouter(prefix="/v1/claims", tags=["claims"])


async def _settled(plane: ControlPlane, request: Request, claim: str, wait: float) -> ClaimRow | None:
    """The claim's row once it is not Pending, or as it is after `wait` seconds; None once it is gone."""
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
    """A token of one job's workers reaches the claims of its job only; a claim never changes its job.

    Raises:
        Forbidden: the claim is of another job.
    """
    if bound_of(request) is not None:
        row = await plane.database.read(partial(claims.find, claim=claim))
        if row is not None:
            refuse_other_claim(request, row)


@router.post(
    "", responses={200: {"model": Claim}}, openapi_extra=body_schema(ClaimRequest.model_json_schema())
)
async def file(request: Request) -> Response:
    """Ask for a sandbox in the name of an Init or Eval lease; a repeat of both is the same claim.

    Waits up to `wait` seconds until it is bound or refused.
    """
    plane = plane_of(request)
    asked = validated(ClaimRequest, await body_of(request))
    await refuse_others(request, [asked.rollout])
    op = partial(claims.file, asked=asked, max_claims=plane.settings.max_claims)
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
    """All claims that drivers have to do with, and what is to be kept warm.

    With the `revision` of the last answer: waits up to `wait` seconds until there is another one.
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
    """One claim; waits up to `wait` seconds until it is not Pending."""
    await _refuse_other(plane, request, claim)
    row = await _settled(plane, request, claim, wait)
    if row is None:
        raise claims.unknown(claim)
    return answer(claims.document(row, time.time()))


@router.delete("/{claim}", status_code=204)
async def release(request: Request, plane: Plane, claim: str) -> Response:
    """No rollout needs it: its sandbox is to be removed. A repeat changes nothing."""
    await _refuse_other(plane, request, claim)
    await plane.database.write(partial(claims.release, claim=claim), durable=False)
    return Response(status_code=204)


@router.put(
    "/{claim}/status",
    responses={200: {"model": Claim}, 204: {"description": "Removed"}},
    openapi_extra=body_schema(ClaimStatus.model_json_schema()),
)
async def put_status(request: Request, claim: str) -> Response:
    """The driver's report: Bound, Failed, or Removed (answered 204). What came too late changes nothing."""
    plane = plane_of(request)
    status = validated(ClaimStatus, await body_of(request))
    claims.check_status(status)
    row = await plane.database.write(partial(claims.report, claim=claim, status=status), durable=False)
    return Response(status_code=204) if row is None else answer(claims.document(row, time.time()))
