"""Server-sent events of a job: a bounded past to resume from, and subscribers that must keep up."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from rollyard_api.codec import dumps

MAX_JOBS = 1024
"""Jobs whose past events are kept; the one that was silent longest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `number` grows by one per job and process."""

    number: int
    name: str
    data: bytes


class SlowConsumer(Exception):
    """The subscriber fell behind by a whole buffer and was dropped; it may resume by Last-Event-ID."""

    reason = "SlowConsumer"


class _Stream:
    """One job's events."""

    def __init__(self, buffer: int) -> None:
        self.past: deque[Event] = deque(maxlen=buffer)
        self.next = 1
        self.subscribers: set[asyncio.Queue[Event | None]] = set()


class EventHub:
    """All jobs' events in this process. Ids are `<process>-<number>`; only its own are resumed from."""

    def __init__(self, buffer: int) -> None:
        self._buffer = buffer
        self._streams: dict[int, _Stream] = {}
        self.process = secrets.token_hex(4)

    def _stream(self, job_id: int) -> _Stream:
        stream = self._streams.pop(job_id, None) or _Stream(self._buffer)
        self._streams[job_id] = stream
        if len(self._streams) > MAX_JOBS:
            for old, candidate in self._streams.items():
                if not candidate.subscribers and old != job_id:
                    del self._streams[old]
                    break
        return stream

    def publish(self, job_id: int, name: str, data: dict[str, Any]) -> None:
        """Add an event; a subscriber whose buffer is full is dropped instead of waited for."""
        stream = self._stream(job_id)
        event = Event(stream.next, name, dumps(data))
        stream.next += 1
        stream.past.append(event)
        for subscriber in list(stream.subscribers):
            try:
                subscriber.put_nowait(event)
            except asyncio.QueueFull:
                stream.subscribers.discard(subscriber)
                # Room for the end mark: what it has not read is in the past, to be resumed from.
                subscriber.get_nowait()
                subscriber.put_nowait(None)

    def _resume_after(self, stream: _Stream, last_id: str) -> int:
        process, _, number = last_id.partition("-")
        if process != self.process or not number.isdigit():
            return stream.next - 1
        return int(number)

    async def subscribe(self, job_id: int, last_id: str, idle: float) -> AsyncIterator[Event | None]:
        """Events after `last_id` ("" : from now on); None after each `idle` seconds without one.

        Raises:
            SlowConsumer: the subscriber fell behind.
        """
        stream = self._stream(job_id)
        after = self._resume_after(stream, last_id) if last_id else stream.next - 1
        events: asyncio.Queue[Event | None] = asyncio.Queue(self._buffer)
        backlog = [event for event in stream.past if event.number > after]
        stream.subscribers.add(events)
        try:
            for event in backlog:
                yield event
            while True:
                try:
                    got = await asyncio.wait_for(events.get(), idle)
                except TimeoutError:
                    yield None
                    continue
                if got is None:
                    raise SlowConsumer("fell behind the events of this job")
                yield got
        finally:
            stream.subscribers.discard(events)

    def format(self, event: Event) -> bytes:
        """An event in the wire form of server-sent events."""
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
            self.process.encode(),
            event.number,
            event.name.encode(),
            event.data,
        )
