"""Times and conditions are written here in the form that Kubernetes uses for those of its objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any


def timestamp(seconds: float | None) -> str | None:
    """Return a time, in seconds since the epoch, in the form of RFC 3339 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def merge_status(
    before: Mapping[str, Any], reported: Mapping[str, Any], fields: Collection[str]
) -> dict[str, Any]:
    """Return these fields of a reported status, with `conditions`, which may be empty.

    Each condition keeps its old lastTransitionTime while its status stays the same.
    """
    old = {c["type"]: c for c in before.get("conditions", [])}
    conditions = [
        c | {"lastTransitionTime": old[c["type"]]["lastTransitionTime"]}
        if c["type"] in old and old[c["type"]]["status"] == c["status"]
        else c
        for c in reported.get("conditions", [])
    ]
    return {k: reported[k] for k in fields if k in reported} | {"conditions": conditions}
