"""Bytes in and out: JSON by orjson, small blobs compressed, bodies in JSON or msgpack."""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

import msgpack
import orjson

from rollyard_api.core.problems import Malformed

MSGPACK = "application/msgpack"
JSON = "application/json"
_EXPLAINED_BYTES = 1 << 20  # of a body that cannot be decoded: above it nobody looks for the field
_LARGEST = sys.float_info.max
_PLAIN_BYTES = 512
"""Below this, compression costs more than it saves."""

MAX_DEPTH = 128
"""The deepest nesting of lists and objects in a body.

What is stored gets some more around it; JSON is written to depth 254.
"""
_SCALARS = frozenset({str, int, float, bool, type(None)})
_PLAIN = _SCALARS | {dict, list}

dumps = orjson.dumps
loads = orjson.loads


def pack(data: bytes) -> bytes:
    """A JSON object's bytes for the database: compressed when that pays."""
    return data if len(data) < _PLAIN_BYTES else zlib.compress(data, 1)


def unpack(blob: bytes) -> bytes:
    """The JSON bytes of a packed blob. JSON objects begin with `{`, zlib streams never do."""
    return blob if blob[:1] == b"{" else zlib.decompress(blob)


def decode(body: bytes, content_type: str) -> Any:
    """A request body.

    Raises:
        Malformed: it is not what its Content-Type says.
    """
    try:
        if content_type.startswith(MSGPACK):
            return msgpack.unpackb(body)
        # orjson itself stops at depth 1024.
        return orjson.loads(body or b"{}")
    except (ValueError, msgpack.UnpackException) as error:
        if where := _not_finite(body):
            raise Malformed(f"{where}: must be a finite number", errors=[f"{where}: not finite"]) from error
        raise Malformed(f"the body cannot be decoded: {str(error) or type(error).__name__}") from error


def _not_finite(body: bytes) -> str:
    """The field of a body that holds NaN, Infinity or a number too large for a double, where JSON has none.

    Empty where there is no such field, or the body is no JSON for another reason.
    """
    if len(body) > _EXPLAINED_BYTES:
        return ""
    try:
        document = json.loads(body)  # Python's own parser takes all of them
    except (ValueError, RecursionError):
        return ""
    left: list[tuple[str, Any]] = [("", document)]
    while left:
        name, value = left.pop()
        match value:
            case dict():
                left += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
            case list():
                left += [(f"{name}[{place}]", inner) for place, inner in enumerate(value)]
            case int() | float() if not -_LARGEST <= value <= _LARGEST:
                return name[:256]
    return ""


def check_plain(document: Any) -> None:
    """See that a decoded body is made of JSON's values and not too deep to be written again.

    Goes level by level, so that no depth exhausts the stack; lists of scalars cost next to nothing.

    Raises:
        Malformed: lists and objects nest more than MAX_DEPTH deep, or msgpack brought another kind of value.
    """
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH + 1):
        kinds = set(map(type, level))
        if not kinds <= _PLAIN:
            wrong = ", ".join(sorted(kind.__name__ for kind in kinds - _PLAIN))
            raise Malformed(f"the body holds what JSON has no value for: {wrong}")
        nested = [value for value in level if type(value) is dict or type(value) is list]
        if not nested:
            return
        level = []
        for value in nested:
            if type(value) is dict:
                if set(map(type, value)) - {str}:
                    raise Malformed("the body holds an object with a key that is no string")
                level += value.values()
            elif not set(map(type, value)) <= _SCALARS:
                level += value
    raise Malformed(f"lists and objects of the body are nested more than {MAX_DEPTH} deep")


def encode(document: Any, accept: str) -> tuple[bytes, str]:
    """A response body and its media type: msgpack where that is asked for, else JSON."""
    data = orjson.dumps(document)
    if MSGPACK in accept:
        return bytes(msgpack.packb(orjson.loads(data))), MSGPACK
    return data, JSON
