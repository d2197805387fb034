"""The overview of the fleet, by one reader for everybody who views it.

However many pages are open, the database is read at most once in `seconds`. Requests in between get what was
read, and requests during a read wait for it. Jobs that have ended for good are read once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, get_args

import sqlalchemy as sa
from rollyard_crds.rolloutjob import STAGES, Phase, StageName
from sqlalchemy.engine import Connection

from rollyard_api.backends import pools as pool_rows
from rollyard_api.backends.router import limit_of
from rollyard_api.core.codec import loads
from rollyard_api.storage.database import Database
from rollyard_api.storage.rows import BackendRow, PoolRow, columns, read_all
from rollyard_api.storage.schema import backends, jobs, pools
from rollyard_api.storage.statements import chunks
from rollyard_api.storage.view_tables import rates
from rollyard_api.views.fleet import jobs as job_rows
from rollyard_api.views.fleet import workers
from rollyard_api.views.job.folding import RATE_KEPT, RATE_SECONDS

MAX_POOLS: Final = 500
_POOLS: Final = sa.select(*columns(PoolRow, pools)).order_by(pools.c.namespace, pools.c.name).limit(MAX_POOLS)
_BACKENDS: Final = sa.select(*columns(BackendRow, backends)).order_by(backends.c.pool_id, backends.c.position)


def rates_view(conn: Connection, now: float) -> dict[str, Any]:
    """Return the rollouts that ended and their tokens in each bucket of the last minutes, oldest first."""
    buckets = RATE_KEPT // RATE_SECONDS
    start = (int(now) // RATE_SECONDS - buckets + 1) * RATE_SECONDS
    rows = {row.start: row for row in conn.execute(sa.select(rates).where(rates.c.start >= start))}
    starts = [start + bucket * RATE_SECONDS for bucket in range(buckets)]
    return {
        "bucket_seconds": RATE_SECONDS,
        "start": start,
        "rollouts": [rows[at].rollouts if at in rows else 0 for at in starts],
        "tokens": [rows[at].tokens if at in rows else 0 for at in starts],
    }


def pools_view(conn: Connection) -> list[dict[str, Any]]:
    """Return the pools with their backends."""
    active = pool_rows.active_rollouts(conn)
    servers: defaultdict[int, list[BackendRow]] = defaultdict(list)
    for row in read_all(BackendRow, conn.execute(_BACKENDS)):
        servers[row.pool_id].append(row)
    return [
        {
            "namespace": pool.namespace,
            "name": pool.name,
            "model": pool.model,
            "phase": _phase(pool, servers[pool.id]),
            "policy_version": pool.policy_version,
            "paused": bool(pool.paused),
            "backends": [_backend(pool, row, active.get(row.url, 0)) for row in servers[pool.id]],
        }
        for pool in read_all(PoolRow, conn.execute(_POOLS))
    ]


def _phase(pool: PoolRow, rows: Iterable[BackendRow]) -> str:
    """Return Paused, Ready, Updating or NotReady."""
    if pool.paused:
        return "Paused"
    serving = list(rows)
    if any(row.ready and row.weights == "Current" and row.circuit == "Closed" for row in serving):
        return "Ready"
    return "Updating" if any(row.weights == "Updating" for row in serving) else "NotReady"


def _backend(pool: PoolRow, row: BackendRow, active: int) -> dict[str, Any]:
    stats = {} if row.stats is None else loads(row.stats)
    message = row.message or ("" if row.weights == "Current" else row.weights_message)
    if not message and row.circuit != "Closed":
        message = f"not used after {row.failures} failures; a probe decides"
    return {
        "url": row.url,
        "ready": bool(row.ready),
        "circuit": row.circuit,
        "weights": row.weights,
        "policy_version": row.policy_version,
        "active": active,
        "max_active": limit_of(pool.max_active, row.places),
        "speed": None if row.speed is None else round(row.speed, 1),
        "kv_hits": stats.get("prefixCacheHitRate"),
        "draining": bool(row.draining),
        "message": message,
    }


def queues(
    rows: Iterable[Mapping[str, Any]], slots: Mapping[StageName, int]
) -> dict[StageName, dict[str, int]]:
    """Return the rollouts that wait for each stage and are in it, and the places of all workers."""
    totals: dict[StageName, dict[str, int]]
    totals = {stage: {"queued": 0, "active": 0, "slots": slots.get(stage, 0)} for stage in STAGES}
    for job in rows:
        if job["finished_at"] is None:
            for stage in STAGES:
                for name in ("queued", "active"):
                    totals[stage][name] += job["stages"][stage][name]
    for counts in totals.values():
        counts["slots"] = max(counts["slots"], counts["active"])
    return totals


MAX_JOBS: Final = 20_000
"""The largest number of jobs that are read, beginning with the newest."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The result of one read."""

    time: float
    """When it was read, in seconds since the epoch."""
    jobs: Mapping[int, dict[str, Any]]
    """The slim rows of the jobs by their number, oldest first."""
    overview: dict[str, Any]
    """The answer of `/v1/overview`."""


