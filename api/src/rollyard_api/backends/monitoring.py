"""The state of servers: the health of external ones, the metrics of all, and how fast they sample.

A health check asks for /health, the model in /v1/models, a first completion and the label of the weights.

The metrics are read every few seconds. The counters of the prefix cache become a hit rate over a sliding
window. A restarted server counts from 0 again.

What a server lacks for training is asked once, and again after some minutes, because it may have been
restarted with other options.

The speeds are moving averages of completed Runs: the sampled tokens per second of model time and of the whole
Run, as a rollout sees them, with batching, queues and load included. They fall with the load, so the load is
kept with them. They are gathered in memory after each commit and written a few times a second, so no
completion pays for it, and the end of a short job can rely on them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.weights import UNVERIFIED
from rollyard_inference import capabilities, fitness, health, metrics
from rollyard_inference.errors import BackendError, BackendUnavailable
from rollyard_inference.metrics import ServerMetrics
from rollyard_inference.transports.interface import Transport, base_url
from sqlalchemy.engine import Connection

from rollyard_api.backends import pools
from rollyard_api.backends.circuits import each
from rollyard_api.backends.pools import Seen
from rollyard_api.backends.router import places_of
from rollyard_api.core.codec import dumps, loads
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage.database import Database, Measured
from rollyard_api.storage.pools import MeasuredRuns, ReportedStats
from rollyard_api.storage.rows import BackendRow, PoolRow
from rollyard_api.storage.schema import backends
from rollyard_api.storage.schema import pools as pools_table

CHECK_TIMEOUT: Final = 5.0
"""The time limit for each request except the first completion, in seconds."""
FIRST_REQUEST_SECONDS: Final = 30.0
"""The time limit for a server's first completion, in seconds.

The server may compile kernels for it. A later round tries again.
"""


async def check(transport: Transport, url: str, model: str, *, warm: bool) -> Seen:
    """Check whether the server is healthy, serves the model and samples, and if not, why.

    Args:
        warm: Whether the server has answered a first request before, so that it need not be repeated.
    """
    try:
        await health.check_alive(transport, url, CHECK_TIMEOUT)
        await health.check_model(transport, url, model, CHECK_TIMEOUT)
    except BackendError as error:
        return Seen(False, str(error)[:1000])
    if not warm:
        try:
            await health.first_request(transport, url, model, FIRST_REQUEST_SECONDS)
        except BackendError as error:
            return Seen(False, f"its first request failed: {error}"[:1000])
    return Seen(True, "", await _label(transport, url))


async def _label(transport: Transport, url: str) -> str | None:
    try:
        label = await health.weight_label(transport, url, CHECK_TIMEOUT)
    except BackendError:
        return None
    # A label between loading and verification concerns only the weight update.
    return None if label is None or label.startswith(UNVERIFIED) else label[:128]


async def check_all(database: Database, transport: Transport, *, ready: bool | None = None) -> None:
    """Check each external backend once and write the changes; `ready` selects those that are (not) ready."""
    where = [pools_table.c.external.is_(True)]
    if ready is not None:
        where.append(backends.c.ready.is_(ready))

    async def one(row: BackendRow, pool: PoolRow) -> None:
        before = Seen.of(row)
        after = await check(transport, row.url, pool.model, warm=row.ready)
        label = row.policy_version if after.policy_version is None else after.policy_version
        if replace(after, policy_version=label) != before:
            write = partial(pools.mark, pool_id=row.pool_id, url=row.url, before=before, after=after)
            await database.write(write)

    await each(await database.read(lambda conn: pool_rows.with_pools(conn, *where)), one)


WINDOW_SECONDS: Final = 300.0
"""The length in seconds of the window of the prefix cache's hit rate."""
READ_SECONDS: Final = 2.0
"""The time within which a server must return its metrics, in seconds."""
SIZES_SECONDS: Final = 60.0
"""The age up to which the context and the cache of a server that stays ready are not asked for again."""
MATERIAL_HIT_RATE: Final = 0.005
"""The smallest change of the hit rate that is written."""
ASSESSED_SECONDS: Final = 300.0
"""The time after which a server is asked again what it lacks for training, in seconds."""
MAX_TRAINS: Final = 512
"""The largest number of characters of the answer that is kept."""
_MAX_BYTES: Final = 8 << 20


@dataclass(slots=True)
class Window:
    """The growth of the two counters over the last WINDOW_SECONDS."""

    _steps: deque[tuple[float, float, float]] = field(default_factory=deque)
    _last: tuple[float, float] | None = None

    def add(self, now: float, queries: float, hits: float) -> None:
        """Add a reading. Lower counters than before mean that the server was restarted."""
        if self._last is not None:
            before = self._last if queries >= self._last[0] and hits >= self._last[1] else (0.0, 0.0)
            if queries > before[0]:
                self._steps.append((now, queries - before[0], hits - before[1]))
        self._last = (queries, hits)
        while self._steps and self._steps[0][0] <= now - WINDOW_SECONDS:
            self._steps.popleft()

    @property
    def rate(self) -> float | None:
        """The hits per query in [0, 1], or None without queries."""
        queries = sum(step[1] for step in self._steps)
        return min(1.0, sum(step[2] for step in self._steps) / queries) if queries else None


