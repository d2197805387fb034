"""Measure how fast each backend samples, as moving averages of completed Runs.

The averages are the sampled tokens per second of model time and of the whole Run, as a rollout sees
them, with batching, queues and load included. They fall with the load, so the load is kept with them.
They are gathered in memory after each commit and written a few times a second, so no completion pays
for it, and the end of a short job can rely on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from rollyard_api.storage import pools
from rollyard_api.storage.database import Database, Measured
from rollyard_api.storage.pools import MeasuredRuns

MIN_TOKENS = 16
"""The fewest tokens that are measured, since fewer show the round trip rather than the speed."""
MAX_LOADS = 10_000
"""The number of backends whose load is kept. Forgotten ones are counted again at the next lease."""
WEIGHT = 0.1
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
                self._loads.clear()  # Most are loads of servers that are gone.
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
        """Return what was gathered of each server, and clear it."""
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
        """Fold what was gathered into the backends' rows. Nothing is written if there is nothing."""
        gathered = self.take()
        if gathered:
            await database.write(partial(pools.fold_averages, measured=gathered), durable=False)
