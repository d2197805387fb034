"""Times and conditions are written here in the form that Kubernetes uses for those of its objects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def timestamp(seconds: float | None) -> str | None:
    """Return a time, in seconds since the epoch, in the form of RFC 3339 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def merge_conditions(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the new conditions; each keeps its old lastTransitionTime while its status stays the same."""
    old = {c["type"]: c for c in before}
    return [
        c | {"lastTransitionTime": old[c["type"]]["lastTransitionTime"]}
        if c["type"] in old and old[c["type"]]["status"] == c["status"]
        else c
        for c in after
    ]
