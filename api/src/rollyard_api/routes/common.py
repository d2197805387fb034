"""What every route needs: the control plane, the namespace, bodies and JSON answers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from rollyard_api.auth import Role
from rollyard_api.codec import decode, dumps
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
    role: Role = request.state.role
    return role


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
