"""The ASGI application: middleware for tokens, limits and problems around the routes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard_api import auth
from rollyard_api.problems import ApiError, Invalid, MethodNotAllowed, NotFound, TooLarge, response
from rollyard_api.routes import claims, jobs, leases, pools, probes, results, unfinished, weights
from rollyard_api.service import ControlPlane, running
from rollyard_api.settings import Settings

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"})


class Gate:
    """Before the routes: the bearer token and the body's size. Around them: latency."""

    def __init__(self, app: ASGIApp, plane: Callable[[], ControlPlane], max_body: int) -> None:
        self.app = app
        self._plane = plane
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = {name: value for name, value in scope["headers"] if name in _HEADERS}
            if scope["path"] not in OPEN_PATHS:
                role = self._plane().tokens.role_of(headers.get(b"authorization", b"").decode("latin-1"))
                auth.authorize(role, scope["method"], scope["path"])
                scope.setdefault("state", {})["role"] = role
            if int(headers.get(b"content-length", b"0")) > self._max_body:
                raise TooLarge(f"the body is longer than {self._max_body} bytes")
            await self.app(scope, self._bounded(receive), watched)
        except ApiError as error:
            await response(error)(scope, receive, watched)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "unknown")
            elapsed = time.perf_counter() - started
            self._plane().metrics.http.labels(scope["method"], path, str(status)).observe(elapsed)

    def _bounded(self, receive: Receive) -> Receive:
        """A chunked body has no Content-Length: count it as it comes."""
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise TooLarge(f"the body is longer than {self._max_body} bytes")
            return message

        return bounded


_HEADERS = (b"authorization", b"content-length")


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return response(error)


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [
        f"{'.'.join(str(part) for part in item['loc'][1:]) or item['loc'][0]}: {item['msg']}"
        for item in error.errors()
    ]
    return response(Invalid(problems[0], errors=problems))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return response(NotFound(f"there is no {request.url.path}"))
    if error.status_code == 405:
        return response(MethodNotAllowed(f"{request.url.path} does not take {request.method}"))
    other = ApiError(str(error.detail))
    return response(other)


async def _unexpected(_request: Request, error: Exception) -> Response:
    # Starlette raises it again after the answer, so that the server logs it with its traceback.
    return response(ApiError(f"unexpected {type(error).__name__}; the server's log says more"))


def build(settings: Settings, *, started: Callable[[ControlPlane], None] | None = None) -> FastAPI:
    """The application; the control plane lives as long as its lifespan.

    Args:
        settings: as given on the command line.
        started: called with the control plane once it runs (the server's signal handler needs its bus).
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                plane = await stack.enter_async_context(running(settings))
            except Exception as error:
                # The server only logs it: whoever started the server asks for it here.
                app.state.failure = error
                raise
            app.state.plane = plane
            if started is not None:
                started(plane)
            yield

    app = FastAPI(
        title="Rollyard",
        summary="Rollouts as a service for reinforcement learning of multi-turn LLM agents",
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers={
            ApiError: _api_error,
            RequestValidationError: _validation_error,
            HTTPException: _http_error,
            Exception: _unexpected,
        },
    )
    for routes in (leases, claims, results, jobs, unfinished, pools, weights, probes):
        app.include_router(routes.router)
    app.add_middleware(Gate, plane=lambda: app.state.plane, max_body=settings.max_body_bytes)
    return app
