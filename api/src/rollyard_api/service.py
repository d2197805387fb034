"""The control plane as one object: database, bus, events, metrics, archive, and what runs beside requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial

import httpx
from sqlalchemy.engine import Connection, make_url

from rollyard_api import (
    auth,
    cancelling,
    circuits,
    claims,
    entrypoints,
    health,
    liveness,
    lock,
    migrate,
    nodes,
    verification,
)
from rollyard_api.archive import Archive
from rollyard_api.auth import Tokens
from rollyard_api.bus import Bus
from rollyard_api.coordinator import Coordinator
from rollyard_api.database import Database, Transaction
from rollyard_api.events import EventHub
from rollyard_api.metrics import Metrics
from rollyard_api.problems import ApiError, StorageFull
from rollyard_api.settings import Settings
from rollyard_api.speeds import Speeds
from rollyard_api.stats import Poller
from rollyard_api.store import open_store

log = logging.getLogger("rollyard.api")

FLUSH_SECONDS = 0.25
"""Between two looks at what waits for the trajectory store."""
FLUSH_RETRY_SECONDS = 2.0


class ControlPlane:
    """Everything that requests share; made by `running`."""

    def __init__(self, settings: Settings, tokens: Tokens, database: Database) -> None:
        self.settings = settings
        self.tokens = tokens
        self.database = database
        self.bus = Bus(None if database.sqlite else settings.recheck_seconds)
        self.events = EventHub(settings.event_buffer)
        self.metrics = Metrics()
        self.archive = Archive(database, open_store(settings.trajectories_url))
        self.installed = entrypoints.installed()
        self.unclaimed = liveness.Unclaimed()
        self.speeds = Speeds()
        self.poller = Poller()
        self.http = httpx.AsyncClient(timeout=health.CHECK_TIMEOUT, trust_env=False)
        """For calls to backends."""
        python = settings.verify_python or verification.default_python()
        self.coordinator = Coordinator(
            database, self.http, verification.Forward(python), settings.weight_limits
        )
        self.ready = False

    def after_commit(self, committed: Sequence[Transaction]) -> None:
        """Tell waiters, subscribers and metrics what has just been committed."""
        wakes: set[str] = set()
        for tx in committed:
            wakes |= tx.wakes
            for job_id, data in tx.events:
                self.events.publish(job_id, "transition", data)
            self.metrics.add(tx.counted)
            self.speeds.add(tx.measured, tx.loads)
        if wakes:
            self.bus.wake(wakes)

    async def cancel_rest(self, job_id: int) -> None:
        """End what is unfinished of a cancelled job, batch by batch, and give its sandboxes up."""
        while await self.database.write(partial(cancelling.cancel_some, job_id=job_id)):
            pass
        await self.database.write(claims.release_unneeded, durable=False)

    async def refuse_when_full(self) -> None:
        """Take no more results while the trajectory store is full and the database holds its share.

        Raises:
            StorageFull: so it is.
        """
        if self.archive.full and await self.archive.unstored() >= self.settings.max_unstored:
            raise StorageFull(
                "no space left for trajectories, and as many as may wait in the database do; "
                "make room in the trajectory store"
            )

    async def sweep(self) -> None:
        """One round of expiry, deadlines, cancellations, claims and removals."""
        write, read = self.database.write, self.database.read
        expire = partial(liveness.expire, max_expiries=self.settings.max_expiries)
        while await write(expire, durable=False) == liveness.EXPIRY_BATCH:
            pass
        silent = self.settings.node_seconds
        while await write(partial(nodes.give_up_silent, silent_seconds=silent), durable=False) >= nodes.BATCH:
            pass
        await write(cancelling.enforce, durable=False)
        for job_id in await read(cancelling.unfinished_cancellations):
            await self.cancel_rest(job_id)
        await write(claims.release_unneeded, durable=False)
        for job_id in await read(cancelling.deleted_jobs):
            while not await write(partial(cancelling.purge_some, job_id=job_id)):
                pass

    async def flush(self) -> None:
        """One round of storing trajectories; a full store is remembered until a round succeeds."""
        try:
            await self.archive.flush()
        except StorageFull:
            self.archive.full = True
            raise

    async def check_health(self, client: httpx.AsyncClient, *, ready: bool) -> None:
        """One round of health checks of those external backends that are ready, or that are not."""
        await health.check_all(self.database, client, ready=ready)

    async def probe_circuits(self, client: httpx.AsyncClient) -> None:
        """One probe of each backend whose circuit has been open long enough."""
        await circuits.probe_all(self.database, client)

    async def read_stats(self, client: httpx.AsyncClient) -> None:
        """What backends say in their metrics, and how fast completed rollouts found them."""
        await self.speeds.write(self.database)
        await self.poller.poll(self.database, client)


async def _every(seconds: float, retry: float, what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Call `work` again and again; a refusal of the database or the store is logged once and retried."""
    refused = ""
    while True:
        try:
            await work()
            if refused:
                log.info("%s: works again", what)
            refused = ""
            pause = seconds
        except ApiError as error:
            if error.reason != refused:
                log.warning("%s: %s: %s", what, error.reason, error.detail)
            refused = error.reason
            pause = retry
        await asyncio.sleep(pause)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[ControlPlane]:
    """A control plane with its schema up to date and its background work going on.

    Raises:
        TokenFileError: the token file cannot be used.
        StateFolderInUse: another process serves this state folder.
        sqlalchemy.exc.OperationalError: the database cannot be opened.
    """
    await asyncio.to_thread(settings.state_dir.mkdir, parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as stack:
        if make_url(settings.database_url).get_backend_name() == "sqlite":
            stack.enter_context(lock.held(settings.state_dir))
        given = settings.tokens_file
        tokens = auth.load_or_make(settings.state_dir) if given is None else auth.load(given)
        async with _opened(settings, tokens) as plane:
            yield plane


@asynccontextmanager
async def _opened(settings: Settings, tokens: Tokens) -> AsyncIterator[ControlPlane]:
    database = Database(settings.database_url, sqlite_max_pages=settings.sqlite_max_pages)
    try:
        await asyncio.to_thread(migrate.upgrade, database.writer)
        plane = ControlPlane(settings, tokens, database)
        database.start(plane.after_commit)
        await _resume(plane)
        async with plane.http as client:
            background = [
                asyncio.create_task(_every(seconds, retry, what, work))
                for seconds, retry, what, work in _background(plane, client)
            ]
            plane.ready = True
            try:
                yield plane
            finally:
                plane.ready = False
                plane.bus.close()
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                await plane.coordinator.close()
    finally:
        await asyncio.to_thread(database.close)


def _background(
    plane: ControlPlane, client: httpx.AsyncClient
) -> list[tuple[float, float, str, Callable[[], Awaitable[None]]]]:
    """Seconds between two rounds, seconds before another try, a name and the work."""
    given = plane.settings
    # A server that is not ready may hold its check up with its first request: the others do not wait.
    serving = partial(plane.check_health, client, ready=True)
    starting = partial(plane.check_health, client, ready=False)
    circuit, stats = partial(plane.probe_circuits, client), partial(plane.read_stats, client)
    return [
        (given.sweep_seconds, given.sweep_seconds, "sweep", plane.sweep),
        (FLUSH_SECONDS, FLUSH_RETRY_SECONDS, "trajectory store", plane.flush),
        (given.health_seconds, given.health_seconds, "health", serving),
        (given.health_seconds, given.health_seconds, "first requests", starting),
        (given.circuit_seconds, given.circuit_seconds, "circuits", circuit),
        (given.stats_seconds, given.stats_seconds, "backend metrics", stats),
        (given.weights_seconds, given.weights_seconds, "weights", plane.coordinator.round),
    ]


async def _resume(plane: ControlPlane) -> None:
    """What a start owes to whatever was going on before: leases get their time, parts their end."""
    try:
        await plane.database.write(partial(liveness.grace, lease_seconds=plane.settings.lease_seconds))
        await plane.database.write(nodes.grace)
        await plane.database.write(partial(nodes.forget, silent_seconds=plane.settings.node_seconds))
    except StorageFull as error:
        # A full disk must not keep the control plane from starting: reading works, and room may come.
        log.warning("start: %s", error.detail)
    await plane.archive.adopt()


def ping(conn: Connection) -> None:
    """Raises when the database does not answer."""
    conn.exec_driver_sql("SELECT 1")
