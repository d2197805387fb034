"""Groups as one document each, made of their members' records without decoding these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from rollyard_api.core.codec import dumps
from rollyard_api.storage.rows import EndedGroup, RolloutSize
from rollyard_api.trajectories.delivery import Piece
from rollyard_api.trajectories.packed import ARRAYS


def beginning(group: EndedGroup, members: int, form: str) -> bytes:
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
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(head) + 1)
    for name, value in head.items():
        packer.pack(name)
        packer.pack(value)
    packer.pack("trajectories")
    packer.pack_array_header(members)
    return bytes(packer.bytes())


def separator(form: str) -> bytes:
    """Return what comes between two records."""
    return b"" if form == ARRAYS else b","


def end(form: str) -> bytes:
    """Return what comes after the last record."""
    return b"" if form == ARRAYS else b"]}"


def whole(
    found: Sequence[tuple[EndedGroup, Sequence[RolloutSize]]], records: Sequence[Piece], form: str
) -> list[bytes]:
    """Return the documents of the first groups, as many as have all of their members among `records`."""
    groups: list[bytes] = []
    at = 0
    for group, members in found:
        if at + len(members) > len(records):
            break
        body = separator(form).join(records[at : at + len(members)])
        groups.append(beginning(group, len(members), form) + body + end(form))
        at += len(members)
    return groups
