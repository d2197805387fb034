"""The server name in the first message of a TLS connection (RFC 8446 section 4.1.2, RFC 6066 section 3)."""

from __future__ import annotations

from typing import Final

from rollyard_pipeline.errors import WorkerError

MAX_HELLO: Final = 16 * 1024  # bytes
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
_MAX_RECORD = 1 << 14
_MAX_RECORDS = 16


class NotTls(WorkerError):
    """The bytes are no ClientHello that is taken. The message says why."""

    reason = "NotTls"


class _Cut(WorkerError):
    """A field ends before its length."""


class _Fields:
    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise _Cut
        found = self._data[self._at : self._at + count]
        self._at += count
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def block(self, size: int) -> bytes:
        return self.take(self.number(size))

    @property
    def left(self) -> bool:
        return self._at < len(self._data)


def server_name(data: bytes) -> str | None:
    """Return the server name of the ClientHello with which `data` begins, or None if more bytes are needed.

    Raises:
        NotTls: The bytes are no ClientHello, or one that is too long, that names no server, or that hides
            the name (encrypted client hello).
    """
    message, rest = bytearray(), memoryview(data)
    for _ in range(_MAX_RECORDS):
        if len(rest) and rest[0] != _HANDSHAKE:
            raise NotTls("the connection does not begin with TLS")
        if len(rest) < 5:
            return None
        length = int.from_bytes(rest[3:5])
        if rest[1] != 3 or not 0 < length <= _MAX_RECORD:
            raise NotTls("the connection does not begin with TLS")
        message += rest[5 : 5 + length]
        if message and message[0] != _CLIENT_HELLO:
            raise NotTls("the connection does not begin with a ClientHello")
        if len(message) >= 4:
            size = 4 + int.from_bytes(message[1:4])
            if size > MAX_HELLO:
                raise NotTls(f"the ClientHello has more than {MAX_HELLO} bytes")
            if len(message) >= size:
                return _name(bytes(message[4:size]))
        if len(rest) < 5 + length:
            return None
        rest = rest[5 + length :]
    raise NotTls(f"the ClientHello is in more than {_MAX_RECORDS} records")


def _name(body: bytes) -> str:
    try:
        fields = _Fields(body)
        fields.take(2 + 32)  # version and random
        fields.block(1)  # session id
        fields.block(2)  # cipher suites
        fields.block(1)  # compression methods
        extensions = _Fields(fields.block(2)) if fields.left else _Fields(b"")
        found: list[bytes] = []
        while extensions.left:
            kind, content = extensions.number(2), extensions.block(2)
            if kind == _ENCRYPTED_HELLO:
                raise NotTls("the ClientHello hides its server name (encrypted client hello)")
            if kind == _SERVER_NAME:
                found.append(content)
        if len(found) != 1:
            raise NotTls("the ClientHello names no server, or more than one")
        names = _Fields(_Fields(found[0]).block(2))
        kind, name = names.number(1), names.block(2)
        if kind != 0 or names.left:
            raise NotTls("the ClientHello names no server, or more than one")
        return name.decode("ascii")
    except (_Cut, UnicodeDecodeError):
        raise NotTls("the ClientHello is malformed") from None
