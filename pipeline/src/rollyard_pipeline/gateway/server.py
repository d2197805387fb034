"""The HTTP server of one rollout's gateway. Its clients are programs of the sandbox, which may be hostile.

It answers what the providers' protocols define and forwards nothing: whatever host, URL or method a request
names, it reaches this rollout's gateway or an error. aiohttp reads and writes HTTP. What it does not bound
by itself is bounded here: the time in which a request must come, the bytes and values of bodies, the pace of
requests and bytes, and the time for which a client may leave an answer unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from hmac import compare_digest
from typing import Any, Final, cast

import orjson
from aiohttp import web
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.client.wire import SandboxTunnel

from rollyard_pipeline.gateway.calls import ModelCall
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.interface import PendingReply, RolloutGateway
from rollyard_pipeline.gateway.protocols.base import ProviderProtocol
from rollyard_pipeline.gateway.routes import PROTOCOLS, Wire, find_route, wire_of
from rollyard_pipeline.sandboxes.tunnels import ConnectionPace, TunnelLimits, lent_tunnels

log = logging.getLogger(__name__)

TUNNEL_LIMITS: Final = TunnelLimits()
"""The bounds of one sandbox's connections to its gateway."""
MAX_BODY: Final = 16 << 20
"""The bytes of one request's body."""
_MAX_HELD: Final = 32 << 20  # bytes of bodies that are being read at once
_MAX_CONTAINERS: Final = 500_000  # lists and objects of a body, at most; brackets within texts count, too
_MAX_VALUES: Final = 1_500_000  # commas, in the same way
_FIRST: Final = 1 << 20  # bytes; this is more than a tunnel holds before it is served
HEAD_SECONDS: Final = 15.0
"""The time in which the head of the first request of a connection must have come."""
IDLE_SECONDS: Final = 120.0
"""The time between the end of one request of a connection and the head of the next."""
BODY_SECONDS: Final = 60.0
"""The time in which a body must have come."""
STALL_SECONDS: Final = 60.0
"""The time for which a client may take nothing of an answer that waits for it."""
_BEARER: Final = re.compile("^bearer +", re.IGNORECASE)  # Schemes are in any case.
_MAX_FRAMES: Final = 4  # of the place of an exception
_LINGER_SECONDS: Final = 1.0  # for the rest of a request that was refused before its end
_HEADERS_SECONDS: Final = 2.0
"""The time in which a reply that fails gets a status of its own. The headers are sent then at the latest."""
_BEAT_SECONDS: Final = 15.0  # Clients and proxies give up a connection on which nothing comes for minutes.
_REQUESTS_PER_SECOND, _BURST = 100.0, 500
_PIECES_PER_SECOND, _PIECES_BURST = 128.0, 1024  # pieces of bodies; each has up to 64 KiB


