"""The ASGI application: a gate for tokens, limits and problems around the routes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from inspect import signature
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from rollyard_process.version import installed_version
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard_api.access import permissions
from rollyard_api.access.bearer_tokens import Caller
from rollyard_api.access.permissions import Access, Rule
from rollyard_api.browsers.door import SessionOver
from rollyard_api.browsers.page import Front
from rollyard_api.core.problems import (
    ApiError,
    Invalid,
    NotFound,
    TooLarge,
    Unavailable,
    response,
)
from rollyard_api.prorl.app import ProrlListener, listening
from rollyard_api.routes import browsers, jobs, pools, results, stage_workers, views
from rollyard_api.routes.common import Plane, describe_bodies
from rollyard_api.service import ControlPlane, running
from rollyard_api.settings import Settings


class Gate:
    """The outermost layer checks the token and the size of the body, and measures the latency of each call.

    It calls the routes of workers itself. All others are called by FastAPI, whose layers take longer than
    many answers.
    """

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self.app: ASGIApp = partial(FastAPI.__call__, app)
        self._state = app.state
        self._rules = Access(open_metrics=settings.open_metrics, open_docs=settings.open_docs)
        self._max_body = settings.max_body_bytes
        self._max_blob = settings.max_blob_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, answered = time.perf_counter(), 500, False

        body = Body(receive, scope)

        async def watched(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = message["status"], True
                if status >= HTTPStatus.BAD_REQUEST and not body.whole:
                    # Without this, the server would read and drop everything that a refused caller still
                    # sends.
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        answering: Send = watched
        try:
            headers = {name: value for name, value in scope["headers"] if name in _HEADERS}
            rule = self._rules.rule(scope["method"], scope["path"])
            if rule.open:
                self._state.plane.door.check_open(scope)
            else:
                answering = await self._admit(scope, rule, headers, watched)
            # An upload is read in pieces and may be longer. All other bodies are held in memory as a whole.
            most = self._max_blob if scope["path"].startswith(_BLOBS) else self._max_body
            most = most if rule.max_body is None else min(most, rule.max_body)
            length = headers.get(b"content-length", b"0")
            # The server itself refuses a value that is not a number of this kind. Here such a value counts as
            # too long.
            if not length.isdigit() or len(length) > 18 or int(length) > most:
                raise TooLarge(f"the body of {scope['method']} {scope['path']} may have {most} bytes")
            body.most = most
            direct = _DIRECT.get((scope["method"], scope["path"]))
            if direct is None or scope["query_string"]:  # These routes have no query, and check none.
                await self.app(scope, body, answering)
                return
            scope["route"] = direct
            await (await direct.endpoint(Request(scope, body)))(scope, body, watched)
        except ApiError as error:
            await response(error)(scope, receive, watched)
        except (SessionOver, ClientDisconnect) as error:
            # The answer was cut off because the session is over, or the client has gone. Neither is an error.
            if isinstance(error, ClientDisconnect) and not isinstance(error.__context__, SessionOver):
                raise
        except Exception as error:
            if not answered:
                await (await _problem(Request(scope), error))(scope, receive, watched)
            raise  # The server logs it with its traceback.
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "unknown")
            elapsed = time.perf_counter() - started
            self._state.plane.metrics.http.labels(scope["method"], path, str(status)).observe(elapsed)

    async def _admit(self, scope: Scope, rule: Rule, headers: dict[bytes, bytes], send: Send) -> Send:
        """Identify the caller for the routes, and return the function that sends the answer.

        Raises:
            ApiError: The caller is unknown, or is not permitted to make the call.
        """
        plane: ControlPlane = self._state.plane
        state = scope.setdefault("state", {})
        authorization = headers.get(b"authorization")
        if b"cookie" in headers:
            if authorization is not None:
                plane.door.check_bearer(scope)
            elif (session := await plane.door.admit(scope, rule)) is not None:
                state["caller"], state["bound"], state["session"] = Caller("viewer"), None, session
                return plane.door.sender(send, session)
        caller = plane.tokens.caller((authorization or b"").decode("latin-1"))
        permissions.authorize(rule, caller, scope["method"], scope["path"])
        state["caller"], state["bound"], state["session"] = caller, None, None
        if caller.job is not None:
            job = await plane.bound_jobs.of(caller.job)
            if not permissions.still(rule, job.stand):
                raise permissions.refused(job)
            state["bound"] = job
        return send


class Body:
    """The body of a request on its way to a route, which is counted because a chunked body has no length."""

    def __init__(self, receive: Receive, scope: Scope) -> None:
        self._receive = receive
        self._read = 0
        self.most = 0
        """The largest number of bytes that the body may have."""
        self.whole = not any(name in _LENGTHS and value != b"0" for name, value in scope["headers"])
        """Whether all of the body has arrived."""

    async def __call__(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._read > self.most:
            raise TooLarge(f"the body is longer than {self.most} bytes")
        self.whole = self.whole or not message.get("more_body", False)
        return message


_BLOBS: Final = f"{permissions.BLOBS}/"
_LENGTHS: Final = (b"content-length", b"transfer-encoding")
_HEADERS: Final = (b"authorization", b"content-length", b"cookie")


async def _problem(request: Request, error: Exception) -> Response:
    """Return the answer of a route that raised an exception."""
    match error:
        case ApiError():
            return response(error)
        case RequestValidationError():
            problems = [
                f"{'.'.join(str(part) for part in item['loc'][1:]) or item['loc'][0]}: {item['msg']}"
                for item in error.errors()
            ]
            return response(Invalid.of(*problems))
        case HTTPException(status_code=404):
            return response(NotFound(f"there is no {request.url.path}"))
        case HTTPException(status_code=405):
            refused = f"{request.url.path} does not take {request.method}"
            return response(ApiError(refused, status=405, reason="MethodNotAllowed", headers=error.headers))
        case HTTPException():
            return response(ApiError(str(error.detail)))
        case _:  # Starlette raises it again after the answer.
            return response(ApiError(f"unexpected {type(error).__name__}; the server's log says more"))


class Application(FastAPI):
    """The application behind its gate. Its OpenAPI document is generated when it is first asked for."""

    front: Front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI specifies it."""
        scope["app"] = self
        await self.front(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        for router in _ROUTERS:
            describe_bodies(router.routes)
        return super().openapi()


probes = APIRouter(tags=["probes"])


@probes.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """Return "ok" if the process answers."""
    return "ok"


@probes.get("/readyz", response_class=PlainTextResponse)
async def readyz(plane: Plane) -> str:
    """Return "ok" if the database answers too; 503 otherwise, and while starting or shutting down."""
    if not plane.ready or plane.bus.closing:
        raise Unavailable("starting or shutting down")
    await plane.database.read(lambda conn: conn.exec_driver_sql("SELECT 1").scalar())
    return "ok"


@probes.get("/metrics")
async def metrics(plane: Plane) -> Response:
    """Return the metrics in Prometheus text format."""
    text = await plane.database.read(plane.metrics.render)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# The OpenAPI document lists them in this order.
_ROUTERS: Final = [
    stage_workers.router,
    stage_workers.of_claims,
    results.router,
    jobs.router,
    jobs.of_blobs,
    results.of_cursors,
    jobs.of_drivers,
    stage_workers.of_workers,
    pools.router,
    pools.of_weights,
    probes,
    browsers.router,
    browsers.of_docs,
    views.router,
]
_DIRECT: Final = {
    (method, route.path): route
    for route in stage_workers.router.routes
    if isinstance(route, APIRoute) and list(signature(route.endpoint).parameters) == ["request"]
    for method in sorted(route.methods or ())
}
"""The routes that workers call for each rollout. They read and refuse requests themselves, so nothing in
between has anything to do, and finding them otherwise takes longer than many answers."""


def build(settings: Settings, *, prorl: ProrlListener | None = None) -> FastAPI:
    """Return the application. The control plane lives as long as the application's lifespan.

    Args:
        settings: The settings from the command line.
        prorl: The listener of the ProRL calls, or None if they are off.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                plane = await stack.enter_async_context(running(settings))
            except Exception as error:
                # The server only logs the error. The code that started the server reads it from here.
                app.state.failure = error
                raise
            app.state.plane = plane
            if prorl is not None:
                await stack.enter_async_context(listening(plane, prorl))
            yield

    app = Application(
        # Newer releases of FastAPI can send spans, measurements and errors of requests on their own, with
        # what was wrong in a body. The variables that choose Rollyard's receiver would turn that on.
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
        title="Rollyard",
        summary="Rollouts as a service for reinforcement learning of multi-turn LLM agents",
        version=installed_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        servers=[{"url": prefix}] if (prefix := settings.path_prefix) else None,
        exception_handlers=dict.fromkeys(
            (ApiError, RequestValidationError, HTTPException, Exception), _problem
        ),
    )
    for router in _ROUTERS:
        # Including a router would analyse all its routes again, for each application.
        app.router.routes.extend(router.routes)
    app.front = Front(Gate(app, settings), settings.host_check, settings.path_prefix, settings.page_folder)
    return app
