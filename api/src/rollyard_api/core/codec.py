"""Encoding, decoding and checking: JSON by orjson, small blobs, and bodies in JSON or msgpack."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgpack
import orjson
from pydantic import BaseModel, ValidationError
from rollyard_crds.fields.json_values import HALF_CHARACTER, lone_surrogate
from rollyard_crds.reading.manifest import describe

from rollyard_api.core.problems import Invalid, Malformed

M = TypeVar("M", bound=BaseModel)

MSGPACK: Final = "application/msgpack"
JSON: Final = "application/json"
_EXPLAINED_BYTES: Final = 1 << 20  # The faulty field of a longer body is not searched for.
_LARGEST: Final = sys.float_info.max
_PLAIN_BYTES: Final = 512
"""The number of bytes below which compression costs more than it saves."""

MAX_PROBLEMS: Final = 20
"""The largest number of wrong fields that an answer names."""
MAX_DEPTH: Final = 128
"""The deepest nesting of lists and objects in a body.

Stored documents add some levels around a body. JSON is written to depth 254.
"""
MAX_KEYS: Final = 1 << 17
"""The largest number of keys of an object in a body. A model describes each key that it does not know, which
takes some microseconds, and no object of a MiB of JSON has more."""
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_PLAIN: Final = _SCALARS | {dict, list}

dumps = orjson.dumps
loads = orjson.loads


def pack(data: bytes) -> bytes:
    """Return the bytes of a JSON object for the database, compressed if that saves space."""
    return data if len(data) < _PLAIN_BYTES else zlib.compress(data, 1)


def unpack(blob: bytes) -> bytes:
    """Return the JSON bytes of a packed blob. JSON objects begin with `{`, and zlib streams never do."""
    return blob if blob[:1] == b"{" else zlib.decompress(blob)


def revision_of(content: Any) -> int:
    """Return a number that stands for this content: a digest, so that every replica computes the same one."""
    digest = hashlib.blake2b(orjson.dumps(content), digest_size=8).digest()
    # Every reader of JSON represents an integer of 53 bits exactly.
    return int.from_bytes(digest) >> 11


def malformed_body(detail: str, errors: Sequence[str] = ()) -> Malformed:
    """Return the error for a body that cannot be decoded, or has what JSON lacks."""
    return Malformed(detail, reason="MalformedBody", errors=errors)


def decode(body: bytes, content_type: str) -> Any:
    """Return the decoded body of a request.

    Raises:
        Malformed: The body is not what its Content-Type says.
        Invalid: A number in msgpack is not finite. JSON has no such numbers, and would store it as null.
    """
    try:
        if not content_type.startswith(MSGPACK):
            # orjson itself stops at depth 1024.
            return orjson.loads(body or b"{}")
        document = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        if problem := _problem(body):
            raise malformed_body(problem, errors=[problem]) from error
        raise malformed_body(f"the body cannot be decoded: {str(error) or type(error).__name__}") from error
    if problem := _not_finite(document):
        raise Invalid(problem, errors=[problem])
    return document


def _problem(body: bytes) -> str:
    """Return the field of a body that JSON or UTF-8 cannot express, and what would be right.

    These are NaN, Infinity, numbers too large for a double, and halves of characters. The result is empty if
    there is no such field, or if the body is not JSON for another reason.
    """
    if len(body) > _EXPLAINED_BYTES:
        return ""
    try:
        document = json.loads(body)  # Python's own parser accepts all of these.
    except (ValueError, RecursionError):
        return ""
    path = lone_surrogate(document)
    if path is not None:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        return f"{''.join(parts).removeprefix('.')[:256]}: {HALF_CHARACTER}"
    return _not_finite(document)


def _not_finite(document: Any) -> str:
    """Return which number of a document is not finite, and what would be right, or "" if all are finite."""
    left: list[tuple[str, Any]] = [("", document)]
    while left:
        name, value = left.pop()
        match value:
            case dict():
                left += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
            case list():
                left += [(f"{name}[{index}]", inner) for index, inner in enumerate(value)]
            case int() | float() if not -_LARGEST <= value <= _LARGEST:
                return f"{name[:256]}: must be a finite number"
    return ""


def check_plain(document: Any) -> None:
    """Check that a decoded body consists of JSON's values and is not too deep to be written again.

    The check proceeds level by level, and no depth can exhaust the stack. Lists of scalars cost almost
    nothing.

    Raises:
        Malformed: Lists and objects nest more than MAX_DEPTH deep, an object has more than MAX_KEYS keys, or
            msgpack contained another kind of value.
    """
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH + 1):
        kinds = set(map(type, level))
        if not kinds <= _PLAIN:
            wrong = ", ".join(sorted(kind.__name__ for kind in kinds - _PLAIN))
            raise malformed_body(f"the body holds what JSON has no value for: {wrong}")
        nested = [value for value in level if type(value) is dict or type(value) is list]
        if not nested:
            return
        level = []
        for value in nested:
            if type(value) is dict:
                if len(value) > MAX_KEYS:
                    raise malformed_body(f"an object of the body has more than {MAX_KEYS} keys")
                if set(map(type, value)) - {str}:
                    raise malformed_body("the body holds an object with a key that is not a string")
                level += value.values()
            elif not set(map(type, value)) <= _SCALARS:
                level += value
    raise malformed_body(f"lists and objects of the body are nested more than {MAX_DEPTH} deep")


def validated(kind: type[M], document: Any, name: str = "", *, strict: bool = False) -> M:
    """Return a body as an instance of its model.

    Args:
        kind: The model.
        document: The decoded body, or a part of it.
        name: The name of the part, which precedes the fields in messages.
        strict: Whether a value of another type is refused even if it could be converted, such as "1" for 1.

    Raises:
        Invalid: A field is wrong; `errors` names each wrong field.
    """
    try:
        return kind.model_validate(document, strict=strict or None)
    except ValidationError as error:
        problems = describe(error, name, whole="body")[:MAX_PROBLEMS]
        raise Invalid.of(*problems) from error


def encode(document: Any, accept: str) -> tuple[bytes, str]:
    """Return a response body and its media type, which is msgpack if `accept` asks for it, and else JSON."""
    data = orjson.dumps(document)
    if MSGPACK in accept:
        return bytes(msgpack.packb(orjson.loads(data))), MSGPACK
    return data, JSON
