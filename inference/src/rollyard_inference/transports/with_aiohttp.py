"""The transport over aiohttp. The process has one session, which the first request opens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final

import orjson

from rollyard_inference.errors import BackendUnavailable, NotListening
from rollyard_inference.transports.interface import (
    MAX_ANSWER_BYTES,
    PLAIN,
    TRACEPARENT,
    Reply,
    check_plain,
    too_long,
)

if TYPE_CHECKING:
    import aiohttp

# In seconds. This is less than uvicorn's 5, so no request meets a closing connection.
_KEEP_ALIVE: Final = 4.0


class AiohttpTransport:
    """A transport with bounded answers, which is used as an async context manager.

    Args:
        connect_seconds: The seconds to wait for a connection.
    """

    def __init__(self, connect_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._entered = False
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AiohttpTransport:
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if not self._entered:
            raise RuntimeError("AiohttpTransport is used outside of its 'async with'")
        if self._session is None:
            import aiohttp

            # The places of the Run pool bound how many requests are in flight, so the connector need not.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._session

    async def request(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        seconds: float | None = None,
        limit: int = MAX_ANSWER_BYTES,
        traceparent: str | None = None,
    ) -> Reply:
        """Send one request and read the whole answer. See `Transport.request`."""
        async with self._answered(method, url, body, seconds, traceparent) as answer:
            return _reply(answer, await _read(answer, url, limit))

    async def stream(
        self,
        url: str,
        body: object,
        feed: Callable[[bytes | bytearray], None],
        *,
        limit: int = MAX_ANSWER_BYTES,
        traceparent: str | None = None,
    ) -> Reply:
        """Send a POST request whose answer may be a stream of events, and read all of it.

        Args:
            url: The address of the call.
            body: The object to send as JSON.
            feed: Called with the data of each server-sent event, as soon as it has arrived. The event
                `[DONE]` is left out.
            limit: The maximum size in bytes of one event, or of an answer that is no stream.
            traceparent: See `Transport.request`.

        Returns:
            The answer. Its content is empty if it was a stream of events.

        Raises:
            NotListening, BackendUnavailable, BackendMismatch: See `Transport.request`.
        """
        async with self._answered("POST", url, body, None, traceparent) as answer:
            if answer.status != 200 or answer.content_type != "text/event-stream":
                return _reply(answer, await _read(answer, url, limit))
            rest = bytearray()
            async for chunk in answer.content.iter_any():
                rest += chunk
                if b"\n" in chunk:
                    *lines, last = rest.split(b"\n")
                    rest = last
                    for line in lines:
                        data = line[5:].strip() if line.startswith(b"data:") else b""
                        if data and data != b"[DONE]":
                            feed(data)
                if len(rest) > limit:
                    raise too_long(url, limit)
            return _reply(answer, b"")

    @asynccontextmanager
    async def _answered(
        self, method: str, url: str, body: object, seconds: float | None, traceparent: str | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        session = self._opened()
        data = orjson.dumps(body) if body is not None else None
        headers = PLAIN | ({"Content-Type": "application/json"} if data is not None else {})
        if traceparent is not None:
            headers[TRACEPARENT] = traceparent
        try:
            async with (
                asyncio.timeout(seconds),
                session.request(method, url, data=data, headers=headers, allow_redirects=False) as answer,
            ):
                check_plain(url, answer.headers.get("Content-Encoding"))
                yield answer
        except aiohttp.ClientConnectorError as error:
            raise NotListening(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            # The timeout that aiohttp itself raises while it connects is a ClientError as well.
            if seconds is not None and type(error) is TimeoutError:
                raise BackendUnavailable(f"{method} {url}: no answer within {seconds:g} s") from error
            raise BackendUnavailable(f"{url} cannot be reached: {type(error).__name__}: {error}") from error


def _reply(answer: aiohttp.ClientResponse, content: bytes) -> Reply:
    return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, content)


async def _read(answer: aiohttp.ClientResponse, url: str, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > limit:
            raise too_long(url, limit)
        chunks.append(chunk)
    return b"".join(chunks)
