"""Answers with results, which are sent in pieces so that only a limited number is in memory at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import msgpack
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollyard_api.core.codec import MSGPACK, dumps, loads
from rollyard_api.storage.rows import EndedGroup, RolloutSize
from rollyard_api.trajectories.packed import ARRAYS

PARQUET: Final = "application/vnd.apache.parquet"
NDJSON: Final = "application/x-ndjson"
Piece = bytes | memoryview
"""Bytes of an answer, or a view of them that is not copied."""
PIECE_BYTES: Final = 256 << 10
"""The size of the pieces passed to the connection. Each waits until the piece before it is taken."""


def media_type(accept: str) -> str:
    """Return the media type of the answer that an Accept header selects."""
    return next((form for form in (ARRAYS, PARQUET, MSGPACK) if form in accept), NDJSON)


def frame(count: int, form: str) -> tuple[bytes, bytes]:
    """Return what comes before the documents of an answer with this many of them, and after the last one."""
    if form in (ARRAYS, MSGPACK):
        return bytes(msgpack.Packer().pack_array_header(count)), b""
    return b"", b"\n"


def encode(lines: Sequence[Piece], form: str) -> bytes:
    """Encode records in the media type `form`. This call blocks, so it belongs in a thread.

    Args:
        lines: The records, as JSON, or for ARRAYS as msgpack in that form.
        form: The media type.
    """
    if form == PARQUET:
        from rollyard_api.trajectories.parquet import encode

        return encode([bytes(line) for line in lines])
    begin, _ = frame(len(lines), form)
    if form == ARRAYS:
        return begin + b"".join(lines)
    if form == MSGPACK:
        return begin + b"".join(bytes(msgpack.packb(loads(line))) for line in lines)
    return b"".join(bytes(line) + b"\n" for line in lines)


def group_beginning(group: EndedGroup, members: int, form: str) -> bytes:
    """Return what comes before the records of a group with this many members.

    Args:
        form: The media type of the answer. The records are msgpack for ARRAYS, and else JSON.
    """
    head: dict[str, Any] = {
        "group_id": group.task_id,
        "task_id": group.task_id,
        "delivered": bool(group.delivered),
        "informative": bool(group.informative),
        "reason": group.reason or "",
    }
    if form != ARRAYS:
        return dumps(head)[:-1] + b',"trajectories":['
    # An empty list ends with its header, which is one byte.
    empty = msgpack.packb(head | {"trajectories": []})
    return bytes(empty[:-1] + msgpack.Packer().pack_array_header(members))


def group_separator(form: str) -> bytes:
    """Return what comes between two records of a group."""
    return b"" if form == ARRAYS else b","


def group_end(form: str) -> bytes:
    """Return what comes after the last record of a group."""
    return b"" if form == ARRAYS else b"]}"


def whole_groups(
    ended: Sequence[tuple[EndedGroup, Sequence[RolloutSize]]], pieces: Sequence[Piece], form: str
) -> list[bytes]:
    """Return the documents of the first groups, as many as have all of their members among `pieces`."""
    documents: list[bytes] = []
    at = 0
    for group, members in ended:
        if at + len(members) > len(pieces):
            break
        body = group_separator(form).join(pieces[at : at + len(members)])
        documents.append(group_beginning(group, len(members), form) + body + group_end(form))
        at += len(members)
    return documents


async def _pieces(data: bytes) -> AsyncIterator[Piece]:
    whole = memoryview(data)
    for at in range(0, len(whole), PIECE_BYTES):
        yield whole[at : at + PIECE_BYTES]


class Delivery(StreamingResponse):
    """An answer that holds its place until it is sent, or until the connection is lost."""

    def __init__(
        self, body: bytes | AsyncIterator[Piece], form: str, headers: Mapping[str, str], stack: AsyncExitStack
    ) -> None:
        if isinstance(body, bytes):
            headers, body = {**headers, "Content-Length": str(len(body))}, _pieces(body)
        super().__init__(body, media_type=form, headers=headers)
        self._held = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)