def document(read: ServerMetrics, rate: float | None) -> dict[str, Any]:
    """Return the fields of BackendStatus that follow from a reading and the cache's hit rate."""
    fields: dict[str, Any] = {}
    if read.running is not None:
        fields["runningRequests"] = int(read.running)
    if read.waiting is not None:
        fields["waitingRequests"] = int(read.waiting)
    if rate is not None:
        fields["prefixCacheHitRate"] = round(rate, 4)
    return fields


def material(before: dict[str, Any] | None, after: dict[str, Any] | None) -> bool:
    """Return whether the change is worth a write."""
    if before is None or after is None or before.keys() != after.keys():
        return before != after
    drift = abs(before.get("prefixCacheHitRate", 0.0) - after.get("prefixCacheHitRate", 0.0))
    rest = [{k: v for k, v in fields.items() if k != "prefixCacheHitRate"} for fields in (before, after)]
    return rest[0] != rest[1] or drift >= MATERIAL_HIT_RATE


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a server says about its model's context and, unless its metrics do, about its KV cache."""

    context: int | None = None
    """In tokens, or None if it does not say."""
    cache: int | None = None
    """In tokens, or None if it does not say."""
    until: float = 0.0
    """The monotonic time from which they are asked for again."""

    def document(self, read: ServerMetrics) -> dict[str, Any]:
        """Return the fields of BackendStatus that follow from these sizes and a reading of the metrics."""
        sizes = {"contextTokens": self.context, "kvCacheTokens": read.cache_tokens or self.cache}
        return {name: tokens for name, tokens in sizes.items() if tokens is not None}


async def _sizes(transport: Transport, url: str, model: str, *, cache: bool) -> Sizes | None:
    """Return what a server says about its sizes, or None if it does not answer.

    Args:
        cache: Whether to ask for the size of the KV cache, too.
    """
    try:
        served = await health.find_model(transport, url, model, READ_SECONDS)
        if served.max_model_len is None and served.parent is not None:
            served = await health.find_model(transport, url, served.parent, READ_SECONDS)
        tokens = await capabilities.cache_tokens(transport, url, READ_SECONDS) if cache else None
    except BackendUnavailable:
        return None
    except BackendError:
        return Sizes(until=time.monotonic() + SIZES_SECONDS)
    return Sizes(served.max_model_len, tokens, time.monotonic() + SIZES_SECONDS)


def _rows(conn: Connection) -> Sequence[Any]:
    shown = [backends.c[name] for name in ("pool_id", "url", "ready", "places", "stats")]
    query = sa.select(*shown, pools_table.c.model)
    return conn.execute(query.join_from(backends, pools_table, pools_table.c.id == backends.c.pool_id)).all()


def _samplers(conn: Connection) -> list[tuple[BackendRow, PoolRow]]:
    """Return the backends that sample now, each with its pool."""
    sample = (backends.c.ready.is_(True), backends.c.weights == "Current", backends.c.circuit == "Closed")
    return pool_rows.with_pools(conn, *sample, pools_table.c.paused.is_(False))


