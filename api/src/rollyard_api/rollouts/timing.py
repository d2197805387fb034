"""The timings of a rollout accumulate over stages and attempts and are kept as JSON in its row.

Beside the sums, which become part of its record, the row keeps what only pages show: when the rollout entered
each state, and what a Run counted. `trajectories.traces` reads it.
"""

from __future__ import annotations

from typing import Any, Final

from rollyard_crds.rolloutjob import STAGES

from rollyard_api.machine.events import Failed, InitDone, Leased, RunDone, Scored
from rollyard_api.machine.rollout import Rollout, Transition
from rollyard_api.trajectories import traces

_STAGE: Final = ("queued_seconds", "active_seconds", "attempts")
_WORKER: Final = ("model_seconds", "tool_seconds", "own_seconds")


def add(timings: dict[str, Any], rollout: Rollout, transition: Transition, now: float) -> None:
    """Add the time in the state that a rollout leaves to its decoded timings.

    The times that the worker measured and what a Run counted are added, too. Every lease of a stage is one of
    its attempts here, counted as one or not.
    """
    event, before = transition.event, rollout.state
    entry = timings.setdefault(rollout.stage, dict.fromkeys(_STAGE, 0))
    spent = "active_seconds" if before.is_leased else "queued_seconds"
    entry[spent] = round(entry[spent] + max(0.0, now - rollout.since), 6)
    if isinstance(event, Leased):
        entry["attempts"] += 1
    elif isinstance(event, InitDone | RunDone | Scored | Failed):
        for name in _WORKER:
            seconds = getattr(event.times, name)
            if seconds:
                timings[name] = round(timings.get(name, 0.0) + seconds, 6)
    if not transition.after.has_ended:
        traces.note(timings, before, rollout.since, transition.after, now)
    if isinstance(event, RunDone):
        traces.count(timings, event.counts)


def attempts(timings: dict[str, Any], stage: str) -> int:
    """Return how many leases of one stage the rollout has had."""
    count: int = timings[stage]["attempts"]
    return count


def total(timings: dict[str, Any]) -> float:
    """Return how long a rollout has existed, in seconds; its states follow each other without a gap."""
    seconds = 0.0
    for stage in STAGES:
        entry = timings.get(stage)
        if entry is not None:
            seconds += entry["queued_seconds"] + entry["active_seconds"]
    return seconds
