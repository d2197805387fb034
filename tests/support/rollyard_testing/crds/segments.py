"""Token lists in the forms in which workers send them and the control plane keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import Segment


def packed(*segments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return segments of a record as a worker sends them."""
    return [PackedSegment.of(**segment).model_dump(mode="json") for segment in segments]


def lists(segments: Sequence[PackedSegment]) -> list[Segment]:
    """Return the token lists of packed segments."""
    return [segment.lists() for segment in segments]


def reported(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as a worker sends it: the segments that its trajectory has go beside it, packed."""
    trajectory = result.get("trajectory")
    if not isinstance(trajectory, Mapping) or "segments" not in trajectory:
        return dict(result)
    kept = {name: value for name, value in trajectory.items() if name != "segments"}
    return {**result, "trajectory": kept, "segments": packed(*trajectory["segments"])}


def kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without its segments, as it is kept beside them."""
    sizes = [PackedSegment.of(**segment).sizes.model_dump() for segment in record["segments"]]
    return {name: value for name, value in record.items() if name != "segments"} | {"segment_sizes": sizes}
