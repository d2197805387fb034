"""The client's end of a connection to the exec server, which sends frames and matches answers to requests.

A connection can become a tunnel: one connection of a program in the sandbox to its loopback port.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from rollyard_sandbox.errors import ConnectionLost, ProtocolError, SandboxError, from_wire
from rollyard_sandbox.frames import TUNNEL_READY, FrameReader, encode

ANSWER_LIMIT: Final = 30.0  # The limit in seconds for a request that has no time limit of its own.
_BUFFER: Final = 64 * 1024  # bytes


@dataclass(frozen=True, slots=True)
class SandboxTunnel:
    """A tunnel that waits for a program or is used by one."""

    port: int
    """The port on 127.0.0.1 inside the sandbox."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def used(self) -> bool:
        """Wait until a program has connected. The result is False if the server has closed the tunnel."""
        try:
            return await self.reader.readexactly(len(TUNNEL_READY)) == TUNNEL_READY
        except (asyncio.IncompleteReadError, OSError):
            return False

    def close(self) -> None:
        """Close the connection at once."""
        self.writer.transport.abort()


class Wire(asyncio.Protocol):
    """The frames of one connection. Answers are matched to requests by their ids."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reader = FrameReader()
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._listeners: dict[int, Callable[[bytes], None]] = {}
        self._transport: asyncio.Transport | None = None
        self.lost: SandboxError | None = None
        self.closed = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport of the new connection."""
        # The type is not checked at run time, because uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Read the frames that are complete."""
        try:
            for header, body in self._reader.feed(data):
                self._frame(header, body)
        except ProtocolError as error:
            self.fail(error)

    def _frame(self, header: dict[str, Any], body: bytes) -> None:
        request = header.get("id", 0)
        if "event" in header:
            listener = self._listeners.get(request)
            if listener is not None:
                listener(body)
            return
        future = self._waiting.pop(request, None)
        self._listeners.pop(request, None)
        if "error" in header:
            error = from_wire(header["error"], header.get("message", ""))
            if future is None:
                self.fail(error)  # The error is about the connection itself.
            elif not future.done():
                future.set_exception(error)
        elif future is not None and not future.done():
            future.set_result((header, body))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all waiting calls."""
        self.fail(ConnectionLost(f"the connection to the sandbox was lost: {exc or 'closed by the server'}"))

    def fail(self, error: SandboxError) -> None:
        """End the connection. Every waiting request gets the error that ended it."""
        if self.lost is None:
            self.lost = error
        if self._transport is not None:
            self._transport.abort()
        waiting, self._waiting = self._waiting, {}
        self._listeners.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(self.lost)
        if not self.closed.done():
            self.closed.set_result(None)

    async def into_tunnel(self, port: int) -> SandboxTunnel:
        """Let the connection be a tunnel, for which its server waits. No frame can be sent any more.

        The server sends nothing before it has received `TUNNEL_READY`, so no byte is lost between the
        protocols.
        """
        if self.lost is not None or self._transport is None:
            raise self.lost or ConnectionLost("not connected")
        transport, self._transport = self._transport, None
        self.lost = ConnectionLost("the connection has become a tunnel")
        if not self.closed.done():
            self.closed.set_result(None)
        reader = asyncio.StreamReader(limit=_BUFFER, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        writer.write(TUNNEL_READY)
        return SandboxTunnel(port, reader, writer)

    @property
    def unanswered(self) -> int:
        """Return how many requests are unanswered, including those whose caller no longer waits."""
        return len(self._waiting)

    async def request(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        limit: float = ANSWER_LIMIT,
        listener: Callable[[bytes], None] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request, and wait up to `limit` seconds for its answer.

        Cancelling the wait cancels the request.
        """
        if self.lost is not None or self._transport is None:
            raise self.lost or ConnectionLost("not connected")
        self._next_id += 1
        request = header["id"] = self._next_id
        frame = encode(header, body)
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = self._loop.create_future()
        self._waiting[request] = future
        if listener is not None:
            self._listeners[request] = listener
        self._transport.write(frame)
        expiry = self._loop.call_later(limit, self._expire, request, limit)
        try:
            return await future
        except asyncio.CancelledError:
            # The answer still comes, but no caller waits for it, and its id is not used again.
            if request in self._waiting and self.lost is None:
                self._transport.write(encode({"op": "cancel", "id": request}))
            raise
        finally:
            expiry.cancel()

    def _expire(self, request: int, limit: float) -> None:
        future = self._waiting.get(request)
        if future is not None and not future.done():
            future.set_exception(ConnectionLost(f"the sandbox did not answer within {limit:.0f} s"))
            self._waiting.pop(request)
