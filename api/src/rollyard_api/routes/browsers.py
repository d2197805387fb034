"""The calls of browsers: sign-in and sessions, and the files of `/docs`.

The latter are Swagger UI from an installed package, and the document that starts it. Nothing is loaded from
the internet, and the document contains no script, because the content security policy permits neither.
"""

from __future__ import annotations

import asyncio
import html
import logging
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from rollyard_crds.base import Model
from starlette.responses import Response

from rollyard_api.browsers.origins import BrowserHeaders
from rollyard_api.browsers.page import DOCS_POLICY, WebFile, web_file
from rollyard_api.browsers.sessions import BrowserSession
from rollyard_api.core.problems import Forbidden, Malformed, NotFound, Unauthorized
from rollyard_api.routes.common import Call, Plane, RestCall, StrictRoute, answer, body_schema

router = APIRouter(prefix="/v1", tags=["sign-in"], route_class=StrictRoute)
of_docs = APIRouter(include_in_schema=False)

log = logging.getLogger("rollyard.api")

NO_STORE: Final = {"Cache-Control": "no-store"}


class CodeRequest(Model, strict=True):
    """The body of `POST /v1/session/codes`."""

    role: Literal["viewer", "admin"] = "viewer"
    """The role of the session that the code becomes: `viewer` may read, and `admin` may also cancel."""


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
    seconds = plane.settings.session_seconds
    done = Response(status_code=204, headers=NO_STORE)
    await plane.door.set_cookie(done, headers, secret, seconds)
    return done


@router.get("/session")
async def session(call: Call) -> Response:
    """Return what the caller may do: its role, when its session ends, and whether it may cancel.

    The answer also has the path prefix of the page, for programs that print links to it.
    """
    browser: BrowserSession | None = call.request.state.session
    role = call.caller.role if browser is None else browser.role
    expires = None if browser is None else browser.expires_at
    prefix = call.plane.settings.path_prefix
    document = {"role": role, "expires_at": expires, "cancel": role == "admin", "prefix": prefix}
    return answer(document, headers=NO_STORE)


@router.delete("/session", status_code=204)
async def sign_out(call: Call) -> Response:
    """End the session of the cookie."""
    current: BrowserSession | None = call.request.state.session
    if current is None:
        raise Malformed("a bearer token has no session; DELETE /v1/sessions ends all that it has made")
    await call.plane.sessions.end(current.digest)
    done = Response(status_code=204, headers=NO_STORE)
    await call.plane.door.set_cookie(done, BrowserHeaders(call.request.scope), "", 0)
    return done


@router.post("/session/codes", status_code=201, openapi_extra=body_schema(CodeRequest))
async def make_code(call: Call) -> Response:
    """Make a one-time code for a session. The session ends with the token that requested it."""
    plane, role = call.plane, call.caller.role
    body = await call.body(CodeRequest)
    if body.role == "admin" and role != "admin":
        raise Forbidden(f"the role '{role}' makes links for viewers only")
    code, expires = await plane.sessions.make_code(body.role, role, _token_of(call))
    prefix = plane.settings.path_prefix
    document = {"code": code, "role": body.role, "expires_at": expires, "prefix": prefix}
    return answer(document, 201, NO_STORE)


@router.delete("/sessions")
async def end_sessions(call: Call) -> Response:
    """End all sessions and codes for the admin, and those of their own token for a viewer."""
    token = None if call.caller.role == "admin" else _token_of(call)
    ended = await call.plane.sessions.end_all(token)
    return answer({"ended": ended})


def _token_of(call: RestCall) -> str:
    """Return the bearer token by which the gate has admitted a request."""
    return call.request.headers["authorization"].partition(" ")[2].strip()


PACKAGE: Final = "fastapi_swagger"
"""The package with the files of Swagger UI. Its code is not used, and not imported."""
_SHIPPED: Final = ("swagger-ui.css", "swagger-ui-bundle.js")
_OWN: Final = "start.js"
_FOLDER: Final = Path(__file__).parent / "docs"


@lru_cache(maxsize=len(_SHIPPED) + 1)
def asset(name: str) -> WebFile:
    """Return a file that the document names.

    Raises:
        NotFound: The document names no such file, or the package with it is not installed (the reason
            DocsNotInstalled).
    """
    if name == _OWN:
        return web_file(name, (_FOLDER / name).read_bytes())
    if name not in _SHIPPED:
        raise NotFound(f"there is no /docs/{name[:200]}")
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "resources" / name
        if path.is_file():
            return web_file(name, path.read_bytes())
    raise NotFound(
        "this installation lacks Swagger UI; `pip install 'rollyard[api]'` installs it, and "
        "/openapi.json describes the calls without it",
        reason="DocsNotInstalled",
    )


@lru_cache(maxsize=8)
def _document(prefix: str) -> WebFile:
    text = (_FOLDER / "docs.html").read_text(encoding="utf-8")
    return web_file("docs.html", text.format(prefix=html.escape(prefix, quote=True)).encode(), DOCS_POLICY)


@of_docs.api_route("/docs", methods=["GET", "HEAD"])
async def documents(request: Request, plane: Plane) -> Response:
    """Return the document that shows the calls."""
    return (await asyncio.to_thread(_document, plane.settings.path_prefix)).answer(request.headers)


@of_docs.api_route("/docs/{name}", methods=["GET", "HEAD"])
async def document_asset(request: Request, name: str) -> Response:
    """Return a file of the document."""
    # The first call reads and compresses the files.
    return (await asyncio.to_thread(asset, name)).answer(request.headers)
