"""Transports that send calls over httpx, sync and async. They repeat calls within limits."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar, cast

from rollyard_client.call import Call, Retry, check
from rollyard_client.context import Context
from rollyard_client.environment import USER_AGENT
from rollyard_client.errors import RollyardError, unreachable
from rollyard_client.tls import verify
from rollyard_client.unixsocket import base_of, socket_of

_COMMAND_LINE: Final = "httpx._main"
if "httpx" in sys.modules:
    import httpx
else:
    # httpx imports its own command line, and with it click, rich and the syntax highlighting of pygments.
    # That takes longer than all the rest. httpx does without if this import fails, and an entry of None makes
    # it fail. Only `httpx.main`, the entry point of the command `httpx`, is affected.
    sys.modules[_COMMAND_LINE] = cast(Any, None)
    try:
        import httpx
    finally:
        sys.modules.pop(_COMMAND_LINE, None)

T = TypeVar("T")

_NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def request(client: httpx.Client | httpx.AsyncClient, call: Call[Any], timeout: float) -> httpx.Request:
    """Return the call as an httpx request."""
    headers = {"Accept": call.accept}
    content: bytes | Iterator[bytes] | AsyncIterator[bytes] | None = call.body
    if call.upload is not None:
        headers["Content-Length"] = str(call.upload.size)
        pieces = call.upload.pieces()
        content = pieces if isinstance(client, httpx.Client) else _read_beside(pieces)
    if content is not None:
        headers["Content-Type"] = call.content_type
    return client.build_request(
        call.method,
        call.path,
        params={k: v for k, v in call.query.items() if v is not None},
        content=content,
        headers=headers,
        timeout=httpx.Timeout(timeout + call.wait, connect=5.0),
    )


async def _read_beside(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a file. They are read in a thread, because a disk may be slow."""
    while data := await asyncio.to_thread(next, pieces, b""):
        yield data


def _failed(call: Call[Any], url: str, error: httpx.TransportError) -> tuple[RollyardError, bool]:
    """Return the exception for a broken connection, and whether the call may be sent again."""
    wrapped = unreachable(url, error)
    return wrapped, call.idempotent or isinstance(error, _NEVER_SENT)


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "User-Agent": USER_AGENT}


def _stream_headers(last_id: str) -> dict[str, str]:
    headers = {"Accept": "text/event-stream"}
    return headers | {"Last-Event-ID": last_id} if last_id else headers


class SyncTransport:
    """A transport that sends calls one after the other."""

    def __init__(self, context: Context, *, retry: Retry, timeout: float) -> None:
        self.url = context.url
        self._retry = retry
        self._timeout = timeout
        socket, verified = socket_of(context.url), verify(context)
        self.client = httpx.Client(
            base_url=base_of(context.url),
            headers=_headers(context.token),
            timeout=timeout,
            trust_env=False,
            verify=verified,
            transport=None if socket is None else httpx.HTTPTransport(verify=verified, uds=socket),
        )

    def send(self, call: Call[T]) -> T:
        """Send a call and return its result, or raise RollyardError."""
        attempt = 0
        while True:
            again = True
            try:
                answer = self.client.send(request(self.client, call, self._timeout))
                return call.parse(check(answer))
            except httpx.TransportError as error:
                failed, again = _failed(call, self.url, error)
                failed.__cause__ = error
            except RollyardError as error:
                failed = error
            pause = self._retry.pause(attempt, failed) if again else None
            if pause is None:
                raise failed
            time.sleep(pause)
            attempt += 1

    @contextmanager
    def stream(self, path: str, query: Mapping[str, str], last_id: str) -> Iterator[httpx.Response]:
        """Open an event stream, or raise RollyardError if it cannot be opened."""
        try:
            with self.client.stream("GET", path, params=query, headers=_stream_headers(last_id)) as answer:
                if not answer.is_success:
                    answer.read()
                yield check(answer)
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error

    def close(self) -> None:
        """Close all connections."""
        self.client.close()


class AsyncTransport:
    """A transport for an event loop. It sends any number of calls at once, up to `connections`."""

    def __init__(self, context: Context, *, retry: Retry, timeout: float, connections: int = 100) -> None:
        self.url = context.url
        self._retry = retry
        self._timeout = timeout
        socket, verified = socket_of(context.url), verify(context)
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self.client = httpx.AsyncClient(
            base_url=base_of(context.url),
            headers=_headers(context.token),
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
                answer = await self.client.send(request(self.client, call, self._timeout))
                return call.parse(check(answer))
            except httpx.TransportError as error:
                failed, again = _failed(call, self.url, error)
                failed.__cause__ = error
            except RollyardError as error:
                failed = error
            pause = self._retry.pause(attempt, failed) if again else None
            if pause is None:
                raise failed
            await asyncio.sleep(pause)
            attempt += 1

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], last_id: str
    ) -> AsyncIterator[httpx.Response]:
        """Open an event stream, or raise RollyardError if it cannot be opened."""
        try:
            async with self.client.stream(
                "GET", path, params=query, headers=_stream_headers(last_id)
            ) as answer:
                if not answer.is_success:
                    await answer.aread()
                yield check(answer)
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()
