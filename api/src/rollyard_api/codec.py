"""Bytes in and out: JSON by orjson, small blobs compressed, bodies in JSON or msgpack."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import orjson

from rollyard_api.problems import Malformed

MSGPACK = "application/msgpack"
JSON = "application/json"
_PLAIN_BYTES = 512
"""Below this, compression costs more than it saves."""

dumps = orjson.dumps
loads = orjson.loads


def pack(data: bytes) -> bytes:
    """A JSON object's bytes for the database: compressed when that pays."""
    return data if len(data) < _PLAIN_BYTES else zlib.compress(data, 1)


def unpack(blob: bytes) -> bytes:
    """The JSON bytes of a packed blob. JSON objects begin with `{`, zlib streams never do."""
    return blob if blob[:1] == b"{" else zlib.decompress(blob)


def fragment(blob: bytes) -> orjson.Fragment:
    """A packed blob, to be embedded in a response without being parsed."""
    return orjson.Fragment(unpack(blob))


def decode(body: bytes, content_type: str) -> Any:
    """A request body.

    Raises:
        Malformed: it is not what its Content-Type says.
    """
    try:
        if content_type.startswith(MSGPACK):
            return msgpack.unpackb(body)
        return orjson.loads(body or b"{}")
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"the body cannot be decoded: {error}") from error


def encode(document: Any, accept: str) -> tuple[bytes, str]:
    """A response body and its media type: msgpack where that is asked for, else JSON."""
    data = orjson.dumps(document)
    if MSGPACK in accept:
        return bytes(msgpack.packb(orjson.loads(data))), MSGPACK
    return data, JSON
