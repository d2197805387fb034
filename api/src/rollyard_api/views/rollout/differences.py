"""Where two rollouts of one group part ways: their first differing token."""

from __future__ import annotations

from typing import Any, Final

from rollyard_api.views.rollout.records import CompactRecord

AROUND: Final = 20
"""The number of tokens that are shown before and after the place."""


def difference(left: CompactRecord, right: CompactRecord) -> dict[str, Any]:
    """Return {segment, position, left, right}, where each side has `ids` from `start` on.

    `position` counts from the segment's first prompt token. It is None if the tokens are equal, or those of
    one rollout are the beginning of the other's in their last common segment.
    """
    number = position = None
    for place, (one, other) in enumerate(zip(left.segments, right.segments, strict=False)):
        number = place
        length = min(one.total, other.total)
        if one.ids[:length] != other.ids[:length]:
            position = _first(one.ids, other.ids, length)
            break
        if one.total != other.total:
            # One of them is longer, so no later segment can be compared.
            break
    return {
        "segment": number,
        "position": position,
        "left": _side(left, number, position),
        "right": _side(right, number, position),
    }


def _first(one: Any, other: Any, length: int) -> int:
    """Return the first place at which two arrays differ, which is below `length`."""
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _side(record: CompactRecord, number: int | None, position: int | None) -> dict[str, Any]:
    if number is None:
        return {"start": 0, "ids": [], "total": 0}
    segment = record.segments[number]
    at = segment.total if position is None else position
    start = max(0, at - AROUND)
    return {"start": start, "ids": segment.ids[start : at + AROUND].tolist(), "total": segment.total}
