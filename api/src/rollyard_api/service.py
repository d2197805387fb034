"""The control plane: one object with database, bus, events, metrics, archive and background work."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final, TypeVar

import httpx
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_process.telemetry.export import SpanExport, exporting
from sqlalchemy.engine import Connection, make_url

from rollyard_api.access.bearer_tokens import TokenFile, Tokens
from rollyard_api.access.permissions import BoundJobs
from rollyard_api.backends import circuits, monitoring
from rollyard_api.backends.monitoring import Poller, Speeds
from rollyard_api.browsers.door import Door
from rollyard_api.browsers.sessions import Sessions, WrongCodes
from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.entrypoints import Extensions
from rollyard_api.core.limits import Limit
from rollyard_api.core.problems import RETRY_AFTER, ApiError, StorageFull, TimedOut, Unavailable
from rollyard_api.core.wakeups import BACKENDS, Bus, EmptyAnswers
from rollyard_api.jobs import jobs
from rollyard_api.jobs.blobs import Uploads
from rollyard_api.jobs.events import EventHub
from rollyard_api.jobs.reward_services import RewardServices
from rollyard_api.jobs.task_reader import TaskReader
from rollyard_api.machine.states import ENDED
from rollyard_api.metrics import Metrics
from rollyard_api.rollouts import assignments, claims, heartbeats, sweeps
from rollyard_api.settings import Settings
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Database, Transaction, locked_state_dir, upgrade
from rollyard_api.storage.rows import EndedRollout, RolloutSize
from rollyard_api.trajectories.archive import Archive
from rollyard_api.trajectories.object_store import open_store
from rollyard_api.views.fleet.feed import FleetFeed
from rollyard_api.views.fleet.overview import FleetReader
from rollyard_api.views.fleet.workers import SeenWorkers
from rollyard_api.views.job.folding import Folding
from rollyard_api.views.rollout.live import Watching
from rollyard_api.views.rollout.records import KeptRecords
from rollyard_api.views.rollout.texts import TokenTexts
from rollyard_api.weights import checkpoints
from rollyard_api.weights.coordinator import Coordinator

HEARD_SECONDS: Final = 5.0
"""The time between two records that a worker is still heard from, in seconds."""
NODE_SECONDS: Final = 60.0
"""The time in seconds without a request of any worker of a node after which the node's sandboxes have ended
by themselves."""
RECORD_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 60.0
"""The time after a start, in seconds, in which no rollout ends because its trainer has given no reward."""
_ENDS: Final = frozenset(state.status for state in ENDED)


class ViewObjects:
    """What is kept in memory for people who watch.

    Args:
        database: The database.
        disk: The threads in which folders of models are read.
        settings: Those of the control plane.
    """

    def __init__(self, database: Database, disk: Bulkhead, settings: Settings) -> None:
        self.fleet = FleetReader(database, settings.fleet_seconds, settings.max_harness_runs_per_namespace)
        self.feed = FleetFeed(self.fleet, database)
        self.folding = Folding(database)
        self.record_threads = Bulkhead("reading of records", threads=2, waiting=256, seconds=RECORD_SECONDS)
        """The threads in which records are parsed for people who view a piece of one."""
        self.kept_records = KeptRecords()
        self.token_texts = TokenTexts(disk)
        self.watching = Watching(alone=database.sqlite)
        self.seen_workers = SeenWorkers(database, HEARD_SECONDS)

    def after_commit(self, tx: Transaction) -> None:
        """Note what a transaction that has just been committed ended, and which workers had trouble."""
        if tx.events:
            self.folding.note(job_id for job_id, data in tx.events if data["status"] in _ENDS)
        if tx.troubles:
            self.seen_workers.troubled(tx.troubles, tx.now)


log = logging.getLogger("rollyard.api")

T = TypeVar("T")

SERVICE: Final = "rollyard-control-plane"
"""The attribute `service.name` of the spans that a control plane sends."""
DISK_SECONDS: Final = 30.0
PARSE_SECONDS: Final = 60.0
LOOKS: Final = 4
"""The largest number of simultaneous looks at the database for long polls of one namespace."""
GRANTS: Final = 16
"""The number of lease requests of one namespace that wait for the database's writer at the same time."""
REWARD_CALLS: Final = 64
"""The number of simultaneous requests to reward services of one namespace. Further ones wait."""
EVENT_BUFFER: Final = 4096
"""The number of events that are kept per job for resuming, and that one subscriber may fall behind."""
FLUSH_SECONDS: Final = 1.0
"""The time between two looks at the results that wait for the trajectory store, in seconds. Each part costs
about as much as ten results, and results that wait are delivered from the database."""
BACKLOG: Final = 64
"""If at least this many results wait after a round of storing, the next round follows at once."""
FLUSH_RETRY_SECONDS: Final = 2.0


