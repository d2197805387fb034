"""Server-sent events of a job, with a bounded past to resume from. Their subscribers must keep up."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from rollyard_api.core import cursors
from rollyard_api.core.codec import dumps
from rollyard_api.storage.rows import JobRow

MAX_JOBS: Final = 1024
"""The number of jobs whose past events are kept. The job that has been silent longest is dropped first."""
MAX_PAST_BYTES: Final = 256 << 20
"""The largest number of bytes that the past events of all jobs take together."""
EVENT_BYTES: Final = 256
"""The approximate number of bytes that an event takes in addition to its data."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a job.

    The `number` grows by one per job and process. An event for one subscriber only has the number 0.
    """

    number: int
    name: str
    data: bytes


class _Stream:
    """The events of one job, the first of which has the number `first`."""

    def __init__(self, first: int) -> None:
        self.past: deque[Event] = deque()
        self.bytes = 0
        self.next = first
        self.subscribers = 0
        self.more = asyncio.Event()
        """Set when there is another event."""

    @property
    def kept(self) -> int:
        """The number of the first event that is kept, or of the next one."""
        return self.next - len(self.past)

    def drop_oldest(self) -> int:
        """Drop the oldest event, and return its size in bytes."""
        size = _bytes(self.past.popleft())
        self.bytes -= size
        return size


def _bytes(event: Event) -> int:
    return len(event.data) + EVENT_BYTES


class EventHub:
    """The events of all jobs in this process.

    An event id names the process and a number. A subscriber can resume only from ids of this process.
    """

    def __init__(self, buffer: int) -> None:
        self._buffer = buffer
        self._streams: dict[int, _Stream] = {}
        self._bytes = 0
        self._first = 1
        """The number of the first event of the next job.

        It is higher than every number of a job that was dropped, so no id is used twice.
        """
        self.process = secrets.token_hex(4)

    def _stream(self, job_id: int) -> _Stream:
        stream = self._streams.pop(job_id, None) or _Stream(self._first)
        self._streams[job_id] = stream
        if len(self._streams) > MAX_JOBS:
            silent = (old for old, other in self._streams.items() if not other.subscribers and old != job_id)
            if (oldest := next(silent, None)) is not None:
                self.forget(oldest)
        return stream

    def publish(self, job_id: int, name: str, data: dict[str, Any]) -> None:
        """Add an event. Publishing never waits for subscribers, who read the past at their own pace."""
        stream = self._stream(job_id)
        event = Event(stream.next, name, dumps(data))
        stream.next += 1
        stream.more.set()
        stream.past.append(event)
        stream.bytes += _bytes(event)
        self._bytes += _bytes(event)
        while len(stream.past) > self._buffer:
            self._bytes -= stream.drop_oldest()
        if self._bytes > MAX_PAST_BYTES:
            # The job with the longest past makes room, because no job may push out the events of the others.
            longest = max(self._streams.values(), key=lambda other: other.bytes)
            for _ in range((len(longest.past) + 1) // 2):
                self._bytes -= longest.drop_oldest()

    def forget(self, job_id: int) -> None:
        """Drop the past of a removed job, whose number the database may give to a later job."""
        stream = self._streams.pop(job_id, None)
        if stream is not None:
            self._bytes -= stream.bytes
            self._first = max(self._first, stream.next)

    def resume_after(self, job: JobRow, last_id: str) -> int | None:
        """Return the number of the event after which a subscriber continues.

        An empty id gives None, which means that the subscriber gets only new events. An id of another process
        gives -1, because the events that followed it are not kept here.

        Raises:
            Malformed: The id is not an id of an event.
            Gone: The id belongs to another job that had this name.
            Conflict: There has been no such event yet.
        """
        if not last_id:
            return None
        position = cursors.word(last_id, "events", uid=job.uid, job=job.name, parameter="Last-Event-ID")
        process, _, number = position.partition("-")
        if not re.fullmatch(r"[0-9a-f]{8}-[0-9]{1,18}", position):
            raise cursors.garbage("Last-Event-ID", last_id, "events")
        if process != self.process:
            return -1
        past = self._stream(job.id).next - 1
        if int(number) > past:
            raise cursors.beyond("Last-Event-ID", int(number), past, job.name, "events")
        return int(number)

    async def subscribe(self, job_id: int, after: int | None, idle: float) -> AsyncIterator[Event | None]:
        """Yield the events after number `after`, or only new ones if it is None.

        None is yielded after every `idle` seconds without an event. If some of the events are not kept, the
        first event is `missed`. If more events come than are kept while the subscriber takes earlier ones,
        the last event is `dropped`; the subscriber may resume with Last-Event-ID.
        """
        stream = self._stream(job_id)
        missed = after is not None and after + 1 < stream.kept
        last = stream.next - 1 if after is None or after < 0 else max(after, stream.kept - 1)
        stream.subscribers += 1
        try:
            if missed:
                yield Event(0, "missed", dumps({"reason": "NotKept"}))
            while last + 1 >= stream.kept:
                fresh = list(islice(reversed(stream.past), stream.next - 1 - last))
                for event in reversed(fresh):
                    yield event
                    last = event.number
                if not fresh:
                    stream.more.clear()
                    try:
                        async with asyncio.timeout(idle):
                            await stream.more.wait()
                    except TimeoutError:
                        yield None
            yield Event(0, "dropped", dumps({"reason": "SlowConsumer"}))
        finally:
            stream.subscribers -= 1

    def format(self, uid: str, event: Event) -> bytes:
        """Return an event of the job with this uid in the wire form of server-sent events."""
        body = b"event: %s\ndata: %s\n\n" % (event.name.encode(), event.data)
        if not event.number:
            return body
        return b"id: " + cursors.text("events", uid, f"{self.process}-{event.number}").encode() + b"\n" + body
