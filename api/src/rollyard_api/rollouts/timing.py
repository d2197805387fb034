"""The timings of a rollout accumulate over stages and attempts and are kept as JSON in its row.

Beside the sums, which become part of its record, the row keeps what only pages show: when the rollout entered
each state, and what a Run counted. `trajectories.traces` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollyard_api.core.codec import dumps, loads
from rollyard_api.machine.states import RolloutState
from rollyard_api.trajectories import traces

_STAGE = ("queued_seconds", "active_seconds", "attempts")
_WORKER = ("model_seconds", "tool_seconds", "own_seconds")


@dataclass(frozen=True, slots=True)
class Step:
    """A change of a rollout's state, with the times in seconds at which it entered both states."""

    before: RolloutState
    since: float
    after: RolloutState
    now: float


def add(
    timings: str,
    stage: str,
    *,
    queued: float = 0.0,
    active: float = 0.0,
    attempts: int = 0,
    worker: Mapping[str, Any] | None = None,
    step: Step | None = None,
    counted: Mapping[str, Any] | None = None,
) -> str:
    """Return the timings with seconds and attempts added to those of one stage.

    The times that the worker measured (StageTimes) are given as `worker` and are added to the rollout's own.
    `step` is the change of state that they belong to, or None if the rollout ends, and `counted` is what a
    Run counted (see `traces.counts_of`).
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
    if step is not None:
        traces.note(document, step.before, step.since, step.after, step.now)
    if counted:
        traces.count(document, counted)
    return dumps(document).decode()


def tries(timings: str, stage: str) -> int:
    """Return how many leases of one stage the rollout has had, those that are not counted as attempts too."""
    count: int = loads(timings).get(stage, {}).get("attempts", 0)
    return count