class ControlPlane:
    """The objects that requests share. They are created by `running`."""

    def __init__(
        self, settings: Settings, token_file: TokenFile, database: Database, traces: SpanExport | None = None
    ) -> None:
        self.settings = settings
        self.traces = traces
        """The export of spans, or None if nothing is traced."""
        database.trace_sample = 0.0 if traces is None else settings.traces.sample
        self.token_file = token_file
        self.database = database
        self.bus = Bus(None if database.sqlite else settings.recheck_seconds)
        self.events = EventHub(EVENT_BUFFER)
        self.metrics = Metrics(traces)
        patience = settings.store_seconds
        store = open_store(settings.trajectories_url, 3 * patience)
        self.archive = Archive(database, store, patience)
        self.disk = Bulkhead("folder of weights", threads=4, waiting=256, seconds=DISK_SECONDS)
        """The threads for the folders of weights that updates name."""
        self.parsing = Bulkhead("reading of tasks", threads=2, waiting=256, seconds=PARSE_SECONDS)
        """The threads for request bodies that take long to read."""
        self.token_reads = Bulkhead("token file", threads=1, waiting=16, seconds=DISK_SECONDS)
        self.polls = Limit("long polls", each=settings.max_polls_per_namespace, total=settings.max_polls)
        self.worker_polls = Limit(
            "long polls of workers",
            each=settings.max_worker_polls_per_namespace,
            total=settings.max_worker_polls,
        )
        self.streams = Limit(
            "event streams", each=settings.max_streams_per_namespace, total=settings.max_streams
        )
        self._pages = {
            source: Limit(
                f"requests for results in the {source}",
                each=settings.max_pages_per_namespace,
                total=settings.max_pages,
                seconds=settings.store_seconds,
            )
            for source in ("trajectory store", "database")
        }
        self.looks = Limit("looks at the database", each=LOOKS, total=64 * LOOKS)
        self.grants = Limit("requests for leases", each=GRANTS, total=64 * GRANTS)
        self.empty_answers = EmptyAnswers()
        self.views = ViewObjects(database, self.disk, settings)
        self.searches = Limit("searches", each=2, total=4, seconds=settings.store_seconds)
        self.uploads = Uploads(database, settings.blob_limits)
        self.task_reader = TaskReader(settings.task_sources, settings.task_limits, self.uploads.pieces)
        self.sandbox_hosts = settings.sandbox_hosts
        self.reward_services = RewardServices(settings.reward_services)
        self.reward_turns = Limit(
            "requests to reward services",
            each=REWARD_CALLS,
            total=4 * REWARD_CALLS,
            seconds=settings.store_seconds,
        )
        self.extensions = Extensions(settings.plugins)
        self.bound_jobs = BoundJobs(database)
        self.sessions = Sessions(
            database, settings.session_idle_seconds, settings.session_seconds, lambda: self.tokens.by_role
        )
        self.door = Door(self.sessions, settings.host_check, settings.path_prefix)
        self.wrong_codes = WrongCodes()
        self.unclaimed = heartbeats.Unclaimed()
        self.speeds = Speeds()
        self.poller = Poller()
        self.http = httpx.AsyncClient(timeout=monitoring.CHECK_TIMEOUT, trust_env=False)
        self.transport = HttpxTransport(self.http)
        """The transport that every call to a backend uses."""
        python = settings.verify_python or checkpoints.default_python()
        self.coordinator = Coordinator(
            database, self.transport, checkpoints.Forward(python, self.disk), settings.weight_limits
        )
        self.began = time.time()
        self.ready = False

    @property
    def tokens(self) -> Tokens:
        """The tokens that are in force at the moment."""
        return self.token_file.tokens

    async def look_at_tokens(self) -> None:
        """Read the token file again."""
        await self.token_reads.run(self.token_file.look)

    def close(self) -> None:
        """Stop the threads, without waiting for those that hang."""
        for threads in (self.archive, self.disk, self.parsing, self.token_reads, self.views.record_threads):
            threads.close()
        self.task_reader.close()
        self.reward_services.close()
        self.uploads.close()
        self.extensions.close()

    def after_commit(self, committed: Sequence[Transaction]) -> None:
        """Inform waiters, subscribers and metrics of the transactions that have just been committed."""
        wakes: set[str] = set()
        for tx in committed:
            wakes |= tx.wakes
            for job_id, data in tx.events:
                self.events.publish(job_id, "transition", data)
            if self.traces is not None:
                for span in tx.spans:
                    self.traces.add(span)
            self.metrics.add(tx.counted)
            self.speeds.add(tx.measured, tx.loads)
            self.views.after_commit(tx)
        if wakes:
            self.bus.wake(wakes)

    async def cancel_rest(self, job_id: int) -> None:
        """End the unfinished rollouts of a cancelled job, batch by batch, and release their claims."""
        while await self.database.write(partial(jobs.cancel_some, job_id=job_id)):
            pass
        await self.database.write(claims.release_unneeded, durable=False)

    def pages_of(self, rows: Sequence[RolloutSize | EndedRollout]) -> Limit:
        """Return the places for answers with these results.

        Results in the trajectory store and in the database have separate places, and a store that hangs holds
        no place of the others.
        """
        return self._pages["trajectory store" if any(row.pending is None for row in rows) else "database"]

    async def look(self, namespace: str, query: Callable[[Connection], T]) -> T:
        """Read from the database for a namespace ("" stands for all) when it is its turn."""
        async with self.looks.turn(namespace):
            return await self.database.read(query)

    async def refuse_when_full(self) -> None:
        """Refuse results while the trajectory store accepts none and the database holds its share of them.

        Raises:
            StorageFull: The store has no space left.
            Unavailable: The store accepts nothing for another reason.
        """
        refused = self.archive.refused
        if refused is None or await self.archive.unstored() < self.settings.max_unstored:
            return
        if isinstance(refused, StorageFull):
            raise StorageFull(
                "no space left for trajectories, and as many as may wait in the database do; "
                "make room in the trajectory store"
            )
        raise Unavailable(
            "as many trajectories as may wait in the database do, and their store takes none: "
            f"{refused.detail}",
            headers=RETRY_AFTER,
        )

    async def sweep(self) -> None:
        """Run one round of expiry, deadlines, cancellations, claims and removals."""
        write, read = self.database.write, self.database.read
        settings = self.settings
        # Each operation has the size of its batches, or 0 if it does everything at once.
        work: tuple[tuple[Callable[[Transaction], int | None], int], ...] = (
            (sweeps.expire, sweeps.EXPIRY_BATCH),
            (partial(heartbeats.give_up_silent, silent_seconds=NODE_SECONDS), heartbeats.NODE_BATCH),
            (sweeps.note_outages, 0),
            (partial(sweeps.end_overdue, patience=settings.no_backend_seconds), sweeps.OUTAGE_BATCH),
            (partial(sweeps.end_unrewarded, not_before=self.began + GRACE_SECONDS), sweeps.OUTAGE_BATCH),
            (jobs.enforce, 0),
            (claims.release_unneeded, 0),
        )
        # The writer takes all of them in one transaction, in this order. Usually none has much to do.
        counts = await asyncio.gather(*(write(op, durable=False) for op, _ in work))
        for (op, batch), count in zip(work, counts, strict=True):
            while batch and (count or 0) >= batch:
                count = await write(op, durable=False)
        cancelled, deleted, assigned = await read(
            lambda conn: (job_rows.cancelling(conn), job_rows.removable(conn), assignments.has_old(conn))
        )
        for job_id in cancelled:
            await self.cancel_rest(job_id)
        for job_id in deleted:
            while not await write(partial(jobs.purge_some, job_id=job_id)):
                pass
            self.events.forget(job_id)
        if assigned:
            await write(assignments.forget_old, durable=False)
        await self.uploads.remove_unneeded()

    async def flush(self) -> None:
        """Store the trajectories that wait. A refusal is remembered until a round succeeds."""
        while await self.archive.flush() and await self.archive.unstored() >= BACKLOG:
            pass

    async def check_health(self, *, ready: bool) -> None:
        """Run one round of health checks of the external backends that are ready, or of all others."""
        await monitoring.check_all(self.database, self.transport, ready=ready)


