"""The circuits of the backends in the tables: count failures, and probe open ones with a real request.

The breaker of one backend is a pure state machine. While the circuit is closed, it counts failures in a row,
and THRESHOLD of them open it. While it is open, nothing is routed to the backend. After a pause one probe
decides (half-open): an answer closes the circuit, and a failure opens it again for twice the time. A circuit
that a probe has closed is on probation: it keeps its count, so the next failure opens it at once and for
longer, until a rollout has completed there. This keeps a backend that can answer one request but not many
from flapping.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVarTuple

from rollyard_crds.backendpool import Circuit
from rollyard_inference import health
from rollyard_inference.errors import BackendError
from rollyard_inference.transports.interface import Transport
from rollyard_process.backoff import Backoff
from sqlalchemy.engine import Connection

from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import BackendRow, PoolRow
from rollyard_api.storage.schema import backends, pools

Ts = TypeVarTuple("Ts")

THRESHOLD: Final = 3
"""The number of failures in a row that open a circuit."""
FIRST_PAUSE: Final = 2.0
"""The seconds before the first probe. Each further failure doubles them, up to LONGEST_PAUSE."""
LONGEST_PAUSE: Final = 60.0
PROBE_SECONDS: Final = 10.0
"""The time within which a probe must be answered, in seconds."""
STUCK_SECONDS: Final = 3 * PROBE_SECONDS
"""The seconds after which a probe without a verdict counts as lost with its control plane.

Another replica may then probe.
"""
_MOST: Final = THRESHOLD + 16
"""The limit of the failure count. The pause has reached its maximum long before that."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of one backend's circuit; `opened_at` is when it opened, or when its probe began."""

    circuit: Circuit = "Closed"
    failures: int = 0
    opened_at: float | None = None

    @property
    def pause(self) -> float:
        """The seconds from the opening of the circuit to the next probe."""
        return Backoff(FIRST_PAUSE, LONGEST_PAUSE).pause(self.failures - THRESHOLD + 1)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until a probe may begin, at least 0, or None while the circuit is closed."""
        if self.circuit == "Closed":
            return None
        wait = self.pause if self.circuit == "Open" else STUCK_SECONDS
        return max(0.0, (self.opened_at or 0.0) + wait - now)

    def failed(self, now: float) -> Breaker:
        """Return the state after a failed request. A late failure, with an open circuit, changes nothing."""
        if self.circuit != "Closed":
            return self
        failures = min(self.failures + 1, _MOST)
        if failures < THRESHOLD:
            return replace(self, failures=failures)
        return Breaker("Open", failures, now)

    def completed(self) -> Breaker:
        """Return the state after a completed Run, from which failures are counted from zero again."""
        return replace(self, failures=0) if self.circuit == "Closed" else self

    def probing(self, now: float) -> Breaker:
        """Return the state in which a probe has begun."""
        return replace(self, circuit="HalfOpen", opened_at=now)

    def probed(self, answered: bool, now: float) -> Breaker:
        """Return the state after the probe's verdict."""
        if answered:
            return Breaker("Closed", self.failures, None)
        return Breaker("Open", min(self.failures + 1, _MOST), now)

    def restarted(self, now: float) -> Breaker:
        """Return the state after a restart of the server; if the circuit is open, a probe is due at once."""
        return self if self.circuit == "Closed" else Breaker("Open", THRESHOLD, now - FIRST_PAUSE)


log = logging.getLogger("rollyard.api")

MAX_AT_ONCE: Final = 32
"""The largest number of servers that a probe, a health check or a poll contacts at the same time."""


def of(row: BackendRow) -> Breaker:
    """Return the breaker of a row of `backends`."""
    return Breaker(row.circuit, row.failures, row.opened_at)


def values(breaker: Breaker) -> dict[str, Any]:
    """Return the columns that store a breaker."""
    return {"circuit": breaker.circuit, "failures": breaker.failures, "opened_at": breaker.opened_at}


def failed(tx: Transaction, job_id: int, url: str) -> bool:
    """Count a failed request to this backend of the job's pool, and return whether its circuit opened.

    A backend that takes new weights may answer nothing for a minute, which is no failure.
    """
    opened = False
    for row, namespace, name in pool_rows.backends_of_job(tx, job_id, url):
        if row.weights == "Updating":
            continue
        before = of(row)
        after = before.failed(tx.now)
        if after != before:
            pool_rows.change_backend(tx, row.pool_id, url, values(after))
        if before.circuit == "Closed" and after.circuit == "Open":
            tx.count("circuits_opened", namespace, name)
            opened = True
    return opened


def completed(tx: Transaction, runs: Collection[tuple[int, str]]) -> None:
    """Reset the failure counts of the backends, in their jobs' pools, that completed these Runs."""
    for job_id, url in sorted(runs):
        pool_rows.reset_failures(tx, job_id, url)


def _suspects(conn: Connection) -> list[tuple[BackendRow, PoolRow]]:
    """Return the backends whose circuits are not closed, each with its pool.

    A paused backend answers nothing, and its driver deals with a backend that is not ready.
    """
    suspect = (backends.c.circuit != "Closed", backends.c.ready.is_(True), backends.c.weights == "Current")
    return pool_rows.with_pools(conn, *suspect, pools.c.paused.is_(False))


def _change(tx: Transaction, pool_id: int, url: str, before: Breaker, after: Breaker) -> bool:
    """Write `after` if the circuit is still as it was read, so that only one replica probes."""
    row = pool_rows.locked_backend(tx, pool_id, url)
    if row is None or of(row) != before:
        return False
    pool_rows.change_backend(tx, pool_id, url, values(after))
    return True


async def _probe(database: Database, transport: Transport, row: BackendRow, model: str) -> None:
    """Probe a backend with a real request, unless another replica does. An answer closes its circuit."""
    change = partial(_change, pool_id=row.pool_id, url=row.url)
    before, probing = of(row), of(row).probing(time.time())
    if not await database.write(partial(change, before=before, after=probing), durable=False):
        return
    problem = ""
    try:
        await health.first_request(transport, row.url, model, PROBE_SECONDS)
    except BackendError as error:
        problem = f"its circuit stays open: {error}"
    after = probing.probed(not problem, time.time())
    await database.write(partial(change, before=probing, after=after), durable=False)
    if problem:
        log.warning("backend %s: %s", row.url, problem)
    else:
        log.info("backend %s answers again: its circuit is closed", row.url)


async def probe_all(database: Database, transport: Transport) -> None:
    """Probe each open circuit whose pause is over, once."""
    now = time.time()
    suspects = await database.read(_suspects)
    due = [(row, pool.served_model or pool.model) for row, pool in suspects if of(row).due_in(now) == 0]
    await each(due, partial(_probe, database, transport))


async def each(items: Iterable[tuple[*Ts]], ask: Callable[[*Ts], Awaitable[None]]) -> None:
    """Call `ask` for each of these items, for at most MAX_AT_ONCE of them at the same time."""
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(item: tuple[*Ts]) -> None:
        async with places:
            await ask(*item)

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(one(item))
