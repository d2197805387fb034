"""What backends say of themselves: `/metrics` of every one, read every few seconds.

vLLM's names (the embedded engine's are the same). The prefix cache's counters become a hit rate
over a sliding window; a server that restarts counts from 0 again.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.backends.fetch import Unanswered, base_of, fetch
from rollyard_api.core.codec import dumps, loads
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.schema import backends

WINDOW_SECONDS = 300.0
"""Of the prefix cache's hit rate."""
READ_SECONDS = 2.0
"""Within which a server must give its metrics."""
MAX_AT_ONCE = 32
MATERIAL_HIT_RATE = 0.005
"""Smaller changes are not written."""
_MAX_BYTES = 8 << 20

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
_SAMPLE = re.compile(
    rf"^({RUNNING}|{WAITING}|{QUERIES}|{HITS})(?:\{{[^\n]*\}})?[ \t]+([^\s]+)".encode(), re.MULTILINE
)


def parse(text: bytes) -> dict[str, float]:
    """The four metrics in an exposition, each summed over its labels (one for each engine of a server).

    Only these lines are looked at: the whole text of a vLLM server is some 60 KB.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for match in _SAMPLE.finditer(text):
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            found[match[1].decode()] += value
    return dict(found)


@dataclass(slots=True)
class Window:
    """Growth of the two counters over the last WINDOW_SECONDS."""

    _steps: deque[tuple[float, float, float]] = field(default_factory=deque)
    _last: tuple[float, float] | None = None

    def add(self, now: float, queries: float, hits: float) -> None:
        """Take a reading; less than before means that the server began anew."""
        if self._last is not None:
            before = self._last if queries >= self._last[0] and hits >= self._last[1] else (0.0, 0.0)
            if queries > before[0]:
                self._steps.append((now, queries - before[0], hits - before[1]))
        self._last = (queries, hits)
        while self._steps and self._steps[0][0] <= now - WINDOW_SECONDS:
            self._steps.popleft()

    @property
    def rate(self) -> float | None:
        """Hits per query in [0, 1]; None while nothing was asked."""
        queries = sum(step[1] for step in self._steps)
        return min(1.0, sum(step[2] for step in self._steps) / queries) if queries else None


def document(read: dict[str, float], rate: float | None) -> dict[str, Any]:
    """The fields of BackendStatus that these readings give."""
    told: dict[str, Any] = {}
    for name, key in ((RUNNING, "runningRequests"), (WAITING, "waitingRequests")):
        if name in read:
            told[key] = int(read[name])
    if rate is not None:
        told["prefixCacheHitRate"] = round(rate, 4)
    return told


def material(before: dict[str, Any] | None, after: dict[str, Any] | None) -> bool:
    """Whether the change is worth a write."""
    if before is None or after is None or before.keys() != after.keys():
        return before != after
    drift = abs(before.get("prefixCacheHitRate", 0.0) - after.get("prefixCacheHitRate", 0.0))
    rest = [{k: v for k, v in one.items() if k != "prefixCacheHitRate"} for one in (before, after)]
    return rest[0] != rest[1] or drift >= MATERIAL_HIT_RATE


def _rows(conn: Connection) -> Sequence[Any]:
    return conn.execute(
        sa.select(backends.c.pool_id, backends.c.url, backends.c.ready, backends.c.stats)
    ).all()


_WRITE = (
    sa.update(backends)
    .where(backends.c.pool_id == bindparam("b_pool"), backends.c.url == bindparam("b_url"))
    .values(stats=bindparam("b_stats"))
)


@dataclass(slots=True)
class Poller:
    """Reads the metrics of every backend of every pool, and keeps a window for each URL."""

    _windows: dict[str, Window] = field(default_factory=dict)

    async def poll(self, database: Database, client: httpx.AsyncClient) -> None:
        """One round; what changed is written in one transaction."""
        rows = await database.read(_rows)
        urls = sorted({row.url for row in rows if row.ready})
        self._windows = {url: self._windows.get(url) or Window() for url in {row.url for row in rows}}
        places = asyncio.Semaphore(MAX_AT_ONCE)

        async def one(url: str) -> dict[str, Any] | None:
            async with places:
                return await self._read(client, url)

        read = dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))
        changes = []
        for row in rows:
            after = read.get(row.url)
            if material(None if row.stats is None else loads(row.stats), after):
                stats = None if after is None else dumps(after)
                changes.append({"b_pool": row.pool_id, "b_url": row.url, "b_stats": stats})
        if changes:

            def op(tx: Transaction) -> None:
                tx.conn.execute(_WRITE, changes)

            await database.write(op, durable=False)

    async def _read(self, client: httpx.AsyncClient, url: str) -> dict[str, Any] | None:
        try:
            status, text = await fetch(
                client, "GET", f"{base_of(url)}/metrics", seconds=READ_SECONDS, limit=_MAX_BYTES
            )
        except Unanswered:
            return None
        read = parse(text) if status == httpx.codes.OK else {}
        if not read:
            return None
        window = self._windows[url]
        if QUERIES in read and HITS in read:
            window.add(time.monotonic(), read[QUERIES], read[HITS])
        return document(read, window.rate)
