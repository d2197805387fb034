"""The Kubernetes events for changed conditions. There is one event for each transition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollyard_crds import Condition
from rollyard_drivers.reconcile.conditions import find

WAITING = frozenset({"WorkersStarting", "Suspended", "NotFinished", "Queued", "BackendPoolNotReady"})
"""The reasons of a False condition that belong to normal operation."""


@dataclass(frozen=True, slots=True)
class EventMessage:
    """The type, reason and message of one event."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def _of_true(kind: str, after: Condition) -> EventMessage | None:
    """Return the event for a condition that became True, or None."""
    text = after.message
    match kind:
        case "Admitted":
            return EventMessage("Normal", "Admitted", text or "the job is admitted")
        case "Suspended":
            return EventMessage("Normal", "Suspended", "workers are drained, and nothing starts")
        case "Running":
            return EventMessage("Normal", "Running", text)
        case "Ready":
            return EventMessage("Normal", "Ready", text)
        case "Degraded":
            return EventMessage("Warning", after.reason, text)
        case "Succeeded":
            return EventMessage("Normal", "Succeeded", text)
        case "Failed" if after.reason == "Cancelled":
            return EventMessage("Normal", "Cancelled", text)
        case "Failed":
            return EventMessage("Warning", after.reason, text)
    return None


def _of_false(kind: str, before: Condition | None, after: Condition) -> EventMessage | None:
    """Return the event for a condition that became False or is False for a new reason, or None."""
    flipped = before is not None and before.status == "True"
    match kind:
        case "Suspended" if flipped and after.reason == "NotSuspended":
            return EventMessage("Normal", "Resumed", "the job continues")
        case "Degraded" if flipped and after.reason == "Healthy":
            return EventMessage("Normal", "Recovered", "everything that should run does")
        case "Ready" if flipped:
            return EventMessage("Warning", after.reason, after.message)
        case "Admitted" if after.reason == "Queued":
            return EventMessage("Normal", "Queued", after.message)
        case "Admitted" | "Running" if after.reason not in WAITING:
            return EventMessage("Warning", after.reason, after.message)
    return None


def notes(before: Sequence[Condition], after: Sequence[Condition]) -> list[EventMessage]:
    """Return the events for a change of status. The end of a job is published as its outcome alone."""
    found: list[EventMessage] = []
    over = any(one.type == "Finished" and one.status == "True" for one in after)
    for now in after:
        old = find(before, now.type)
        if old is not None and (old.status, old.reason) == (now.status, now.reason):
            continue
        if now.status == "True":
            # A new reason while Degraded stays True belongs to the same problem, which was published already.
            note = None if old is not None and old.status == "True" else _of_true(now.type, now)
        else:
            note = None if over else _of_false(now.type, old, now)
        if note is not None and (note.reason, note.message) not in {(n.reason, n.message) for n in found}:
            found.append(note)
    return found
