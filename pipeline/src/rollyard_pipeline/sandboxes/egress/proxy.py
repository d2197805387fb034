"""The proxy for one sandbox: CONNECT for TLS, and requests with absolute URLs for plain HTTP.

CONNECT must be followed by TLS to the same name, and each plain request has a connection of its own, so what
was checked is what is connected to. TLS is not intercepted. Hence the proxy cannot see which host a request
inside of TLS names, nor what it sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from rollyard_crds.fields.allowed_hosts import HostRule

from rollyard_pipeline.sandboxes.egress.client_hello import NotTls, server_name
from rollyard_pipeline.sandboxes.egress.destinations import DestinationRefused, Destinations, Unresolved
from rollyard_pipeline.sandboxes.egress.http_head import MAX_HEAD, BadHead, RequestHead, parse_head
from rollyard_pipeline.sandboxes.egress.limits import EgressLimits, Meter, Spent

_CHUNK: Final = 64 * 1024
_ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
_REASONS: Final = {
    400: "Bad Request", 403: "Forbidden", 411: "Length Required", 431: "Request Header Fields Too Large",
    502: "Bad Gateway", 503: "Service Unavailable",
}  # fmt: skip


class EgressProxy:
    """Serves the connections of one sandbox.

    Args:
        rules: The hosts that the sandbox may reach.
        meter: Counts bytes and refusals.
    """

    def __init__(
        self, rules: Sequence[HostRule], destinations: Destinations, meter: Meter, limits: EgressLimits
    ) -> None:
        self._rules = rules
        self._destinations = destinations
        self._meter = meter
        self._limits = limits

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end. It does not raise what either end of it causes."""
        try:
            async with asyncio.timeout(self._limits.connection_seconds):
                await self._serve(reader, writer)
        except* (OSError, EOFError, TimeoutError, Spent) as errors:
            if errors.subgroup(Spent) is not None:
                self._meter.note(f"the limit of {self._limits.total_bytes} bytes is reached")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._limits.head_seconds):
                request = parse_head(await _head(reader))
        except BadHead as error:
            self._meter.note(str(error))
            await _answer(writer, error.status, str(error))
            return
        where = f"{request.shown}:{request.port}"
        if self._meter.spent:
            await _answer(writer, 503, "the sandbox has moved as many bytes as it may in one stage")
            return
        try:
            found = await self._destinations.addresses(request.host, request.port, self._rules)
            server, outside = await self._connected([str(address) for address in found], request.port)
        except DestinationRefused as error:
            self._meter.note(error.detail if where in error.detail else f"{where}: {error.detail}")
            await _answer(writer, 403, str(error))
            return
        except Unresolved as error:
            await _answer(writer, 502, str(error))
            return
        except OSError:
            await _answer(writer, 502, f"{where} cannot be reached")
            return
        try:
            if request.connects:
                await self._tunnel(request, reader, writer, server, outside)
            else:
                await self._forward(request, reader, writer, server, outside)
        finally:
            outside.transport.abort()

    async def _connected(
        self, addresses: Sequence[str], port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address that answers. Nothing is resolved here.

        Raises:
            OSError: None of them answers in time.
        """
        problem: Exception = OSError("no address")
        async with asyncio.timeout(self._limits.connect_seconds):
            for address in addresses:
                try:
                    return await asyncio.open_connection(address, port, limit=_CHUNK)
                except OSError as error:
                    problem = error
        raise problem

    async def _tunnel(
        self,
        request: RequestHead,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        outside: asyncio.StreamWriter,
    ) -> None:
        writer.write(_ESTABLISHED)
        await writer.drain()
        try:
            async with asyncio.timeout(self._limits.head_seconds):
                hello = await _hello(reader, request)
        except NotTls as error:
            self._meter.note(f"{request.shown}:{request.port}: {error}")
            return
        self._meter.count(len(hello))
        outside.write(hello)
        await self._both(reader, writer, server, outside, None)

    async def _forward(
        self,
        request: RequestHead,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        outside: asyncio.StreamWriter,
    ) -> None:
        self._meter.count(len(request.forwarded))
        outside.write(request.forwarded)
        await self._both(reader, writer, server, outside, request.length)

    async def _both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        outside: asyncio.StreamWriter,
        length: int | None,
    ) -> None:
        """Move bytes in both directions until both have ended.

        Args:
            length: The number of bytes that the program may send. With None it is not limited.
        """
        async with asyncio.timeout(self._limits.idle_seconds) as idle, asyncio.TaskGroup() as group:
            upload = group.create_task(self._move(reader, outside, idle, length))
            await self._move(server, writer, idle, None)
            if length is not None:
                upload.cancel()  # The answer is complete. The program's next request needs a connection.

    async def _move(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        idle: asyncio.Timeout,
        length: int | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        while length != 0:
            data = await source.read(_CHUNK if length is None else min(_CHUNK, length))
            if not data:
                break
            self._meter.count(len(data))
            if length is not None:
                length -= len(data)
            target.write(data)
            await target.drain()
            if not idle.expired():
                idle.reschedule(loop.time() + self._limits.idle_seconds)
        if length is None and target.can_write_eof():
            target.write_eof()
        elif length == 0 and await source.read(1):
            # A second request on this connection could name another host.
            raise ConnectionAbortedError("the program sent more than its request")


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Read up to the empty line after the head of a request.

    Raises:
        EOFError, OSError: The connection ends before that.
        BadHead: The head is too long.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        head = b" " * (MAX_HEAD + 1)
    if len(head) > MAX_HEAD:
        raise BadHead(f"the head of the request has more than {MAX_HEAD} bytes", 431)
    return head


async def _hello(reader: asyncio.StreamReader, request: RequestHead) -> bytes:
    """Read the ClientHello, and check that it names the host of the request.

    Raises:
        NotTls: It does not, or there is none.
        EOFError, OSError: The connection ends before that.
    """
    data = b""
    while (name := server_name(data)) is None:
        more = await reader.read(4096)
        if not more:
            raise EOFError
        data += more
    if name.lower().removesuffix(".") != request.host:
        raise NotTls(f"CONNECT is followed by TLS to another name, {name[:100]!r}")
    return data


async def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = f"rollyard: {text}\n".encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
