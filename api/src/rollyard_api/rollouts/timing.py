"""The timings of a rollout accumulate over stages and attempts and are kept as JSON in its row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard_api.core.codec import dumps, loads

_STAGE = ("queued_seconds", "active_seconds", "attempts")
_WORKER = ("model_seconds", "tool_seconds", "own_seconds")


def add(
    timings: str,
    stage: str,
    *,
    queued: float = 0.0,
    active: float = 0.0,
    attempts: int = 0,
    worker: Mapping[str, Any] | None = None,
) -> str:
    """Return the timings with seconds and attempts added to those of one stage.

    The times that the worker measured (StageTimes) are given as `worker` and are added to the rollout's own.
    """
    document = loads(timings)
    entry = document.setdefault(stage, dict.fromkeys(_STAGE, 0))
    entry["queued_seconds"] = round(entry["queued_seconds"] + queued, 6)
    entry["active_seconds"] = round(entry["active_seconds"] + active, 6)
    entry["attempts"] += attempts
    for name in _WORKER if worker else ():
        seconds = (worker or {}).get(name, 0.0)
        if seconds:
            document[name] = round(document.get(name, 0.0) + seconds, 6)
    return dumps(document).decode()


def tries(timings: str, stage: str) -> int:
    """Return how many leases of one stage the rollout has had, those that are not counted as attempts too."""
    count: int = loads(timings).get(stage, {}).get("attempts", 0)
    return count
