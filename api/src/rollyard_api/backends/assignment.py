"""The assignment of rollouts to backends, by routers that are filled from the tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.lease import MAX_BATCH, NoBackend
from sqlalchemy import bindparam

from rollyard_api.backends.circuits import Breaker
from rollyard_api.backends.router import Backend, Pace, Router, limit_of
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import RoutedBackend, columns, read_all
from rollyard_api.storage.schema import backends, jobs, pools, rollouts

Key = tuple[str, str]
"""A pool's namespace and name."""

FRESH_SECONDS: Final = 300.0
"""The age in seconds up to which a pace holds rollouts back, since a slow backend may have become faster.

See FRESH_RUNS for pools where Run takes long.
"""
FRESH_RUNS: Final = 3.0
"""Where Run takes long, a pace holds rollouts back up to this multiple of a rollout's time in Run."""
RETRY_SECONDS: Final = 1.0
"""The time in seconds after which a rollout that found no backend asks again."""
MAX_COUNTED: Final = 5_000
"""The limit up to which waiting rollouts are counted. Beyond it, they just count as many."""
_SHORTEST_RETRY: Final = 0.25
_LONGEST_RETRY: Final = 5.0

ACTIVE: Final = (
    sa.select(rollouts.c.job_id, rollouts.c.state, rollouts.c.backend, sa.func.count().label("n"))
    .where(rollouts.c.lease_expires.is_not(None))
    .group_by(rollouts.c.job_id, rollouts.c.state, rollouts.c.backend)
)
"""Counts the leased rollouts by job, state and backend."""
_POOLS: Final = sa.select(*columns(RoutedBackend, backends, pools)).join_from(
    pools, backends, sa.and_(backends.c.pool_id == pools.c.id, backends.c.ready.is_(True))
)
_JOB_POOLS: Final = sa.select(jobs.c.id, jobs.c.namespace, jobs.c.pool).where(
    jobs.c.id.in_(bindparam("b_ids", expanding=True))
)
_WAITING: Final = sa.select(sa.func.count()).select_from(
    sa.select(sa.literal(1))
    .select_from(rollouts)
    .join(jobs, jobs.c.id == rollouts.c.job_id)
    .where(
        jobs.c.namespace == bindparam("b_namespace"),
        jobs.c.pool == bindparam("b_pool"),
        jobs.c.finished_at.is_(None),
        jobs.c.deleted_at.is_(None),
        jobs.c.cancel_reason.is_(None),
        jobs.c.suspended.is_(False),
        rollouts.c.state.in_([RolloutState.QUEUED_INIT, RolloutState.LEASED_INIT, RolloutState.QUEUED_RUN]),
    )
    .limit(bindparam("b_limit"))
    .subquery()
)
"""Counts the rollouts of a pool that have not begun Run, up to a limit."""
_BEGAN: Final = (
    sa.select(rollouts.c.backend, sa.func.max(rollouts.c.since))
    .where(rollouts.c.lease_expires.is_not(None), rollouts.c.state == RolloutState.LEASED_RUN)
    .where(rollouts.c.backend.in_(bindparam("b_urls", expanding=True)))
    .group_by(rollouts.c.backend)
)
"""Selects when a rollout last began on each backend, among the rollouts that are still in Run."""
_LOCK: Final = (
    sa.select(pools.c.id)
    .where(sa.tuple_(pools.c.namespace, pools.c.name).in_(bindparam("b_keys", expanding=True)))
    .order_by(pools.c.id)
    .with_for_update(key_share=True)
)


def lock(tx: Transaction, keys: Iterable[Key]) -> None:
    """Keep other replicas from assigning places of these pools until this transaction ends.

    This must be called before the active rollouts are counted, because two replicas that count at the
    same moment would assign the same places. With SQLite there is one writer, and nothing is locked.
    """
    ordered = sorted(set(keys))
    if ordered and not tx.sqlite:
        tx.conn.execute(_LOCK, {"b_keys": ordered})


def _pace(row: RoutedBackend, now: float) -> Pace | None:
    if row.pace is None or row.pace_seconds is None or row.pace_load is None or row.measured_at is None:
        return None
    if now - row.measured_at > max(FRESH_SECONDS, FRESH_RUNS * row.pace_seconds):
        return None
    return Pace(row.pace, row.pace_load, row.pace_seconds)


def _backend(row: RoutedBackend, active: int, now: float) -> Backend:
    return Backend(
        row.url,
        row.policy_version,
        active,
        row.speed,
        row.policy_index,
        _pace(row, now),
        max_active=limit_of(row.max_active, row.places),
    )


def eligible(row: RoutedBackend) -> bool:
    """Return whether a ready backend may get rollouts."""
    return row.weights == "Current" and row.circuit == "Closed" and not row.draining and not row.paused