async def _every(
    seconds: float,
    retry: float,
    name: str,
    work: Callable[[], Awaitable[None]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Call `work` in a loop; a refusal of the database or the store is logged once, and retried."""
    refused = ""
    while True:
        try:
            await work()
            if refused:
                log.info("%s: works again", name)
            refused = ""
            pause = seconds
        except ApiError as error:
            if error.reason != refused:
                log.warning("%s: %s: %s", name, error.reason, error.detail)
            refused = error.reason
            pause = retry
        except Exception:
            # One failure, whatever it is, must not end the work for all others.
            log.exception("%s: failed, and will be tried again", name)
            pause = max(retry, 1.0)
        await sleep(pause)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[ControlPlane]:
    """Yield a control plane whose schema is up to date and whose background work is running.

    Raises:
        OptionInvalid: The token file or a plugin cannot be used.
        ControlPlaneError: Another process serves this state folder, or this version does not know the
            database's.
        TraceOptionError: Traces are asked for, and the extra `traces` is not installed.
        sqlalchemy.exc.OperationalError: The database cannot be opened.
    """
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    async with AsyncExitStack() as stack:
        if make_url(settings.database_url).get_backend_name() == "sqlite":
            stack.enter_context(locked_state_dir(settings.state_dir))
        tokens = TokenFile(settings.state_dir, settings.tokens_file)
        instance = f"{socket.gethostname()}-{os.getpid()}"
        requested = settings.traces_asked
        traces = stack.enter_context(exporting(settings.traces, SERVICE, instance, required=requested))
        database = Database(settings.database_url, sqlite_max_pages=settings.sqlite_max_pages)
        stack.push_async_callback(database.close)
        await asyncio.to_thread(upgrade, database.writer)
        plane = ControlPlane(settings, tokens, database, traces)
        stack.callback(plane.close)
        await asyncio.to_thread(plane.extensions.check_plugins)
        database.start(plane.after_commit)
        try:
            await plane.archive.open()
        except TimedOut as error:
            # Jobs run without the store as long as the database has room for their results.
            log.warning("start: %s", error.detail)
        await _resume(plane)
        await stack.enter_async_context(plane.http)
        background = [
            asyncio.create_task(_every(seconds, retry, name, work))
            for seconds, retry, name, work in _background(plane)
        ]
        # A backend that has just become ready gets few rollouts until the size of its cache is known.
        pause = settings.stats_seconds
        stats = partial(plane.poller.poll, plane.database, plane.transport)
        soon = partial(plane.bus.sleep, BACKENDS)
        background.append(asyncio.create_task(_every(pause, pause, "backend metrics", stats, soon)))
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


def _background(plane: ControlPlane) -> list[tuple[float, float, str, Callable[[], Awaitable[None]]]]:
    """Return the background work: seconds between two rounds, seconds before a retry, name and function."""
    settings = plane.settings
    # The first request to a server that is not ready may delay its check. The checks of the others do not
    # wait for it.
    serving = partial(plane.check_health, ready=True)
    starting = partial(plane.check_health, ready=False)
    circuit = partial(circuits.probe_all, plane.database, plane.transport)
    trains = partial(plane.poller.assess, plane.database, plane.transport)
    speeds = partial(plane.speeds.write, plane.database)
    return [
        (settings.tokens_seconds, settings.tokens_seconds, "token file", plane.look_at_tokens),
        (settings.sweep_seconds, settings.sweep_seconds, "sweep", plane.sweep),
        (FLUSH_SECONDS, FLUSH_RETRY_SECONDS, "trajectory store", plane.flush),
        (settings.health_seconds, settings.health_seconds, "health", serving),
        (settings.health_seconds, settings.health_seconds, "first requests", starting),
        (settings.circuit_seconds, settings.circuit_seconds, "circuits", circuit),
        (settings.stats_seconds, settings.stats_seconds, "fitness for training", trains),
        (settings.speeds_seconds, settings.stats_seconds, "measured speeds", speeds),
        (settings.folding_seconds, settings.stats_seconds, "statistics", plane.views.folding.round),
        (settings.folding_seconds, settings.stats_seconds, "workers", plane.views.seen_workers.write),
        (settings.folding_seconds, settings.stats_seconds, "events of the fleet", plane.views.feed.tick),
        (settings.weights_seconds, settings.weights_seconds, "weights", plane.coordinator.round),
    ]


async def _resume(plane: ControlPlane) -> None:
    """Resume at a start what an earlier process left: leases get their full time, and parts are adopted."""
    try:
        await plane.database.write(partial(heartbeats.forget, silent_seconds=NODE_SECONDS))
        # This comes last, because every node counts as heard now after it.
        await plane.database.write(partial(heartbeats.grace, lease_seconds=plane.settings.lease_seconds))
    except StorageFull as error:
        # A full disk must not prevent a start, because reading still works and space may become free.
        log.warning("start: %s", error.detail)
    await plane.archive.adopt()
