"""The gate before the ProRL calls: who may ask at all, and bodies of bounded size, time and number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard_api.core.hosts import HostCheck
from rollyard_api.core.problems import ControlPlaneError

MAX_INSTANCE_BYTES: Final = 16 << 20
"""The largest body of `/process`, in bytes."""
MAX_BODY_BYTES: Final = 64 << 10
"""The largest body of every other call, in bytes."""
MAX_HELD_BYTES: Final = 256 << 20
"""The largest size of all bodies that are in memory at the same time, in bytes."""
BODY_SECONDS: Final = 60.0
"""The time in which a body must have arrived, in seconds."""
_BROWSERS: Final = (b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"access-control-request-method")
"""The headers that browsers add to the requests of web pages, and that no client of the protocol sends."""


class RequestRefused(ControlPlaneError):
    """A request that the gate answers by itself."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class BodyGate:
    """An ASGI application that refuses web pages and bodies without bounds before the calls see them.

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
        async with AsyncExitStack() as held:
            try:
                body = await self._body(scope, receive, held)
            except RequestRefused as refusal:
                # The rest of the body is not read, so the connection cannot be used again.
                headers = {"Connection": "close"}
                answer = JSONResponse({"detail": refusal.detail}, refusal.status, headers)
                await answer(scope, receive, send)
                return
            messages = iter([{"type": "http.request", "body": body, "more_body": False}])
            del body

            async def replayed() -> Message:
                return next(messages, None) or await receive()

            scope.setdefault("state", {})["body_read"] = held.aclose
            await self._app(scope, replayed, send)

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

    async def _body(self, scope: Scope, receive: Receive, held: AsyncExitStack) -> bytes:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        self._check_caller(headers)
        most = MAX_INSTANCE_BYTES if scope["path"] == "/process" else MAX_BODY_BYTES
        length = headers.get(b"content-length", [b"0"])[0]
        if not length.isdigit() or len(length) > 18 or int(length) > most:
            raise RequestRefused(413, f"the body of {scope['path']} may have {most} bytes")
        if headers.get(b"content-encoding", [b"identity"])[0].strip().lower() != b"identity":
            raise RequestRefused(415, "the body must not be compressed")
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                # A body without a length may become as long as any.
                count = most if b"transfer-encoding" in headers else int(length)
                await held.enter_async_context(self._room(count))
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RequestRefused(400, "the connection was lost")
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > most:
                        raise RequestRefused(413, f"the body of {scope['path']} may have {most} bytes")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise RequestRefused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        body = b"".join(pieces)
        kind = headers.get(b"content-type", [b"application/json"])[0].split(b";")[0].strip().lower()
        if body and kind != b"application/json":
            raise RequestRefused(422, "the body must be JSON, with Content-Type: application/json")
        return body

    def _check_caller(self, headers: Mapping[bytes, list[bytes]]) -> None:
        if any(name in headers for name in _BROWSERS):
            raise RequestRefused(403, "requests of web pages are refused")
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._hosts(hosts[0].decode("latin-1")):
            raise RequestRefused(
                403, "the Host header names another host than this listener; see its setting 'hosts'"
            )
