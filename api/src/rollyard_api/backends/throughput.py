"""How fast each backend samples: moving averages of completed Runs, written every few seconds.

Sampled tokens per second of model time, and of the whole Run, as a rollout sees it: batching,
queues and load included. That falls with the load, so the load is kept beside it.
Gathered in memory after each commit, so that no completion pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollyard_api.storage.database import Database, Measured, Transaction
from rollyard_api.storage.schema import backends

MIN_TOKENS = 16
"""Fewer tokens of one rollout say more of the round trip than of the speed."""
MAX_LOADS = 10_000
"""Backends whose load is kept; one that is forgotten is counted again at the next lease."""
WEIGHT = 0.1
"""The weight of one rollout in the moving average; k rollouts together weigh 1 - 0.9^k."""


def _averaged(name: str) -> sa.Case[float]:
    column, new = backends.c[name], bindparam(f"b_{name}", type_=sa.Double)
    weight = bindparam("b_weight", type_=sa.Double)
    return sa.case((column.is_(None), new), else_=column + weight * (new - column))


_FOLD = (
    sa.update(backends)
    .where(backends.c.url == bindparam("b_url"))
    .values(
        measured_at=bindparam("b_now", type_=sa.Double),
        **{name: _averaged(name) for name in ("speed", "pace", "pace_seconds", "pace_load")},
    )
)


@dataclass(slots=True)
class _Sum:
    tokens: int = 0
    seconds: float = 0.0
    run_seconds: float = 0.0
    loads: int = 0
    rollouts: int = 0


@dataclass(slots=True)
class Speeds:
    """What has been measured since the last write, by URL."""

    _sums: dict[str, _Sum] = field(default_factory=dict)
    _loads: dict[str, int] = field(default_factory=dict)

    def add(self, measured: Iterable[Measured], loads: Mapping[str, int] | None = None) -> None:
        """Take what completed Runs showed; tiny samples are left out.

        Args:
            measured: of each Run.
            loads: active rollouts by backend, where they were just counted: when Run was leased.
        """
        if loads:
            if len(self._loads) > MAX_LOADS:
                self._loads.clear()  # most are of servers that are gone
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

    def take(self) -> list[dict[str, float | str]]:
        """What was gathered, as parameters of the update; emptied."""
        sums, self._sums = self._sums, {}
        return [
            {
                "b_url": url,
                "b_speed": entry.tokens / entry.seconds,
                "b_pace": entry.tokens / entry.run_seconds,
                "b_pace_seconds": entry.run_seconds / entry.rollouts,
                "b_pace_load": entry.loads / entry.rollouts,
                "b_weight": 1.0 - (1.0 - WEIGHT) ** entry.rollouts,
            }
            for url, entry in sorted(sums.items())
        ]

    async def write(self, database: Database) -> None:
        """Fold what was gathered into the backends' rows; nothing is written when there is none."""
        gathered = self.take()
        if gathered:

            def op(tx: Transaction) -> None:
                tx.conn.execute(_FOLD, [row | {"b_now": tx.now} for row in gathered])

            await database.write(op, durable=False)