@dataclass(slots=True)
class Poller:
    """Reads the metrics and the sizes of every backend of every pool, and keeps a window for each URL."""

    _windows: dict[str, Window] = field(default_factory=dict)
    _trains: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By URL, whether a server has what training needs, and when it was asked."""
    _sizes: dict[str, Sizes] = field(default_factory=dict)

    async def poll(self, database: Database, transport: Transport) -> None:
        """Read all metrics once, and write the changes in one transaction."""
        rows = await database.read(_rows)
        urls = {row.url for row in rows}
        self._windows = {url: self._windows.get(url) or Window() for url in urls}
        # A server that has just become ready may be another process than before.
        fresh = {row.url for row in rows if row.places is None}
        self._sizes = {url: sizes for url, sizes in self._sizes.items() if url in urls - fresh}
        # A server that is not ready may come back with other options.
        ready = {row.url for row in rows if row.ready}
        self._trains = {url: answer for url, answer in self._trains.items() if url in ready}
        read: dict[str, dict[str, Any] | None] = {}

        async def one(url: str, model: str) -> None:
            read[url] = await self._read(transport, url, model)

        await each(sorted({row.url: row.model for row in rows if row.ready}.items()), one)
        changes, regrown = [], False
        for row in rows:
            after, places = read.get(row.url), row.places
            # A server that has not answered lately keeps what is known of it.
            answered = after is not None and row.url in self._sizes
            if row.ready and (answered or places is None):
                sizes = after or {}
                places = places_of(sizes.get("kvCacheTokens"), sizes.get("contextTokens"))
            regrown |= places != row.places
            if places != row.places or material(None if row.stats is None else loads(row.stats), after):
                stats = None if after is None else dumps(after)
                changes.append(ReportedStats(row.pool_id, row.url, stats, places))
        if changes:
            write = partial(pool_rows.put_stats, reported=changes, places=regrown)
            await database.write(write, durable=False)

    async def assess(self, database: Database, transport: Transport) -> None:
        """Ask each server that samples, and has not been asked for some minutes, what it lacks for training.

        The next poll writes the answer.
        """

        async def one(url: str, model: str) -> None:
            try:
                answers = await fitness.ask(transport, url, model, needed_only=True)
            except BackendError:
                return  # Health checks say what is wrong. The next round asks again.
            if answers.paused:
                return
            line = fitness.in_a_line(fitness.checks(answers))
            self._trains[url] = (line[:MAX_TRAINS], time.monotonic())

        now = time.monotonic()
        due = {
            row.url: pool.served_model or pool.model
            for row, pool in await database.read(_samplers)
            if row.url not in self._trains or now - self._trains[row.url][1] >= ASSESSED_SECONDS
        }
        await each(due.items(), one)

    async def _read(self, transport: Transport, url: str, model: str) -> dict[str, Any] | None:
        fields = await self._metrics(transport, url, model)
        if url in self._trains:
            fields = {**(fields or {}), "trains": self._trains[url][0]}
        return fields

    async def _metrics(self, transport: Transport, url: str, model: str) -> dict[str, Any] | None:
        address = f"{base_url(url)}/metrics"
        try:
            reply = await transport.request("GET", address, seconds=READ_SECONDS, limit=_MAX_BYTES)
        except BackendError:
            return None
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return None
        read = metrics.parse(reply.content) if reply.status == HTTPStatus.OK else ServerMetrics()
        known = self._sizes.get(url, Sizes())
        if time.monotonic() >= known.until:
            answer = await _sizes(transport, url, model, cache=read.cache_tokens is None)
            if answer is not None:
                known = self._sizes[url] = answer
        window = self._windows[url]
        if read.prefix_queries is not None and read.prefix_hits is not None:
            window.add(time.monotonic(), read.prefix_queries, read.prefix_hits)
        return document(read, window.rate) | known.document(read) or None


MIN_TOKENS: Final = 16
"""The fewest tokens that are measured, since fewer show the round trip rather than the speed."""
MAX_LOADS: Final = 10_000
"""The number of backends whose load is kept. Dropped ones are counted again at the next lease."""
WEIGHT: Final = 0.1
"""The weight of one rollout in the moving average; k rollouts together have the weight 1 - 0.9^k."""


@dataclass(slots=True)
class _Sum:
    tokens: int = 0
    seconds: float = 0.0
    run_seconds: float = 0.0
    loads: int = 0
    rollouts: int = 0


@dataclass(slots=True)
class Speeds:
    """The measurements since the last write, by URL."""

    _sums: dict[str, _Sum] = field(default_factory=dict)
    _loads: dict[str, int] = field(default_factory=dict)

    def add(self, measured: Iterable[Measured], loads: Mapping[str, int] | None = None) -> None:
        """Add the measurements of completed Runs, except tiny ones.

        Args:
            measured: The measurement of each Run.
            loads: The active rollouts by backend, if they were just counted, which is when Run is leased.
        """
        if loads:
            if len(self._loads) > MAX_LOADS:
                self._loads.clear()  # Most of them belong to servers that are gone.
            self._loads.update(loads)
        for url, tokens, seconds, run_seconds in measured:
            if tokens < MIN_TOKENS or not (seconds > 0 and math.isfinite(seconds)):
                continue
            entry = self._sums.setdefault(url, _Sum())
            entry.tokens += tokens
            entry.seconds += seconds
            entry.run_seconds += max(seconds, run_seconds)
            entry.loads += max(1, self._loads.get(url, 1))
            entry.rollouts += 1

    def take(self) -> list[MeasuredRuns]:
        """Return what was gathered about each server, and clear it."""
        sums, self._sums = self._sums, {}
        return [
            MeasuredRuns(
                url,
                weight=1.0 - (1.0 - WEIGHT) ** entry.rollouts,
                speed=entry.tokens / entry.seconds,
                pace=entry.tokens / entry.run_seconds,
                pace_seconds=entry.run_seconds / entry.rollouts,
                pace_load=entry.loads / entry.rollouts,
            )
            for url, entry in sorted(sums.items())
        ]

    async def write(self, database: Database) -> None:
        """Fold what was gathered into the backends' rows. Nothing is written if nothing was gathered."""
        gathered = self.take()
        if gathered:
            await database.write(partial(pool_rows.fold_averages, measured=gathered), durable=False)
