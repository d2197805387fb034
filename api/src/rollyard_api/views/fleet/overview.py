"""The fleet at a glance: jobs by phase, queues by stage, rates, and pools with their backends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.backends import pools as pool_rows
from rollyard_api.core.codec import loads
from rollyard_api.storage.rows import BackendRow, PoolRow, columns, read_all
from rollyard_api.storage.schema import backends, pools
from rollyard_api.storage.view_tables import rates
from rollyard_api.views.job.folding import RATE_KEPT, RATE_SECONDS

PHASES: Final = ("Pending", "Init", "Run", "Eval", "Succeeded", "Failed", "Cancelled")
MAX_POOLS: Final = 500
_STAGES: Final = ("init", "run", "eval")
_POOLS = sa.select(*columns(PoolRow, pools)).order_by(pools.c.namespace, pools.c.name).limit(MAX_POOLS)
_BACKENDS = sa.select(*columns(BackendRow, backends)).order_by(backends.c.pool_id, backends.c.position)


def rates_view(conn: Connection, now: float) -> dict[str, Any]:
    """Return the rollouts that ended and their tokens in each bucket of the last minutes, oldest first."""
    buckets = RATE_KEPT // RATE_SECONDS
    start = (int(now) // RATE_SECONDS - buckets + 1) * RATE_SECONDS
    found = {row.start: row for row in conn.execute(sa.select(rates).where(rates.c.start >= start))}
    starts = [start + place * RATE_SECONDS for place in range(buckets)]
    return {
        "bucket_seconds": RATE_SECONDS,
        "start": start,
        "rollouts": [found[at].rollouts if at in found else 0 for at in starts],
        "tokens": [found[at].tokens if at in found else 0 for at in starts],
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
    given = list(rows)
    if any(row.ready and row.weights == "Current" and row.circuit == "Closed" for row in given):
        return "Ready"
    return "Updating" if any(row.weights == "Updating" for row in given) else "NotReady"


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
        "max_active": pool.max_active,
        "speed": None if row.speed is None else round(row.speed, 1),
        "kv_hits": stats.get("prefixCacheHitRate"),
        "draining": bool(row.draining),
        "message": message,
    }


def phases(jobs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of jobs in each phase, given their slim rows."""
    found = Counter(job["phase"] for job in jobs)
    return {phase: found[phase] for phase in PHASES}


def queues(jobs: Iterable[Mapping[str, Any]], slots: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the rollouts that wait for and are in each stage, and the places of all workers."""
    found = {stage: {"queued": 0, "active": 0, "slots": slots.get(stage, 0)} for stage in _STAGES}
    for job in jobs:
        if job["finished_at"] is None:
            for stage in _STAGES:
                for name in ("queued", "active"):
                    found[stage][name] += job["stages"][stage][name]
    for one in found.values():
        one["slots"] = max(one["slots"], one["active"])
    return found
