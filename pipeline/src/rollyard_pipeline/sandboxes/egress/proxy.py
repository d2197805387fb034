"""The proxy for one sandbox: CONNECT for TLS, and requests with absolute URLs for plain HTTP.

CONNECT must be followed by TLS to the same name, and each plain request has a connection of its own, so what
was checked is what is connected to. TLS is not intercepted. Hence the proxy cannot see which host a request
inside of TLS names, nor what it sends.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from rollyard_crds.fields.allowed_hosts import HostRule, host_name

from rollyard_pipeline.sandboxes.egress.destinations import Destinations
from rollyard_pipeline.sandboxes.egress.limits import SPENT, EgressLimits, EgressRefused, Meter

_CHUNK: Final = 64 * 1024
_ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
_REASONS: Final = {
    400: "Bad Request",
    403: "Forbidden",
    411: "Length Required",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
    503: "Service Unavailable",
}
MAX_HELLO: Final = 16 * 1024  # bytes
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_ENCRYPTED_HELLO: Final = 0xFE0D
_MAX_RECORD: Final = 1 << 14  # bytes
_MAX_RECORDS: Final = 16
MAX_HEAD: Final = 32 * 1024  # bytes
_MAX_FIELDS: Final = 128
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIELD: Final = re.compile(rf"({_TOKEN}):([^\x00-\x08\x0a-\x1f\x7f]*+)")
_LINE: Final = re.compile(rf"({_TOKEN}) ([!-~]+) HTTP/1\.[01]")
_AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]@/?#]+):([0-9]{1,5})")
_OF_THIS_CONNECTION: Final = frozenset(
    {
        "connection",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class Stream(NamedTuple):
    """Both directions of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


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

    async def serve(self, program: Stream) -> None:
        """Serve one connection to its end. It does not raise what either end of it causes."""
        try:
            async with asyncio.timeout(self._limits.connection_seconds):
                await self._serve(program)
        except* (OSError, EOFError, TimeoutError, EgressRefused) as errors:
            if errors.subgroup(EgressRefused) is not None:
                self._meter.note(f"the limit of {self._limits.total_bytes} bytes is reached")

    async def _serve(self, program: Stream) -> None:
        try:
            async with asyncio.timeout(self._limits.head_seconds):
                request = parse_head(await _head(program.reader))
        except EgressRefused as error:
            self._meter.note(error.detail)
            await _answer(program.writer, error.status, str(error))
            return
        where = f"{request.shown}:{request.port}"
        if self._meter.spent:
            await _answer(program.writer, 503, SPENT)
            return
        try:
            addresses = await self._destinations.addresses(request.host, request.port, self._rules)
            server = await self._connected([str(address) for address in addresses], request.port)
        except EgressRefused as error:
            if error.detail:
                self._meter.note(error.detail if where in error.detail else f"{where}: {error.detail}")
            await _answer(program.writer, error.status, str(error))
            return
        except OSError:
            await _answer(program.writer, 502, f"{where} cannot be reached")
            return
        try:
            first = await self._greeted(request, program) if request.connects else request.forwarded
            if first:
                self._meter.count(len(first))
                server.writer.write(first)
                await self._both(program, server, None if request.connects else request.length)
        finally:
            server.writer.transport.abort()

    async def _connected(self, addresses: Sequence[str], port: int) -> Stream:
        """Connect to the first address that answers. Nothing is resolved here.

        Raises:
            OSError: None of them answers in time.
        """
        problem: Exception = OSError("no address")
        async with asyncio.timeout(self._limits.connect_seconds):
            for address in addresses:
                try:
                    return Stream(*await asyncio.open_connection(address, port, limit=_CHUNK))
                except OSError as error:
                    problem = error
        raise problem

    async def _greeted(self, request: RequestHead, program: Stream) -> bytes:
        """Answer CONNECT, and return the ClientHello that follows. It is empty if that is not taken."""
        program.writer.write(_ESTABLISHED)
        await program.writer.drain()
        try:
            async with asyncio.timeout(self._limits.head_seconds):
                return await _hello(program.reader, request)
        except EgressRefused as error:
            self._meter.note(f"{request.shown}:{request.port}: {error}")
            return b""

    async def _both(self, program: Stream, server: Stream, length: int | None) -> None:
        """Move bytes in both directions until both have ended.

        Args:
            length: The number of bytes that the program may send. With None it is not limited.
        """
        async with asyncio.timeout(self._limits.idle_seconds) as idle, asyncio.TaskGroup() as group:
            upload = group.create_task(self._move(program.reader, server.writer, idle, length))
            await self._move(server.reader, program.writer, idle, None)
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
        EgressRefused: The head is too long.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        head = b" " * (MAX_HEAD + 1)
    if len(head) > MAX_HEAD:
        raise EgressRefused(f"the head of the request has more than {MAX_HEAD} bytes", status=431)
    return head


async def _hello(reader: asyncio.StreamReader, request: RequestHead) -> bytes:
    """Read the ClientHello, and check that it names the host of the request.

    Raises:
        EgressRefused: It does not, or there is none.
        EOFError, OSError: The connection ends before that.
    """
    data = b""
    while (name := server_name(data)) is None:
        more = await reader.read(4096)
        if not more:
            raise EOFError
        data += more
    if name.lower().removesuffix(".") != request.host:
        raise _not_tls(f"CONNECT is followed by TLS to another name, {name[:100]!r}")
    return data


async def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = f"rollyard: {text}\n".encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()


class _HelloFields:
    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise _not_tls("the ClientHello is malformed")
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def block(self, size: int) -> bytes:
        return self.take(self.number(size))

    @property
    def left(self) -> bool:
        return self._at < len(self._data)


