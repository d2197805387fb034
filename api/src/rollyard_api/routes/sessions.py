"""Sign-in: one-time codes, the session of a browser, and its end."""

from __future__ import annotations

import logging
from typing import Final, Literal

from fastapi import APIRouter
from pydantic import Field
from rollyard_crds.base import Model
from starlette.responses import Response

from rollyard_api.browsers.origins import BrowserHeaders
from rollyard_api.browsers.sessions import BrowserSession
from rollyard_api.core.problems import Forbidden, QueryRefused, Unauthorized
from rollyard_api.routes.common import Call, RestCall, StrictRoute, answer, body_schema

router = APIRouter(prefix="/v1", tags=["sign-in"], route_class=StrictRoute)

log = logging.getLogger("rollyard.api")

NO_STORE: Final = {"Cache-Control": "no-store"}


class CodeRequest(Model, strict=True):
    """The body of `POST /v1/session/codes`."""

    role: Literal["viewer", "admin"] = "viewer"
    """The role of the session that the code becomes: `viewer` reads, and `admin` may cancel, too."""


class SignIn(Model, strict=True):
    """The body of `POST /v1/session`."""

    code: str = Field(max_length=200)
    """The one-time code of the link."""


@router.post("/session", status_code=204, openapi_extra=body_schema(SignIn))
async def sign_in(call: Call) -> Response:
    """Make a session of a one-time code, and set its cookie.

    The request must come from the page: it needs the header `Rollyard-Page: 1`, and the origin of its host.
    """
    plane, request = call.plane, call.request
    address = request.client.host if request.client is not None else ""
    plane.wrong_codes.check(address)
    headers = BrowserHeaders(request.scope)
    body = await call.body(SignIn)
    try:
        secret, signed_in = await plane.sessions.redeem(body.code, await plane.door.secrets(headers))
    except Unauthorized:
        plane.wrong_codes.count(address)
        raise
    log.info("a browser at %s has signed in as %s", address, signed_in.role)
    seconds = plane.settings.browsers.session_seconds
    done = Response(status_code=204, headers=NO_STORE)
    await plane.door.set_cookie(done, headers, secret, seconds)
    return done


@router.get("/session")
async def session(call: Call) -> Response:
    """Return what the caller may do: its role, when its session ends, and whether it may cancel.

    The answer has the path prefix of the page, too, for programs that print links to it.
    """
    browser: BrowserSession | None = call.request.state.session
    role = call.caller.role if browser is None else browser.role
    expires = None if browser is None else browser.expires_at
    prefix = call.plane.settings.browsers.path_prefix
    document = {"role": role, "expires_at": expires, "cancel": role == "admin", "prefix": prefix}
    return answer(document, headers=NO_STORE)


@router.delete("/session", status_code=204)
async def sign_out(call: Call) -> Response:
    """End the session of the cookie."""
    current: BrowserSession | None = call.request.state.session
    if current is None:
        raise QueryRefused("a bearer token has no session; DELETE /v1/sessions ends all that it has made")
    await call.plane.sessions.end(current.digest)
    done = Response(status_code=204, headers=NO_STORE)
    await call.plane.door.set_cookie(done, BrowserHeaders(call.request.scope), "", 0)
    return done


@router.post("/session/codes", status_code=201, openapi_extra=body_schema(CodeRequest))
async def make_code(call: Call) -> Response:
    """Make a one-time code for a session. It ends with the token that has asked for it."""
    plane, role = call.plane, call.caller.role
    body = await call.body(CodeRequest)
    if body.role == "admin" and role != "admin":
        raise Forbidden(f"the role '{role}' makes links for viewers only")
    code, expires = await plane.sessions.make_code(body.role, role, _token_of(call))
    prefix = plane.settings.browsers.path_prefix
    document = {"code": code, "role": body.role, "expires_at": expires, "prefix": prefix}
    return answer(document, 201, NO_STORE)


@router.delete("/sessions")
async def end_sessions(call: Call) -> Response:
    """End all sessions and codes for the admin, and those of their own token for a viewer."""
    token = None if call.caller.role == "admin" else _token_of(call)
    ended = await call.plane.sessions.end_all(token)
    return answer({"ended": ended})


def _token_of(call: RestCall) -> str:
    """Return the bearer token of a request that the gate has admitted by it."""
    return call.request.headers["authorization"].partition(" ")[2].strip()