class Routers:
    """A router for each pool, filled from this transaction's counts of rollouts in Run."""

    def __init__(self, tx: Transaction, active: Iterable[Any]) -> None:
        """Read the pools. The argument `active` holds rows of ACTIVE."""
        self._rows: defaultdict[Key, list[RoutedBackend]] = defaultdict(list)
        for row in read_all(RoutedBackend, tx.conn.execute(_POOLS)):
            self._rows[row.namespace, row.name].append(row)
        running = [row for row in active if row.state == RolloutState.LEASED_RUN and row.backend is not None]
        load: defaultdict[str, int] = defaultdict(int)
        for row in running:
            load[row.backend] += row.n
        displaced = self._displaced(tx, running) if self._rows else {}
        self._routers = {
            key: Router.of(
                [_backend(row, load[row.url], tx.now) for row in rows if eligible(row)],
                displaced.get(key, 0),
            )
            for key, rows in self._rows.items()
        }
        self._rehearsals: dict[Key, Router] = {}
        # The places promised to rollouts that are taken from the queue but not routed yet.
        self._promised: defaultdict[Key, int] = defaultdict(int)

    def _displaced(self, tx: Transaction, running: list[Any]) -> dict[Key, int]:
        """Count rollouts in Run, by pool, whose backend is gone or fails; they move before new ones begin."""
        sound = {row.url for rows in self._rows.values() for row in rows if row.circuit == "Closed"}
        homeless: defaultdict[int, int] = defaultdict(int)
        for row in running:
            if row.backend not in sound:
                homeless[row.job_id] += row.n
        if not homeless:
            return {}
        counts: defaultdict[Key, int] = defaultdict(int)
        for job in tx.conn.execute(_JOB_POOLS, {"b_ids": sorted(homeless)}):
            if job.pool is not None:
                counts[job.namespace, job.pool] += homeless[job.id]
        return counts

    def get(self, key: Key) -> Router | None:
        """Return the pool's router, or None if the pool has no ready backend."""
        return self._routers.get(key)

    def places(self, key: Key) -> int | None:
        """Return how many rollouts a pool takes at once, or None if it has no ready backend.

        Backends that take none at the moment, such as those whose weights are updated, count as well.
        """
        rows = [row for row in self._rows.get(key, ()) if not row.draining]
        return sum(limit_of(row.max_active, row.places) for row in rows) or None

    def admit(self, key: Key) -> bool:
        """Return whether the pool takes another rollout, with all promises of this transaction counted."""
        router = self._routers.get(key)
        if router is None or router.free <= self._promised[key]:
            return False
        if router.waiting is not None:
            # A copy shows whether the next rollout would have to wait, in the order of the queue.
            if key not in self._rehearsals:
                self._rehearsals[key] = router.copy()
            if self._rehearsals[key].choose(None, None) is None:
                return False
        self._promised[key] += 1
        return True

    def count_waiting(self, tx: Transaction, keys: Iterable[Key]) -> None:
        """Give the routers of these pools the number of waiting rollouts if it may matter, near the end."""
        for key in set(keys):
            router = self._routers.get(key)
            horizon = 0 if router is None else router.horizon(MAX_BATCH)
            if router is None or horizon == 0:
                continue
            limit = min(horizon + MAX_BATCH, MAX_COUNTED) + 1
            parameters = {"b_namespace": key[0], "b_pool": key[1], "b_limit": limit}
            waiting = int(tx.conn.execute(_WAITING, parameters).scalar_one())
            if 0 < waiting < limit:
                rows = tx.conn.execute(_BEGAN, {"b_urls": sorted(router.backends)})
                began = {url: since for url, since in rows}  # noqa: C416 - a result has keys(), as a mapping
                quiet = {
                    url: replace(backend, quiet=tx.now - began.get(url, tx.now))
                    for url, backend in router.backends.items()
                }
                self._routers[key] = replace(router, backends=quiet, waiting=waiting)

    def loads(self) -> dict[str, int]:
        """Return the active rollouts of every eligible backend, including those assigned just now."""
        return {url: count for router in self._routers.values() for url, count in router.active.items()}

    def assignment(self, key: Key, chosen: Backend) -> dict[str, Any]:
        """Return the BackendAssignment of a rollout."""
        pool = self._rows[key][0]
        return {
            "pool": pool.name,
            "url": chosen.url,
            "model": pool.served_model or pool.model,
            "tokenizer": pool.tokenizer,
            "policy_version": chosen.policy_version,
        }

    def retry_after(self, key: Key, now: float) -> float:
        """Return the seconds to wait while no backend is available, until after a probe if one is due."""
        waits = [
            due
            for row in self._rows.get(key, ())
            if (due := Breaker(row.circuit, row.failures, row.opened_at).due_in(now)) is not None
        ]
        router = self._routers.get(key)
        if not waits or (router is not None and router.backends):
            return RETRY_SECONDS
        return min(max(min(waits) + _SHORTEST_RETRY, _SHORTEST_RETRY), _LONGEST_RETRY)

    def why_none(self, key: Key) -> NoBackend:
        """Return why a rollout that moves gets no backend now."""
        rows, router = self._rows.get(key, ()), self._routers.get(key)
        if router is not None and router.backends:
            return "BackendsFull"
        if any(row.paused for row in rows):
            return "PoolPaused"
        return "WeightsUpdating" if any(row.weights == "Updating" for row in rows) else "NoBackendReady"


def without_backend(tx: Transaction, keys: Iterable[Key]) -> set[Key]:
    """Return the pools among these that have no ready backend.

    A pool that is paused, or whose weights are being updated, has one. So has a pool whose backends are full.
    """
    routers = Routers(tx, ())
    return {key for key in keys if routers.why_none(key) == "NoBackendReady"}
