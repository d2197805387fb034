"""Sandbox claims: the routes for stage workers and for the driver that fulfils the claims."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from rollyard_crds.claims import Claim, ClaimList, ClaimRequest, ClaimStatus
from starlette.responses import Response

from rollyard_api.access import permissions
from rollyard_api.core.wakeups import CLAIMS, claim_topic
from rollyard_api.rollouts import claims
from rollyard_api.routes.common import Call, RestCall, StrictRoute, Wait, answer, body_schema
from rollyard_api.storage.rows import ClaimRow

router = APIRouter(prefix="/v1/claims", tags=["claims"], route_class=StrictRoute)


async def _find(call: RestCall, claim: str) -> ClaimRow | None:
    """Return the claim's row, or None if there is no such claim.

    Raises:
        Forbidden: The token is that of the workers of one job, and the claim belongs to another one.
    """
    row = await call.plane.database.read(partial(claims.find, claim=claim))
    job = call.bound
    if row is not None and job is not None and row.job_uid != job.uid:
        raise permissions.of_other_job(job)
    return row


async def _settled(call: RestCall, claim: str, wait: float) -> ClaimRow | None:
    """Wait up to `wait` seconds while the claim is Pending; return its row, or None once it is removed."""
    read = partial(_find, call, claim)
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


@router.post("", responses={200: {"model": Claim}}, openapi_extra=body_schema(ClaimRequest))
async def file(call: Call) -> Response:
    """Request a sandbox under an Init or Eval lease. A repeat with the same lease returns the same claim.

    The call waits up to `wait` seconds until the claim is bound or refused.
    """
    body = await call.body(ClaimRequest)
    op = partial(claims.file, request=body, quota=call.plane.settings.claim_quota)
    row: ClaimRow | None = await call.write_own(op, [body.rollout], durable=False)
    if row is not None and body.wait and row.state == claims.PENDING:
        row = await _settled(call, row.id, body.wait)
    if row is None:
        raise claims.lease_lost(body)
    return answer(claims.document(row, time.time()))


@router.get("", responses={200: {"model": ClaimList}})
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


@router.get("/{claim}", responses={200: {"model": Claim}})
async def get_claim(call: Call, claim: str, wait: Wait = 0.0) -> Response:
    """Return a claim. The call waits up to `wait` seconds while the claim is Pending."""
    row = await _settled(call, claim, wait)
    if row is None:
        raise claims.unknown(claim)
    return answer(claims.document(row, time.time()))


@router.delete("/{claim}", status_code=204)
async def release(call: Call, claim: str) -> Response:
    """Release a claim that no rollout needs, so that its sandbox is removed. A repeat changes nothing."""
    if call.bound is not None:
        await _find(call, claim)  # It is refused if it is of another job. A claim never changes its job.
    await call.plane.database.write(partial(claims.release, claim=claim), durable=False)
    return Response(status_code=204)


@router.put(
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
