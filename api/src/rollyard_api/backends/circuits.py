"""The circuits of the backends in the tables: count failures, and probe open ones with a real request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from rollyard_inference import health
from rollyard_inference.errors import BackendError
from rollyard_inference.transports.interface import Transport
from sqlalchemy.engine import Connection

from rollyard_api.backends.circuit_breaker import PROBE_SECONDS, Breaker
from rollyard_api.core.wakeups import QUEUE
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import BackendRow, read_one
from rollyard_api.storage.schema import backends, jobs, pools

log = logging.getLogger("rollyard.api")

MAX_AT_ONCE = 32
"""The number of probes that may be in flight at once."""


def of(row: BackendRow) -> Breaker:
    """Return the breaker of a row of `backends`."""
    return Breaker(row.circuit, row.failures, row.opened_at)


def values(breaker: Breaker) -> dict[str, Any]:
    """Return the columns that store a breaker."""
    return {"circuit": breaker.circuit, "failures": breaker.failures, "opened_at": breaker.opened_at}


def _pool_of(job_id: int | sa.BindParameter[int]) -> sa.Select[tuple[int]]:
    """Return a query for a job's pool; other pools judge the same server by their own rollouts alone."""
    return (
        sa.select(pools.c.id)
        .join_from(pools, jobs, sa.and_(jobs.c.namespace == pools.c.namespace, jobs.c.pool == pools.c.name))
        .where(jobs.c.id == job_id)
    )


_RESET = (
    sa.update(backends)
    .where(
        backends.c.pool_id.in_(_pool_of(sa.bindparam("b_job", type_=sa.Integer))),
        backends.c.url == sa.bindparam("b_url"),
        backends.c.failures > 0,
        backends.c.circuit == "Closed",
    )
    .values(failures=0)
)


def failed(tx: Transaction, job_id: int, url: str) -> bool:
    """Count a failed request of this backend of the job's pool, and return whether its circuit opened."""
    rows = tx.conn.execute(
        sa.select(backends, pools.c.namespace, pools.c.name)
        .join_from(backends, pools, pools.c.id == backends.c.pool_id)
        .where(backends.c.url == url, backends.c.pool_id.in_(_pool_of(job_id)))
        .order_by(backends.c.pool_id)
        .with_for_update(of=backends)
    ).all()
    opened = False
    for row in rows:
        before = of(BackendRow(*row[:-2]))  # The last two columns belong to the pool.
        after = before.failed(tx.now)
        if after != before:
            _write(tx, row.pool_id, url, after)
        if before.circuit == "Closed" and after.circuit == "Open":
            tx.count("circuits_opened", row.namespace, row.name)
            opened = True
    return opened


def completed(tx: Transaction, runs: Collection[tuple[int, str]]) -> None:
    """Reset the failure counts of the backends, in their jobs' pools, that completed these Runs."""
    for job_id, url in sorted(runs):
        tx.conn.execute(_RESET, {"b_job": job_id, "b_url": url})


def _write(tx: Transaction, pool_id: int, url: str, breaker: Breaker) -> None:
    where = (backends.c.pool_id == pool_id, backends.c.url == url)
    tx.conn.execute(sa.update(backends).where(*where).values(**values(breaker)))


@dataclass(frozen=True, slots=True)
class Suspect:
    """A backend whose circuit is not closed."""

    pool_id: int
    url: str
    model: str
    breaker: Breaker


_SUSPECTS = (
    sa.select(backends, pools.c.model, pools.c.served_model)
    .join_from(backends, pools, pools.c.id == backends.c.pool_id)
    .where(
        backends.c.circuit != "Closed",
        backends.c.ready.is_(True),
        backends.c.weights == "Current",
        pools.c.paused.is_(False),
    )
)


def _suspects(conn: Connection) -> list[Suspect]:
    # A paused backend answers nothing, and its driver deals with a backend that is not ready.
    rows = conn.execute(_SUSPECTS)
    return [
        Suspect(row.pool_id, row.url, row.served_model or row.model, of(BackendRow(*row[:-2])))
        for row in rows
    ]


def _change(tx: Transaction, suspect: Suspect, after: Breaker) -> bool:
    """Write `after` if the circuit is unchanged since it was read, so that only one replica probes."""
    where = (backends.c.pool_id == suspect.pool_id, backends.c.url == suspect.url)
    found = tx.conn.execute(sa.select(backends).where(*where).with_for_update()).one_or_none()
    row = read_one(BackendRow, found)
    if row is None or of(row) != suspect.breaker:
        return False
    _write(tx, suspect.pool_id, suspect.url, after)
    if after.circuit == "Closed":
        tx.wake(QUEUE)
    return True


def _begin(tx: Transaction, suspect: Suspect) -> Breaker | None:
    if suspect.breaker.due_in(tx.now) != 0:
        return None
    after = suspect.breaker.probing(tx.now)
    return after if _change(tx, suspect, after) else None


def _end(tx: Transaction, suspect: Suspect, answered: bool) -> None:
    _change(tx, suspect, suspect.breaker.probed(answered, tx.now))


async def _problem(transport: Transport, suspect: Suspect) -> str | None:
    """Return why the server does not sample, or None if it does."""
    try:
        await health.first_request(transport, suspect.url, suspect.model, PROBE_SECONDS)
    except BackendError as error:
        return str(error)
    return None


async def probe_all(database: Database, transport: Transport) -> None:
    """Probe each open circuit whose pause is over, once."""
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(suspect: Suspect) -> None:
        probing = await database.write(partial(_begin, suspect=suspect), durable=False)
        if probing is None:
            return
        seen = Suspect(suspect.pool_id, suspect.url, suspect.model, probing)
        async with places:
            problem = await _problem(transport, suspect)
        await database.write(partial(_end, suspect=seen, answered=problem is None), durable=False)
        if problem is None:
            log.info("backend %s answers again: its circuit is closed", suspect.url)
        else:
            log.warning("backend %s: its circuit stays open: %s", suspect.url, problem)

    suspects = await database.read(_suspects)
    now = time.time()
    async with asyncio.TaskGroup() as group:
        for suspect in suspects:
            if suspect.breaker.due_in(now) == 0:
                group.create_task(one(suspect))
