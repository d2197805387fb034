"""Sign-in: one-time codes, the session of a browser, and its end."""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from rollyard_api.browsers.origins import BrowserHeaders
from rollyard_api.browsers.sessions import BrowserSession
from rollyard_api.core.problems import Forbidden, Invalid, QueryRefused, Unauthorized
from rollyard_api.routes.common import Plane, StrictRoute, answer, body_of, body_schema, caller_of, plane_of

router = APIRouter(prefix="/v1", tags=["sign-in"], route_class=StrictRoute)

log = logging.getLogger("rollyard.api")

NO_STORE = {"Cache-Control": "no-store"}

M = TypeVar("M", bound=BaseModel)


class CodeRequest(BaseModel):
    """The body of `POST /v1/session/codes`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["viewer", "admin"] = "viewer"
    """The role of the session that the code becomes: `viewer` reads, and `admin` may cancel, too."""


class SignIn(BaseModel):
    """The body of `POST /v1/session`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    code: str = Field(max_length=200)
    """The one-time code of the link."""


def _read(model: type[M], document: Any) -> M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise Invalid(f"{field}: {first['msg']}", errors=[f"{field}: {first['msg']}"]) from None


@router.post("/session", status_code=204, openapi_extra=body_schema(SignIn))
async def sign_in(request: Request, plane: Plane) -> Response:
    """Make a session of a one-time code, and set its cookie.

    The request must come from the page: it needs the header `Rollyard-Page: 1`, and the origin of its host.
    """
    address = request.client.host if request.client is not None else ""
    plane.guesses.check(address)
    given = BrowserHeaders(request.scope)
    wanted = _read(SignIn, await body_of(request))
    try:
        secret, made = await plane.sessions.redeem(wanted.code, await plane.door.secrets(given))
    except Unauthorized:
        plane.guesses.count(address)
        raise
    log.info("a browser at %s has signed in as %s", address, made.role)
    seconds = plane.settings.browsers.session_seconds
    done = Response(status_code=204, headers=NO_STORE)
    await plane.door.set_cookie(done, given, secret, seconds)
    return done


@router.get("/session")
async def session(request: Request) -> Response:
    """Return what the caller may do: its role, when its session ends, and whether it may cancel.

    The answer has the path prefix of the page, too, for programs that print links to it.
    """
    found: BrowserSession | None = request.state.session
    role = caller_of(request).role if found is None else found.role
    expires = None if found is None else found.expires_at
    prefix = plane_of(request).settings.browsers.path_prefix
    document = {"role": role, "expires_at": expires, "cancel": role == "admin", "prefix": prefix}
    return answer(document, headers=NO_STORE)


@router.delete("/session", status_code=204)
async def sign_out(request: Request, plane: Plane) -> Response:
    """End the session of the cookie."""
    found: BrowserSession | None = request.state.session
    if found is None:
        raise QueryRefused("a bearer token has no session; DELETE /v1/sessions ends all that it has made")
    await plane.sessions.end(found.digest)
    done = Response(status_code=204, headers=NO_STORE)
    await plane.door.set_cookie(done, BrowserHeaders(request.scope), "", 0)
    return done


@router.post("/session/codes", status_code=201, openapi_extra=body_schema(CodeRequest))
async def make_code(request: Request) -> Response:
    """Make a one-time code for a session. It ends with the token that has asked for it."""
    plane, role = plane_of(request), caller_of(request).role
    wanted = _read(CodeRequest, await body_of(request) if await request.body() else {})
    if wanted.role == "admin" and role != "admin":
        raise Forbidden(f"the role '{role}' makes links for viewers only")
    code, expires = await plane.sessions.make_code(wanted.role, role, _token_of(request))
    prefix = plane.settings.browsers.path_prefix
    document = {"code": code, "role": wanted.role, "expires_at": expires, "prefix": prefix}
    return answer(document, 201, NO_STORE)


@router.delete("/sessions")
async def end_sessions(request: Request) -> Response:
    """End all sessions and codes for the admin, and those of their own token for a viewer."""
    token = None if caller_of(request).role == "admin" else _token_of(request)
    ended = await plane_of(request).sessions.end_all(token)
    return answer({"ended": ended})


def _token_of(request: Request) -> str:
    """Return the bearer token of a request that the gate has admitted by it."""
    return request.headers["authorization"].partition(" ")[2].strip()
