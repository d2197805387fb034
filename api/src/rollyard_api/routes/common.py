"""What every route needs: the control plane, the namespace, bodies and JSON answers."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from rollyard_api import jobs
from rollyard_api.auth import Caller, Role
from rollyard_api.codec import decode, dumps
from rollyard_api.problems import Forbidden
from rollyard_api.service import ControlPlane

MAX_WAIT = 60.0
"""Longest long poll, in seconds."""

Namespace = Annotated[str, Query(max_length=63)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT)]


def plane_of(request: Request) -> ControlPlane:
    """The control plane of this application."""
    plane: ControlPlane = request.app.state.plane
    return plane


def role_of(request: Request) -> Role:
    """Whose token the request bears."""
    caller: Caller = request.state.caller
    return caller.role


def refuse_other_job(request: Request, namespace: str, name: str | None) -> None:
    """A token of one job's workers serves that job only.

    Raises:
        Forbidden: it is another one's, or none is named.
    """
    bound = request.state.caller.job
    if bound is not None and bound != (namespace, name):
        raise Forbidden(f"this token is for the workers of job {bound[0]}/{bound[1]} only")


async def refuse_others(request: Request, rollouts: Collection[str], sandboxes: Collection[str] = ()) -> None:
    """The same for rollouts, and for sandboxes that rollouts have; those that are unknown belong to nobody.

    Raises:
        Forbidden: one of them is of another job.
    """
    bound = request.state.caller.job
    if bound is not None and (rollouts or sandboxes):
        plane = plane_of(request)
        query = partial(jobs.any_of_other, job=bound, rollouts_of=rollouts, sandboxes=sandboxes)
        if await plane.database.read(query):
            raise Forbidden(f"this token is for the workers of job {bound[0]}/{bound[1]} only")


Plane = Annotated[ControlPlane, Depends(plane_of)]


async def body_of(request: Request) -> Any:
    """The decoded body, JSON or msgpack."""
    return decode(await request.body(), request.headers.get("content-type", ""))


def answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(dumps(document), status_code=status, media_type="application/json", headers=headers)


def body_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI of a body that the route reads by itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
