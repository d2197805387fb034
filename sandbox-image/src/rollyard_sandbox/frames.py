"""The frames in which client and server communicate.

A frame is an 8-byte prefix (header length, body length; unsigned 32-bit, big-endian), a JSON object (the
header, UTF-8) and a binary body. Sizes are checked before anything is stored.
"""

from __future__ import annotations

import json
from struct import Struct

from rollyard_sandbox.errors import CommandTooLarge, ProtocolError

TYPE_CHECKING = False  # `typing` is slow to import, and the server must start fast.
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

PROTOCOL_VERSION: Final = 1
MAX_HEADER: Final = 256 * 1024  # bytes
MAX_BODY: Final = 64 * 1024 * 1024  # bytes
MAX_TREE: Final = 50_000
"""The number of entries in one listing of a work folder."""
MAX_LISTING: Final = 8 << 20
"""The bytes of one listing."""
MAX_DIGESTED: Final = 32 << 20
"""The bytes that one request for digests may cover."""
TUNNEL_READY: Final = b"+"
"""What the worker sends when it listens to its tunnel, and what the server sends when a program uses it."""

_PREFIX: Final = Struct("!II")
_dumps = json.JSONEncoder(separators=(",", ":")).encode
_loads = json.JSONDecoder().decode


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one frame.

    Raises:
        CommandTooLarge: The header or the body exceeds MAX_HEADER or MAX_BODY.
    """
    head = _dumps(header).encode()
    if len(head) > MAX_HEADER:
        raise CommandTooLarge(f"header of {len(head)} bytes; at most {MAX_HEADER} are allowed")
    if len(body) > MAX_BODY:
        raise CommandTooLarge(f"body of {len(body)} bytes; at most {MAX_BODY} are allowed")
    return _PREFIX.pack(len(head), len(body)) + head + body


class FrameReader:
    """A reader that cuts a byte stream into frames, and holds at most one unfinished frame."""

    __slots__ = ("_buffer", "_max_body")

    def __init__(self, max_body: int = MAX_BODY) -> None:
        self._buffer = bytearray()
        self._max_body = max_body

    def allow_body(self, max_body: int) -> None:
        """Set the largest body accepted from now on. It is small for a peer that has not shown its token."""
        self._max_body = max_body

    @property
    def unfinished(self) -> bool:
        """Whether a part of a frame has been read."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the frames that `data` completes.

        Raises:
            ProtocolError: A frame is too large, or its header is not a JSON object.
        """
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 8:
            head_size, body_size = _PREFIX.unpack_from(buffer)
            if head_size > MAX_HEADER or body_size > self._max_body:
                raise ProtocolError(f"frame of {head_size} + {body_size} bytes is larger than allowed")
            end = 8 + head_size + body_size
            if len(buffer) < end:
                return
            try:
                header = _loads(buffer[8 : 8 + head_size].decode())
            except ValueError as error:
                raise ProtocolError(f"frame header is not JSON: {error}") from None
            if not isinstance(header, dict):
                raise ProtocolError("frame header is not a JSON object")
            body = bytes(buffer[8 + head_size : end]) if body_size else b""
            del buffer[:end]
            yield header, body
