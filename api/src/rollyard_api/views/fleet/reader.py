"""One reader of the whole fleet for everybody who looks at it.

However many pages are open, the database is read at most once in `seconds`. Whoever asks in between gets what
was read, and whoever asks during a read waits for it. Jobs that have ended for good are read once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.storage.database import Database
from rollyard_api.storage.schema import jobs
from rollyard_api.views.fleet import jobs as job_rows
from rollyard_api.views.fleet import overview, workers

MAX_JOBS: Final = 20_000
"""The number of jobs that are looked at. Of more, the newest are."""
_LOOKED_UP: Final = 500


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """What one read found."""

    time: float
    """When it was read, in seconds since the epoch."""
    jobs: Mapping[int, dict[str, Any]]
    """The slim rows of the jobs by their number, oldest first."""
    overview: dict[str, Any]
    """The answer of `/v1/overview`."""


class FleetReader:
    """Reads the fleet for all who ask.

    Args:
        database: The database.
        seconds: The age up to which what was read is given again.
    """

    def __init__(self, database: Database, seconds: float) -> None:
        self._database = database
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._last: FleetSnapshot | None = None
        self._read = 0.0
        self._ended: dict[int, dict[str, Any]] = {}
        self.reads = 0
        """The number of times that the database was read."""

    async def look(self) -> FleetSnapshot:
        """Return the fleet, as it was at most `seconds` ago.

        Raises:
            Unavailable: The database cannot be used.
        """
        asked = time.monotonic()
        async with self._lock:
            # A read that began after this call asked is new enough, whatever `seconds` says.
            if self._last is not None and self._read > min(asked, time.monotonic() - self._seconds):
                return self._last
            began = time.monotonic()
            fleet, ended = await self._database.read(partial(_look, known=self._ended))
            self._ended = ended
            self._last, self._read = fleet, began
            self.reads += 1
            return fleet


def _look(
    conn: Connection, known: Mapping[int, dict[str, Any]]
) -> tuple[FleetSnapshot, dict[int, dict[str, Any]]]:
    """Return the fleet, and the slim rows of the jobs that do not change any more."""
    now = time.time()
    alive = jobs.c.deleted_at.is_(None)
    newest = sa.select(jobs.c.id).where(alive).order_by(jobs.c.id.desc()).limit(MAX_JOBS)
    ids = sorted(conn.scalars(newest))
    kept = {number: known[number] for number in ids if number in known}
    rows = list(conn.execute(sa.select(*job_rows.COLUMNS).where(alive, jobs.c.finished_at.is_(None))))
    unfinished = {row.id for row in rows}
    missing = [number for number in ids if number not in kept and number not in unfinished]
    for at in range(0, len(missing), _LOOKED_UP):
        some = jobs.c.id.in_(missing[at : at + _LOOKED_UP])
        rows += conn.execute(sa.select(*job_rows.COLUMNS).where(some))
    seen = workers.view(conn, now)
    open_rows = [row for row in rows if row.finished_at is None]
    states = job_rows.counts(conn, open_rows)
    ends = job_rows.last_ends(conn, open_rows)
    found = dict(kept)
    for row in rows:
        held = row.id in seen.jobs or 0 in seen.jobs
        found[row.id] = job_rows.slim(row, states.get(row.id, {}), ends.get(row.id), held, now)
    listed = dict(sorted(found.items()))
    ended = {
        number: row
        for number, row in listed.items()
        if row["finished_at"] is not None and row["phase"] in job_rows.FINAL
    }
    document = {
        "time": now,
        "phases": overview.phases(listed.values()),
        "queues": overview.queues(listed.values(), seen.slots),
        "rates": overview.rates_view(conn, now),
        "pools": overview.pools_view(conn),
        "nodes": seen.nodes,
        "workers": seen.workers,
        "more": seen.more,
    }
    return FleetSnapshot(now, listed, document), ended
