"""The transport of the async client and of drivers, from which `scripts/sync-client` makes the sync one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, cast

from rollyard_client.call import Call, File, Retry, check
from rollyard_client.context import Context, verify
from rollyard_client.environment import USER_AGENT
from rollyard_client.errors import RollyardError, unreachable
from rollyard_client.unixsocket import base_of, socket_of

_COMMAND_LINE: Final = "httpx._main"
if "httpx" in sys.modules:
    import httpx
else:
    # httpx imports its own command line, and with it click, rich and the syntax highlighting of pygments.
    # That takes longer than all the rest. httpx does without it if this import fails, and an entry of None
    # makes it fail. Only `httpx.main`, the entry point of the command `httpx`, is affected.
    sys.modules[_COMMAND_LINE] = cast(Any, None)
    try:
        import httpx
    finally:
        sys.modules.pop(_COMMAND_LINE, None)

T = TypeVar("T")

CONNECTIONS: Final = 100
"""The most connections of a client, and the most that stay open while idle."""
_NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class AsyncTransport:
    """A transport that sends calls over httpx, up to `CONNECTIONS` at once, and repeats those that fail."""

    def __init__(self, context: Context, *, retry: Retry, timeout: float) -> None:
        self.url = context.url
        self._retry = retry
        self._timeout = timeout
        socket, verified = socket_of(context.url), verify(context)
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        self.client = httpx.AsyncClient(
            base_url=base_of(context.url),
            headers={"Authorization": f"Bearer {context.token}", "User-Agent": USER_AGENT},
            timeout=timeout,
            trust_env=False,
            verify=verified,
            limits=limits,
            transport=None
            if socket is None
            else httpx.AsyncHTTPTransport(verify=verified, uds=socket, limits=limits),
        )

    async def send(self, call: Call[T]) -> T:
        """Send a call and return its result, or raise RollyardError."""
        attempt = 0
        while True:
            again = True
            try:
                answer = await self.client.send(self._request(call))
                return call.parse(check(answer))
            except httpx.TransportError as error:
                failed: RollyardError = unreachable(self.url, error)
                failed.__cause__ = error
                again = call.idempotent or isinstance(error, _NEVER_SENT)
            except RollyardError as error:
                failed = error
            pause = self._retry.pause(attempt, failed) if again else None
            if pause is None:
                raise failed
            await asyncio.sleep(pause)
            attempt += 1

    def _request(self, call: Call[Any]) -> httpx.Request:
        headers = {"Accept": call.accept}
        content: bytes | AsyncIterator[bytes] | None = call.body
        if call.upload is not None:
            headers["Content-Length"] = str(call.upload.size)
            content = _pieces(call.upload)
        if content is not None:
            headers["Content-Type"] = call.content_type
        return self.client.build_request(
            call.method,
            call.path,
            params={k: v for k, v in call.query.items() if v is not None},
            content=content,
            headers=headers,
            timeout=httpx.Timeout(self._timeout + call.wait, connect=5.0),
        )

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], last_id: str
    ) -> AsyncIterator[httpx.Response]:
        """Open an event stream, or raise RollyardError if it cannot be opened."""
        headers = {"Accept": "text/event-stream"}
        if last_id:
            headers["Last-Event-ID"] = last_id
        try:
            async with self.client.stream("GET", path, params=query, headers=headers) as answer:
                if not answer.is_success:
                    await answer.aread()
                yield check(answer)
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()


async def _pieces(file: File) -> AsyncIterator[bytes]:
    # A disk may be slow, and the event loop must not wait for it.
    pieces = file.pieces()
    while data := await asyncio.to_thread(next, pieces, b""):
        yield data
