"""The gate before the ProRL calls: who may ask at all, and bodies of bounded size, time and number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard_api.core.hosts import HostCheck
from rollyard_api.core.problems import ApiError, Forbidden, Invalid, Malformed, TooLarge

MAX_INSTANCE_BYTES: Final = 16 << 20
"""The largest body of `/process`, in bytes."""
MAX_BODY_BYTES: Final = 64 << 10
"""The largest body of every other call, in bytes."""
MAX_HELD_BYTES: Final = 256 << 20
"""The largest size of all bodies that are in memory at the same time, in bytes."""
BODY_SECONDS: Final = 60.0
"""The time in which a body must have arrived, in seconds."""
_BROWSERS: Final = ("origin", "sec-fetch-site", "sec-fetch-mode", "access-control-request-method")
"""The headers that browsers add to the requests of web pages, and that no client of the protocol sends."""


class BodyLate(ApiError):
    """The body of a request did not arrive in time."""

    status = 408


class BodyPacked(ApiError):
    """The body of a request is compressed."""

    status = 415


class BodyGate:
    """An ASGI application that refuses web pages and bodies without bounds before the calls see them.

    A call finds the body in `request.state.body`, and awaits `request.state.body_read` when it needs it no
    more.

    Args:
        app: The calls.
        hosts: The Host headers that are taken.
    """

    def __init__(self, app: ASGIApp, hosts: HostCheck) -> None:
        self._app = app
        self._hosts = hosts
        self._held = 0
        self._freed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI specifies it."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        async with AsyncExitStack() as held:
            try:
                request.state.body = await self._body(request, held)
            except ApiError as refusal:
                # The rest of the body is not read, so the connection cannot be used again.
                headers = {"Connection": "close"}
                answer = JSONResponse({"detail": refusal.detail}, refusal.status, headers)
                await answer(scope, receive, send)
                return
            request.state.body_read = held.aclose
            await self._app(scope, receive, send)

    @asynccontextmanager
    async def _room(self, count: int) -> AsyncIterator[None]:
        """Hold room in memory for so many bytes within the block, which begins once there is as much."""
        while self._held + count > MAX_HELD_BYTES:
            self._freed.clear()
            await self._freed.wait()
        self._held += count
        try:
            yield
        finally:
            self._held -= count
            self._freed.set()

    async def _body(self, request: Request, held: AsyncExitStack) -> bytes:
        headers, path = request.headers, request.scope["path"]
        if any(name in headers for name in _BROWSERS):
            raise Forbidden("requests of web pages are refused")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._hosts(hosts[0]):
            raise Forbidden("the Host header names another host than this listener; see its setting 'hosts'")
        most = MAX_INSTANCE_BYTES if path == "/process" else MAX_BODY_BYTES
        too_large = TooLarge(f"the body of {path} may have {most} bytes")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > most:
            raise too_large
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise BodyPacked("the body must not be compressed")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                # A body without a length may become as long as any.
                await held.enter_async_context(
                    self._room(most if "transfer-encoding" in headers else int(length))
                )
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise BodyLate(f"the body did not arrive within {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise Malformed("the connection was lost") from None
        kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if body and kind != "application/json":
            raise Invalid("the body must be JSON, with Content-Type: application/json")
        return bytes(body)