class GatewayServer:
    """Serves the connections of one sandbox to the gateway of its rollout.

    It can be called without arguments for the protocol of a further connection, as `loop.create_server`
    needs it.

    Args:
        gateway: The rollout.
        name: The rollout, for the log.
    """

    def __init__(self, gateway: RolloutGateway, name: str = "a rollout") -> None:
        self.name = name
        self._gateway = gateway
        self._key = gateway.key.encode()
        self._held = 0
        self._requests = ConnectionPace(_REQUESTS_PER_SECOND, _BURST)
        self._pieces = ConnectionPace(_PIECES_PER_SECOND, _PIECES_BURST)
        self._answering: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._manager = web.Server(cast("Any", self._handle))

    def __call__(self) -> _Connection:
        """Return the protocol of a further connection."""
        return _Connection(self, self._manager)

    @asynccontextmanager
    async def lent(self, client: ExecClient, limits: TunnelLimits = TUNNEL_LIMITS) -> AsyncIterator[str]:
        """Let programs of a sandbox call the gateway, for the time of this context.

        The port is on the loopback of the sandbox's own network namespace, so no other sandbox can reach it.
        Sandboxes of the kind `process` share the loopback of their machine: there only the key keeps others
        out, as it does on every other kind if the first wall should fail.

        With the context all connections end, as they do when the sandbox or its evaluation ends them. The
        calls that were being answered are then cancelled, and what is sampled for them is the gateway's
        matter.

        Args:
            client: The client of the sandbox.
            limits: The bounds of its connections.

        Returns:
            The URL inside of the sandbox, such as `http://127.0.0.1:40123`, without a path.

        Raises:
            rollyard_sandbox.errors.SandboxError: The exec server does not answer, or an evaluation has begun.
        """
        open_tunnel = partial(client.tunnel, "gateway")
        try:
            async with lent_tunnels(open_tunnel, self.serve, limits, f"gateway of {self.name}") as port:
                yield f"http://127.0.0.1:{port}"
        finally:
            await self.aclose()

    async def serve(self, tunnel: SandboxTunnel) -> None:
        """Serve the connection of a program to its end."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                first = await tunnel.reader.read(_FIRST)
        except (TimeoutError, OSError):
            return
        if not first or tunnel.reader.at_eof() or self._closed:
            return
        transport = tunnel.writer.transport
        connection = self()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.data_received(first)
        await connection.ended.wait()

    async def aclose(self) -> None:
        """Cancel the answers that are under way. Further requests are not answered."""
        self._closed = True
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is."""
        connection = request.protocol
        assert isinstance(connection, _Connection)
        task = asyncio.current_task()
        if self._closed or task is None:
            raise asyncio.CancelledError
        connection.expect(None)
        self._answering.add(task)
        try:
            return await self._answer(request)
        finally:
            self._answering.discard(task)
            connection.expect(IDLE_SECONDS)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        wire = wire_of(request.path, headers)
        try:
            await self._requests.turn()
            if request.method in ("GET", "HEAD") and request.path == "/":
                return web.Response(headers=_ids())  # Some clients look whether anything is there.
            self._authorize(request, headers)
            route = find_route(request.method, request.path, headers)
            wire = route.wire
            protocol = PROTOCOLS[wire]
            if route.action == "upgrade":
                # Codex tries a WebSocket first, and sends its calls by POST after this status.
                response = web.Response(status=426, headers={"upgrade": "HTTP/1.1", **_ids()})
                response.force_close()
                return response
            path = {**route.path, "query": request.query_string}
            if route.action == "models":
                return _json(protocol.models(self._gateway, path))
            call = protocol.read(await self._body(request, headers), headers, path)
            if route.action == "count":
                return _json(protocol.counted(await self._gateway.count_tokens(call)))
            pending = await self._gateway.answer(call, protocol.name)
            if not call.stream:
                return _json(protocol.answer(call, await pending.reply()))
            return await self._stream(request, protocol, call, pending)
        except CallError as error:
            response = self._refusal(wire, error)
            if not request.content.is_eof():
                response.force_close()  # Nothing that follows an unread body is taken for a request.
            return response
        except ConnectionError:
            raise
        except Exception as error:
            return self._refusal(wire, self._failed(error))

    def _failed(self, error: Exception) -> CallError:
        """Log what nobody expected, and return what the client may know of it.

        The words of an exception may be those of the policy, so they stay out of the log.
        """
        frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
        places = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames))
        log.error("gateway of %s: %s at %s", self.name, type(error).__name__, places)
        return CallError("failed", "the gateway has failed")

    def _authorize(self, request: web.BaseRequest, headers: Mapping[str, str]) -> None:
        """Check that one of the places in which protocols have their keys holds the key of this rollout.

        Raises:
            CallError: None of them does.
        """
        shown = (
            _BEARER.sub("", headers.get("authorization", "")),
            headers.get("x-api-key", ""),
            headers.get("x-goog-api-key", ""),
            request.query.get("key", ""),
        )
        if not any(compare_digest(key.encode("utf-8", "surrogateescape"), self._key) for key in shown):
            raise CallError("unauthorized", "the key is missing, or it is not the key of this rollout")

    async def _body(self, request: web.BaseRequest, headers: Mapping[str, str]) -> dict[str, Any]:
        """Read the body, which is a JSON object.

        Raises:
            CallError: It is not, or it is too large, compressed, or too slow.
        """
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise CallError("invalid", f"Content-Encoding {encoding[:20]!r} is not taken: send plain JSON")
        if (request.content_length or 0) > MAX_BODY:
            raise _too_large()
        if headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        with self._holding() as pieces:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    while piece := await request.content.readany():
                        pieces += piece
                        self._held += len(piece)
                        if len(pieces) > MAX_BODY:
                            raise _too_large()
                        if self._held > _MAX_HELD:
                            raise CallError("busy", "too many large calls come at once", retry_after=1.0)
                        await self._pieces.turn()
            except TimeoutError:
                raise CallError("invalid", f"the body did not come within {BODY_SECONDS:.0f} s") from None
            except web.RequestPayloadError:
                raise CallError("invalid", "the body is malformed") from None
            return _parsed(pieces)

    @contextmanager
    def _holding(self) -> Iterator[bytearray]:
        """Return a context in which a body is held."""
        pieces = bytearray()
        try:
            yield pieces
        finally:
            self._held -= len(pieces)

    async def _stream(
        self,
        request: web.BaseRequest,
        protocol: ProviderProtocol,
        call: ModelCall,
        pending: PendingReply,
    ) -> web.StreamResponse:
        """Write the events of a reply as its pieces come.

        Raises:
            CallError: The reply has failed before anything was sent.
            ConnectionError: The client has hung up, or does not read.
        """
        events = protocol.events(call, pending.opening)
        headers = {"content-type": events.content_type, "cache-control": "no-cache", **_ids()}
        response = web.StreamResponse(headers=headers)
        begun = False

        def idle() -> bytes:
            return events.idle() if begun else b""

        async with self._beating(request, response, idle):
            try:
                # The pieces of a call come at the end, and the client sees before that the model answers.
                await pending.started()
                begun = True
                await _send(request, response, events.begin())
                async for delta in pending.deltas():
                    await _send(request, response, events.delta(delta))
                reply = await pending.reply()
                data = events.end(reply)
            except ConnectionError:
                raise
            except Exception as error:
                if not response.prepared:
                    raise
                data = events.fail(error if isinstance(error, CallError) else self._failed(error))
            await _send(request, response, data if begun else events.begin() + data)
        await response.write_eof()
        return response

    @asynccontextmanager
    async def _beating(
        self, request: web.BaseRequest, response: web.StreamResponse, idle: Callable[[], bytes]
    ) -> AsyncIterator[None]:
        """Return a context in which the client of a stream that is silent sees that it is alive.

        Args:
            idle: Returns what is sent then. In its place comes an empty line, which means nothing in any
                stream. Some clients cannot read comments.
        """

        async def beat() -> None:
            await asyncio.sleep(_HEADERS_SECONDS)
            writer = await response.prepare(request)
            if writer is not None:
                writer.send_headers()
            while True:
                await asyncio.sleep(_BEAT_SECONDS)
                await _send(request, response, idle() or b"\n")

        task = asyncio.create_task(beat(), name="gateway-beat")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await task

    def _refusal(self, wire: Wire, error: CallError) -> web.Response:
        """Return the answer with an error in the form of a protocol."""
        response = _json(PROTOCOLS[wire].error(error), error.status)
        if error.retry_after is not None or response.status in (429, 503):
            response.headers["retry-after"] = str(math.ceil(error.retry_after or 1.0))
        return response

    def malformed(self, request: web.BaseRequest) -> web.Response:
        """Return the answer to what is no HTTP request."""
        error = CallError("invalid", "the request is malformed, or its head is too large")
        response = self._refusal("chat", error)
        response.force_close()
        return response