class FleetReader:
    """Reads the fleet for all requests.

    Args:
        database: The database.
        seconds: The age up to which the last read is returned again.
        max_harness_runs: The largest number of rollouts of harnesses of a namespace that are in Run at once.
    """

    def __init__(self, database: Database, seconds: float, max_harness_runs: int) -> None:
        self._database = database
        self._max_harness_runs = max_harness_runs
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._last: FleetSnapshot | None = None
        self._read = 0.0
        self.reads = 0
        """The number of times that the database was read."""

    async def look(self) -> FleetSnapshot:
        """Return the fleet, as it was at most `seconds` ago.

        Raises:
            Unavailable: The database cannot be used.
        """
        started = time.monotonic()
        async with self._lock:
            # A read that began after this call is new enough, whatever `seconds` says.
            if self._last is not None and self._read > min(started, time.monotonic() - self._seconds):
                return self._last
            began = time.monotonic()
            known = {} if self._last is None else self._last.jobs
            self._last = await self._database.read(
                partial(_look, known=known, max_harness_runs=self._max_harness_runs)
            )
            self._read = began
            self.reads += 1
            return self._last


def _look(conn: Connection, known: Mapping[int, dict[str, Any]], max_harness_runs: int) -> FleetSnapshot:
    """Return the fleet. Slim rows of the last read that no longer change are kept."""
    now = time.time()
    alive = jobs.c.deleted_at.is_(None)
    newest = sa.select(jobs.c.id).where(alive).order_by(jobs.c.id.desc()).limit(MAX_JOBS)
    ids = sorted(conn.scalars(newest))
    final = {number: known[number] for number in ids if number in known and job_rows.is_final(known[number])}
    rows = list(conn.execute(sa.select(*job_rows.COLUMNS).where(alive, jobs.c.finished_at.is_(None))))
    missing = set(ids) - final.keys() - {row.id for row in rows}
    for batch in chunks(sorted(missing)):
        rows += conn.execute(sa.select(*job_rows.COLUMNS).where(jobs.c.id.in_(batch)))
    fleet = workers.view(conn, now)
    slim = job_rows.slim(conn, rows, fleet.jobs, now, max_harness_runs)
    listed = dict(sorted((final | slim).items()))
    phases = Counter(job["phase"] for job in listed.values())
    document = {
        "time": now,
        "phases": {phase: phases[phase] for phase in get_args(Phase)},
        "queues": queues(listed.values(), fleet.slots),
        "rates": rates_view(conn, now),
        "pools": pools_view(conn),
        "nodes": fleet.nodes,
        "workers": fleet.workers,
        "more": fleet.more,
    }
    return FleetSnapshot(now, listed, document)
