"""Records whose token lists are raw arrays, in msgpack, so that nothing is decoded on the way to a trainer.

A record in this form is the JSON record, but each list of numbers in a segment is a map
`{"dtype": D, "data": B}`. B holds the numbers as a little-endian array of the type D in numpy's notation,
which is the narrowest of `<u1`, `<u2` and `<u4`, or `<f4` and `<f8`, that holds every number exactly.
`policy_versions` is `{"runs": [[version, count], …]}`. A list that fits neither form stays a list.

The object of a part in this form begins with an index, which has HEAD_BYTES bytes. After MAGIC come, for
each record, two little-endian unsigned integers of 64 bits: where the record begins in the NDJSON object,
and where it ends in this object. The rest of the index is filled with zero bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import msgpack

from rollyard_api.core.problems import Unavailable

ARRAYS = "application/vnd.rollyard.arrays+msgpack"
MAGIC: Final = b"rollyard arrays\x01"
MAX_RECORDS: Final = 256
"""The most records of an object in this form. Another value needs another MAGIC."""
HEAD_BYTES: Final = len(MAGIC) + 16 * MAX_RECORDS
_INTEGERS: Final = (("B", "<u1", 1 << 8), ("H", "<u2", 1 << 16), ("I", "<u4", 1 << 32))
_FLOATS: Final = (("f", "<f4"), ("d", "<f8"))


def packed(document: dict[str, Any]) -> bytes:
    """Return a record in this form.

    Args:
        document: The record as `records.document` or a JSON parser gives it. It stays as it is.
    """
    segments = document.get("segments")
    if isinstance(segments, list):
        document = document | {"segments": [_segment(segment) for segment in segments]}
    return bytes(msgpack.packb(document))


def _segment(segment: Any) -> Any:
    if not isinstance(segment, dict):
        return segment
    return {
        name: _runs(value) if name == "policy_versions" else _array(value) for name, value in segment.items()
    }


def _runs(values: Any) -> Any:
    if not isinstance(values, list):
        return values
    return {"runs": [[value, sum(1 for _ in run)] for value, run in groupby(values)]}


def _array(values: Any) -> Any:
    """Return a list of numbers as an array that is equal to it, number by number, or else the list itself."""
    if not isinstance(values, list):
        return values
    kinds = set(map(type, values))
    found: tuple[str, array[int] | array[float]] | None
    if kinds <= {int}:
        found = _integers(values)
    elif kinds <= {int, float}:
        found = _floats(values)
    else:
        return values
    if found is None:
        return values
    dtype, made = found
    if sys.byteorder == "big":
        made.byteswap()
    return {"dtype": dtype, "data": made.tobytes()}


def _integers(values: list[int]) -> tuple[str, array[int]] | None:
    least, largest = min(values, default=0), max(values, default=0)
    for code, dtype, end in _INTEGERS:
        if least >= 0 and largest < end:
            return dtype, array(code, values)
    return None


def _floats(values: list[float]) -> tuple[str, array[float]] | None:
    # A log-probability that a server computed in float32 fits into half of the bytes.
    for code, dtype in _FLOATS:
        made = array(code, values)
        if made.tolist() == values:
            return dtype, made
    return None


def joined(lines: Sequence[bytes], records: Sequence[bytes]) -> bytes:
    """Return the object of a part.

    Args:
        lines: The records in the NDJSON object, each with its newline.
        records: The same records in this form, at most MAX_RECORDS.
    """
    index = array("Q")
    at, end = 0, HEAD_BYTES
    for line, record in zip(lines, records, strict=True):
        end += len(record)
        index.extend((at, end))
        at += len(line)
    if sys.byteorder == "big":
        index.byteswap()
    return b"".join([(MAGIC + index.tobytes()).ljust(HEAD_BYTES, b"\0"), *records])


def places(head: bytes, path: str) -> dict[int, tuple[int, int]]:
    """Return where each record begins and ends in the object, by where it begins in the NDJSON object.

    Args:
        head: The first HEAD_BYTES bytes of the object.
        path: The object, for the message of an error.

    Raises:
        Unavailable: It is no index.
    """
    index = array("Q")
    index.frombytes(head[len(MAGIC) :])
    if sys.byteorder == "big":
        index.byteswap()
    found: dict[int, tuple[int, int]] = {}
    begin = HEAD_BYTES
    for place, end in zip(index[::2], index[1::2], strict=True):
        if end == 0:
            break
        found[place] = (begin, end)
        begin = end
    if not head.startswith(MAGIC) or any(begin >= end for begin, end in found.values()):
        raise Unavailable(f"the trajectory store's {path} has no index: it was changed")
    return found
