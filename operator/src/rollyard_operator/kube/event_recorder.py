"""Kubernetes events. They are published in the background, and no pass waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.event_messages import EventMessage
from rollyard_operator.kube.interface import Kube
from rollyard_operator.kube.labels import Object

LANES = 4
"""The number of simultaneous calls. All events of an object use the same lane to stay in order."""
WAITING_AT_MOST = 500
"""The maximum number of events in one lane. Beyond it, the oldest ones are dropped."""
_log = logging.getLogger(__name__)


class EventRecorder:
    """Keeps events until they are published. Events left at the operator's end are lost, without harm."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._lanes = [_Lane() for _ in range(LANES)]

    def tell(self, obj: Object, note: EventMessage) -> None:
        """Queue an event about an object."""
        self._lanes[hash(obj["metadata"]["uid"]) % LANES].put(obj, note)

    async def run(self) -> None:
        """Publish events until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(lane.run(self._kube), name="events")


class _Lane:
    def __init__(self) -> None:
        self._waiting: deque[tuple[Object, EventMessage]] = deque()
        self._news = asyncio.Event()
        self._full = False

    def put(self, obj: Object, note: EventMessage) -> None:
        if len(self._waiting) >= WAITING_AT_MOST:
            self._waiting.popleft()
            if not self._full:
                self._full = True
                _log.warning("the API server takes events too slowly: the oldest are dropped")
        self._waiting.append((obj, note))
        self._news.set()

    async def run(self, kube: Kube) -> None:
        while True:
            self._news.clear()
            while self._waiting:
                obj, note = self._waiting.popleft()
                try:
                    await kube.event(obj, note.type, note.reason, note.message)
                except KubeError as error:
                    # A namespace that is being deleted accepts no more events.
                    _log.debug("event %s was not recorded: %s", note.reason, error)
            self._full = False
            await self._news.wait()
