"""Where records lie in the trajectory store: the objects of a part, and the ranges of bytes in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard_api.storage.rows import EndedRollout


def part_path(namespace: str, job: str, uid: str, number: int) -> str:
    """Return a part's path in the store; each job has a folder, with its uid to distinguish namesakes."""
    return f"{namespace}/{job}-{uid[:8]}/part-{number:06d}.ndjson"


def arrays_path(path: str) -> str:
    """Return the path of the object with raw arrays that belongs to the part at `path`."""
    return f"{path.removesuffix('.ndjson')}.arrays"


@dataclass(frozen=True, slots=True)
class PartRange:
    """Consecutive bytes of one part."""

    path: str
    start: int
    lengths: list[int]


def ranges_of(rows: Sequence[EndedRollout], namespace: str, job: str, uid: str) -> list[PartRange]:
    """Return the byte ranges of the records. Neighbours in a part are read together."""
    ranges: list[PartRange] = []
    end: tuple[int, int] | None = None
    for row in rows:
        assert row.part is not None
        assert row.part_offset is not None
        assert row.part_length is not None
        if end != (row.part, row.part_offset):
            ranges.append(PartRange(part_path(namespace, job, uid, row.part), row.part_offset, []))
        ranges[-1].lengths.append(row.part_length)
        end = (row.part, row.part_offset + row.part_length)
    return ranges