def _not_tls(text: str) -> EgressRefused:
    return EgressRefused(text, "NotTls")


def server_name(data: bytes) -> str | None:
    """Return the server name of the ClientHello with which `data` begins, or None if more bytes are needed.

    See RFC 8446 section 4.1.2, and RFC 6066 section 3.

    Raises:
        EgressRefused: The bytes are not a ClientHello, or one that is too long, that names no server, or that
            hides the name (encrypted client hello).
    """
    message, rest = bytearray(), memoryview(data)
    for _ in range(_MAX_RECORDS):
        if len(rest) and rest[0] != _HANDSHAKE:
            raise _not_tls("the connection does not begin with TLS")
        if len(rest) < 5:
            return None
        length = int.from_bytes(rest[3:5])
        if rest[1] != 3 or not 0 < length <= _MAX_RECORD:
            raise _not_tls("the connection does not begin with TLS")
        message += rest[5 : 5 + length]
        if message and message[0] != _CLIENT_HELLO:
            raise _not_tls("the connection does not begin with a ClientHello")
        if len(message) >= 4:
            size = 4 + int.from_bytes(message[1:4])
            if size > MAX_HELLO:
                raise _not_tls(f"the ClientHello has more than {MAX_HELLO} bytes")
            if len(message) >= size:
                return _name_in(bytes(message[4:size]))
        if len(rest) < 5 + length:
            return None
        rest = rest[5 + length :]
    raise _not_tls(f"the ClientHello is in more than {_MAX_RECORDS} records")


def _name_in(body: bytes) -> str:
    try:
        fields = _HelloFields(body)
        fields.take(2 + 32)  # version and random
        fields.block(1)  # session id
        fields.block(2)  # cipher suites
        fields.block(1)  # compression methods
        extensions = _HelloFields(fields.block(2)) if fields.left else _HelloFields(b"")
        contents: list[bytes] = []
        while extensions.left:
            kind, content = extensions.number(2), extensions.block(2)
            if kind == _ENCRYPTED_HELLO:
                raise _not_tls("the ClientHello hides its server name (encrypted client hello)")
            if kind == _SERVER_NAME:
                contents.append(content)
        if len(contents) != 1:
            raise _not_tls("the ClientHello names no server, or more than one")
        names = _HelloFields(_HelloFields(contents[0]).block(2))
        kind, name = names.number(1), names.block(2)
        if kind != 0 or names.left:
            raise _not_tls("the ClientHello names no server, or more than one")
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise _not_tls("the ClientHello is malformed") from None


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request, as the proxy understands it."""

    host: str | None
    """The DNS name in the form in which rules compare it, or None if it is an address or no name."""
    shown: str
    """The host as the request wrote it."""
    port: int
    forwarded: bytes
    """The head that is sent to the server. It is empty for CONNECT."""
    length: int = 0
    """The number of bytes of the body."""

    @property
    def connects(self) -> bool:
        """Whether the method is CONNECT."""
        return not self.forwarded


def parse_head(data: bytes) -> RequestHead:
    """Return the request whose head, with the empty line at its end, is `data`.

    It is CONNECT, or a request with an absolute URL (RFC 9112).

    Raises:
        EgressRefused: It is malformed, could be read in several ways, or is of a kind that is not taken.
    """
    first, *lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    request_line = _LINE.fullmatch(first)
    if request_line is None:
        raise EgressRefused("the request line is malformed")
    if len(lines) > _MAX_FIELDS:
        raise EgressRefused(f"the request has more than {_MAX_FIELDS} fields", status=431)
    fields = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise EgressRefused("a field of the request is malformed")
        fields.append((field[1], field[2].strip(" \t")))
    method, target = request_line[1], request_line[2]
    if method == "CONNECT":
        authority = _AUTHORITY.fullmatch(target)
        if authority is None:
            raise EgressRefused("CONNECT needs HOST:PORT")
        return RequestHead(host_name(authority[1]), authority[1], _port(authority[2]), b"")
    return _forwarded(method, target, fields)


def _forwarded(method: str, target: str, fields: list[tuple[str, str]]) -> RequestHead:
    scheme, separator, _ = target.partition("://")
    if not separator or scheme.lower() != "http":
        raise EgressRefused("this is a proxy: it takes CONNECT HOST:PORT, and requests for http:// URLs")
    try:
        parts = urlsplit(target)
        shown = parts.hostname or ""
        port = _port(str(parts.port)) if parts.port is not None else 80
    except ValueError as error:
        raise EgressRefused("the URL is malformed") from error
    if "@" in parts.netloc or "#" in target or "\\" in target or not shown:
        raise EgressRefused("the URL must have a host, and neither credentials nor a fragment")
    named = {name.lower() for name, _ in fields}
    if "transfer-encoding" in named:
        words = "a request through the proxy needs Content-Length in the place of chunks"
        raise EgressRefused(words, status=411)
    lengths = [value for name, value in fields if name.lower() == "content-length"]
    if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,15}", value) for value in lengths):
        raise EgressRefused("Content-Length is malformed")
    dropped = _OF_THIS_CONNECTION | {
        token.strip().lower()
        for name, value in fields
        if name.lower() == "connection"
        for token in value.split(",")
    }
    dropped -= {"content-length"}
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = [
        f"{method} {path} HTTP/1.1",
        f"Host: {shown}" + ("" if port == 80 else f":{port}"),
        *(f"{name}: {value}" for name, value in fields if name.lower() not in dropped),
        "Connection: close",
    ]
    return RequestHead(
        host_name(shown),
        shown,
        port,
        "\r\n".join([*head, "", ""]).encode("latin-1"),
        int(lengths[0]) if lengths else 0,
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 < port < 65_536:
        raise EgressRefused("a port is a number from 1 to 65535")
    return port