class _Connection(web.RequestHandler):
    """One connection, which is cut if no request begins in time."""

    __slots__ = ("_limit", "_server", "ended")

    def __init__(self, server: GatewayServer, manager: web.Server) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_SECONDS,
            tcp_keepalive=False,
            access_log=cast("Any", None),
            logger=log,
            max_line_size=8190,
            max_field_size=8190,
            max_headers=100,
            lingering_time=_LINGER_SECONDS,
            auto_decompress=False,  # A body of a few bytes could be many gigabytes.
        )
        self._server = server
        self._limit: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()
        """Whether the connection has ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request, for a bounded time."""
        super().connection_made(transport)
        self.expect(HEAD_SECONDS)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Note the end."""
        self.expect(None)
        super().connection_lost(exc)
        self.ended.set()

    def expect(self, seconds: float | None) -> None:
        """Cut the connection unless a request has begun within some seconds. With None there is no limit."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if seconds is not None and self.transport is not None:
            self._limit = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP request. Nothing is logged, because programs of the sandbox cause it.

        Raises:
            ConnectionError: An answer has begun, or the client has hung up.
        """
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the connection cannot be continued")
        return self._server.malformed(request)


async def _send(request: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    """Send a part of a stream at once.

    Raises:
        ConnectionError: The client has hung up, or does not read.
    """
    try:
        async with asyncio.timeout(STALL_SECONDS):
            if not response.prepared:
                await response.prepare(request)
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError("the client does not read") from None


def _ids(number: str | None = None) -> dict[str, str]:
    """Return the headers that identify an answer, under the providers' names, and the server."""
    number = number or f"req_{secrets.token_hex(12)}"
    return {"request-id": number, "x-request-id": number, "server": "rollyard"}


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    headers = {"content-type": "application/json", **_ids(body.get("request_id"))}
    return web.Response(body=orjson.dumps(body), status=status, headers=headers)


def _too_large() -> CallError:
    return CallError("too_large", f"the body has more than {MAX_BODY} bytes")


def _parsed(body: bytearray) -> dict[str, Any]:
    """Return the JSON object in a body.

    Raises:
        CallError: There is none, or it has so many values that it would take far more memory than the body.
    """
    if len(body) > _MAX_CONTAINERS and (
        body.count(b"[") + body.count(b"{") > _MAX_CONTAINERS or body.count(b",") > _MAX_VALUES
    ):
        raise CallError("too_large", "the body has too many values")
    try:
        value = orjson.loads(body)  # It refuses more than 1,024 levels.
    except orjson.JSONDecodeError as error:
        raise CallError("invalid", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CallError("invalid", "the body is not a JSON object")
    return value
