"""Kubernetes events: the ones for changed conditions, and their publication, for which no pass waits."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollyard_crds import Condition
from rollyard_drivers.reconcile.conditions import find

from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.labels import Object

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
    messages: list[EventMessage] = []
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
        if note is not None and (note.reason, note.message) not in {(m.reason, m.message) for m in messages}:
            messages.append(note)
    return messages


LANES = 4
"""The number of simultaneous calls. All events of an object use the same lane to stay in order."""
WAITING_AT_MOST = 500
"""The maximum number of events in one lane. Beyond it, the oldest ones are dropped."""
_log = logging.getLogger(__name__)


class EventRecorder:
    """Keeps events until they are published. Events left at the operator's end are lost, without harm."""

    def __init__(self, kube: KubeClient) -> None:
        self._lanes = [_Lane(kube) for _ in range(LANES)]

    def put(self, obj: Object, note: EventMessage) -> None:
        """Queue an event about an object."""
        self._lanes[hash(obj["metadata"]["uid"]) % LANES].put(obj, note)

    async def run(self) -> None:
        """Publish events until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(lane.run(), name="events")


class _Lane:
    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self._waiting: deque[tuple[Object, EventMessage]] = deque(maxlen=WAITING_AT_MOST)
        self._news = asyncio.Event()
        self._full = False

    def put(self, obj: Object, note: EventMessage) -> None:
        if len(self._waiting) == WAITING_AT_MOST and not self._full:
            self._full = True
            _log.warning("the API server takes events too slowly: the oldest are dropped")
        self._waiting.append((obj, note))
        self._news.set()

    async def run(self) -> None:
        while True:
            self._news.clear()
            while self._waiting:
                obj, note = self._waiting.popleft()
                try:
                    await self._kube.event(obj, note.type, note.reason, note.message)
                except KubeError as error:
                    # A namespace that is being deleted accepts no more events.
                    _log.debug("event %s was not recorded: %s", note.reason, error)
            self._full = False
            await self._news.wait()
