"""Records whose token lists are raw arrays, in msgpack, so that nothing is decoded on the way to a trainer.

A record in this form is the JSON record, but each list of numbers in a segment is a map
`{"dtype": D, "data": B}`, and `policy_versions` is `{"runs": [[version, count], …]}`, as
`rollyard_crds.token_arrays` makes them. The segments of a rollout that has not ended are also kept in this
form.

The object of a part in this form begins with an index, which has HEAD_BYTES bytes. After MAGIC come, for
each record, two little-endian unsigned integers of 64 bits: where the record begins in the NDJSON object,
and where it ends in this object. The rest of the index is filled with zero bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgpack
from rollyard_crds.token_arrays import PackedSegment

from rollyard_api.core.problems import Unavailable

ARRAYS: Final = "application/vnd.rollyard.arrays+msgpack"
MAGIC: Final = b"rollyard arrays\x01"
MAX_RECORDS: Final = 256
"""The most records of an object in this form. Another value needs another MAGIC."""
HEAD_BYTES: Final = len(MAGIC) + 16 * MAX_RECORDS


def of_segments(segments: Iterable[PackedSegment]) -> bytes:
    """Return segments in this form, as they are stored."""
    return bytes(msgpack.packb([segment.model_dump() for segment in segments]))


def segments_of(stored: bytes | None) -> list[PackedSegment]:
    """Return stored segments, which were checked when they arrived; none if there are none."""
    return [] if stored is None else [PackedSegment.unchecked(segment) for segment in msgpack.unpackb(stored)]


def json_of(stored: bytes) -> bytes:
    """Return stored segments as a JSON array, in the form in which workers send them and get them again."""
    return b"[" + b",".join(segment.model_dump_json().encode() for segment in segments_of(stored)) + b"]"


def packed(head: dict[str, Any], stored: bytes | None) -> bytes:
    """Return a record in this form.

    Args:
        head: The record without its segments.
        stored: The segments as they are stored, or None if there are none.
    """
    return bytes(msgpack.packb(head | {"segments": [] if stored is None else msgpack.unpackb(stored)}))


def repacked(document: dict[str, Any]) -> bytes:
    """Return a record that was JSON in this form."""
    segments = of_segments(PackedSegment.of(**segment) for segment in document["segments"])
    return packed(document, segments)


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
        Unavailable: It is not an index.
    """
    index = array("Q")
    index.frombytes(head[len(MAGIC) :])
    if sys.byteorder == "big":
        index.byteswap()
    ranges: dict[int, tuple[int, int]] = {}
    begin = HEAD_BYTES
    for position, end in zip(index[::2], index[1::2], strict=True):
        if end == 0:
            break
        ranges[position] = (begin, end)
        begin = end
    if not head.startswith(MAGIC) or any(begin >= end for begin, end in ranges.values()):
        raise Unavailable(f"the trajectory store's {path} has no index: it was changed")
    return ranges
