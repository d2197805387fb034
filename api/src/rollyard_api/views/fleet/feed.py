"""Changes of the fleet, once a second, for everybody who follows it.

One read serves all followers, and nothing is read while there are none. A follower that does not keep up is
dropped, because the others must not wait for it; a page simply connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Database
from rollyard_api.storage.view_tables import ended_rollouts, job_statistics
from rollyard_api.views.fleet.overview import FleetReader, FleetSnapshot
from rollyard_api.views.job.lists import ENDED_ROWS, slim

BUFFER: Final = 256
"""The number of events that a follower may fall behind."""
IDLE_SECONDS: Final = 1.0
"""The time after which a stream without events gets a comment, so that nothing on the way closes it."""
MAX_ENDED: Final = 50
"""The number of ended rollouts of one job in one event."""
MAX_ENDED_ALL: Final = 500
"""The number of ended rollouts of all jobs in one second."""

JobName = tuple[str, str]
"""The namespace and the name of a job."""


def event(name: str, document: Any) -> bytes:
    """Return a server-sent event. JSON has no line feeds outside of escapes, so the data is one line."""
    return b"event: " + name.encode() + b"\ndata: " + dumps(document) + b"\n\n"


def glance(fleet: FleetSnapshot) -> dict[str, Any]:
    """Return the overview without workers and nodes, of which a large fleet has many."""
    return {key: value for key, value in fleet.overview.items() if key not in ("workers", "nodes", "more")}


class FleetFeed:
    """Informs followers of what has changed between two reads.

    Args:
        reader: The reader of the fleet.
        database: The database, for the rollouts that have ended.
    """

    def __init__(self, reader: FleetReader, database: Database) -> None:
        self._reader = reader
        self._database = database
        self._followers: dict[asyncio.Queue[bytes | None], JobName | None] = {}
        """The events that wait for each follower, and the only job whose events it gets, or None for all."""
        self._last: FleetSnapshot | None = None
        self._folded: dict[int, int] = {}

    async def tick(self) -> None:
        """Read the fleet if anybody follows it, and send what has changed since the last call."""
        if not self._followers:
            self._last = None
            return
        before, now = self._last, await self._reader.look()
        if before is None:
            self._folded = await self._database.read(_folded)
            self._last = now
            return
        if glance(before) | {"time": 0.0} != glance(now) | {"time": 0.0}:
            self._tell("overview", glance(now))
        for number, job in now.jobs.items():
            if not _same(before.jobs.get(number), job):
                self._tell("job", job, of=job)
        for number in before.jobs.keys() - now.jobs.keys():
            self._tell("gone", _named(before.jobs[number]), of=before.jobs[number])
        self._last = now
        await self._tell_ended(now)

    async def _tell_ended(self, fleet: FleetSnapshot) -> None:
        folded, self._folded = self._folded, await self._database.read(_folded)
        followed = set(self._followers.values())
        due = [
            (number, folded.get(number, 0), self._folded[number])
            for number, job in fleet.jobs.items()
            if self._folded.get(number, 0) > folded.get(number, 0)
            and (None in followed or (job["namespace"], job["name"]) in followed)
        ]
        if not due:
            return
        for number, rows in await self._database.read(partial(_ended, due=due)):
            self._tell("ended", _named(fleet.jobs[number]) | rows, of=fleet.jobs[number])

    def _tell(self, name: str, document: Any, of: Mapping[str, Any] | None = None) -> None:
        """Send an event to all followers, or only to those of the job with this slim row."""
        data = event(name, document)
        for events, only in list(self._followers.items()):
            if of is not None and only not in (None, (of["namespace"], of["name"])):
                continue
            if events.qsize() >= BUFFER:
                del self._followers[events]
                events.put_nowait(None)
            else:
                events.put_nowait(data)

    async def follow(self, only: JobName | None, closing: Any) -> AsyncIterator[bytes]:
        """Yield server-sent events until the client leaves, beginning with the overview.

        Args:
            only: The only job whose events are sent, or None for all.
            closing: Returns whether the control plane is about to stop.
        """
        events: asyncio.Queue[bytes | None] = asyncio.Queue(BUFFER + 1)
        self._followers[events] = only
        try:
            yield event("overview", glance(await self._reader.look()))
            while not closing():
                data: bytes | None = b": idle\n\n"
                with suppress(TimeoutError):
                    data = await asyncio.wait_for(events.get(), IDLE_SECONDS)
                if data is None:
                    yield event("dropped", {"reason": "SlowConsumer"})
                    return
                yield data
        finally:
            self._followers.pop(events, None)


def _named(job: Mapping[str, Any]) -> dict[str, Any]:
    return {"namespace": job["namespace"], "name": job["name"]}


def _same(before: dict[str, Any] | None, now: dict[str, Any]) -> bool:
    """Return whether nothing in a slim row has changed except how late the job is."""
    if before is now:
        return True
    if before is None or (before["late"] is None) != (now["late"] is None):
        return False
    return before | {"late": None} == now | {"late": None}


def _folded(conn: Connection) -> dict[int, int]:
    """Return the number of folded rollouts of each job."""
    query = sa.select(job_statistics.c.job_id, job_statistics.c.rollouts)
    return {row.job_id: row.rollouts for row in conn.execute(query)}


def _ended(conn: Connection, due: Iterable[tuple[int, int, int]]) -> list[tuple[int, dict[str, Any]]]:
    """Return {rollouts, more} of each job: the newest slim rows, and the number of those left out."""
    results = []
    room = MAX_ENDED_ALL
    for number, after, upto in due:
        job = job_rows.by_id(conn, number)
        if job is None:
            continue
        most = min(MAX_ENDED, room)
        t = ended_rollouts.c
        query = ENDED_ROWS.where(t.job_id == number, t.end_seq > after, t.end_seq <= upto)
        rows = conn.execute(query.order_by(t.end_seq.desc()).limit(most)).all() if most else []
        room -= len(rows)
        more = upto - after - len(rows)
        results.append((number, {"rollouts": slim(conn, job, rows), "more": more}))
    return results
