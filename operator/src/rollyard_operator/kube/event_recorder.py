"""Kubernetes events, published beside the work: a pass does not wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from rollyard_operator.kube.client import Kube, KubeError
from rollyard_operator.kube.event_messages import EventMessage
from rollyard_operator.kube.labels import Object

LANES = 4
"""Calls at once. An object's events all go through one lane, so that they stay in order."""
WAITING_AT_MOST = 500
"""Events in one lane; beyond it the oldest are dropped."""
_log = logging.getLogger(__name__)


class EventRecorder:
    """Keeps events until they are published. What is left at the operator's end is lost, harmlessly."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._lanes = [_Lane() for _ in range(LANES)]

    def tell(self, obj: Object, note: EventMessage) -> None:
        """One event about an object, soon."""
        self._lanes[hash(obj["metadata"]["uid"]) % LANES].put(obj, note)

    async def run(self) -> None:
        """Tells them until cancelled."""
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
                    # A namespace that goes takes no more of them.
                    _log.debug("event %s was not told: %s", note.reason, error)
            self._full = False
            await self._news.wait()
