"""What every route needs: the control plane, the namespace, bodies and JSON answers."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from rollyard_api.access import job_scope
from rollyard_api.access.bearer_tokens import Caller, Role
from rollyard_api.access.job_scope import BoundJob
from rollyard_api.core.codec import check_plain, decode, dumps
from rollyard_api.core.problems import Forbidden
from rollyard_api.service import ControlPlane
from rollyard_api.storage.rows import ClaimRow

MAX_WAIT = 60.0
"""Longest long poll, in seconds."""

Namespace = Annotated[str, Query(max_length=63)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT)]


def plane_of(request: Request) -> ControlPlane:
    """The control plane of this application."""
    plane: ControlPlane = request.app.state.plane
    return plane


def role_of(request: Request) -> Role:
    """The holder of the token that the request bears."""
    caller: Caller = request.state.caller
    return caller.role


def refuse_other_job(request: Request, namespace: str, name: str | None) -> None:
    """A token of one job's workers serves that job only.

    Raises:
        Forbidden: it is another one's, or none is named.
    """
    job = bound_of(request)
    if job is not None and (job.identity.namespace, job.identity.name) != (namespace, name):
        raise _of_other(job)


async def refuse_others(request: Request, rollouts: Collection[str], sandboxes: Collection[str] = ()) -> None:
    """The same for rollouts, and for sandboxes that rollouts have; those that are unknown belong to nobody.

    Raises:
        Forbidden: one of them is of another job.
    """
    job = bound_of(request)
    if job is not None and (rollouts or sandboxes):
        plane = plane_of(request)
        query = partial(
            job_scope.reaches_others, identity=job.identity, rollouts_of=rollouts, sandboxes=sandboxes
        )
        if await plane.database.read(query):
            raise _of_other(job)


def refuse_other_claim(request: Request, claim: ClaimRow) -> None:
    """The same for the row of a claim.

    Raises:
        Forbidden: it is of another job.
    """
    job = bound_of(request)
    if job is not None and claim.job_uid != job.uid:
        raise _of_other(job)


def bound_of(request: Request) -> BoundJob | None:
    """The only job that the request's token reaches; None where it reaches any."""
    job: BoundJob | None = request.state.bound
    return job


def _of_other(job: BoundJob) -> Forbidden:
    who = job.identity
    return Forbidden(f"this token is for the workers of job {who.namespace}/{who.name} only")


async def _plane(request: Request) -> ControlPlane:
    # Not `plane_of` itself: what is no coroutine function, FastAPI calls in a thread.
    return plane_of(request)


Plane = Annotated[ControlPlane, Depends(_plane)]


async def body_of(request: Request) -> Any:
    """The decoded body, JSON or msgpack, of JSON's values and not too deep."""
    document = await unchecked_body_of(request)
    check_plain(document)
    return document


async def unchecked_body_of(request: Request) -> Any:
    """The decoded body, for a route that calls `check_plain` on all of it but large lists that it checks."""
    return decode(await request.body(), request.headers.get("content-type", ""))


def answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(dumps(document), status_code=status, media_type="application/json", headers=headers)


def body_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI of a body that the route reads by itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
