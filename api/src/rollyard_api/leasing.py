"""Giving out leases: stage queues, shares of the jobs, backends, and the lease as its worker reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
import sqlalchemy as sa
from rollyard_crds.lease import MAX_BATCH
from rollyard_crds.rolloutjob import StageName
from sqlalchemy import bindparam

from rollyard_api import states, timing
from rollyard_api.codec import fragment
from rollyard_api.database import Transaction
from rollyard_api.fairness import Share, allocate
from rollyard_api.router import Backend, Router
from rollyard_api.schema import backends, groups, jobs, payloads, pools, rollouts

SERVED_ORDER: tuple[StageName, ...] = ("eval", "run", "init")
"""Later stages first: what is nearly done holds a sandbox."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked LeaseRequest."""

    worker: str
    node: str
    capacity: dict[StageName, int]
    job: str | None
    namespace: str | None


_LIVE = sa.select(jobs.c.id, jobs.c.uid, jobs.c.namespace, jobs.c.name, jobs.c.priority, jobs.c.pool).where(
    jobs.c.finished_at.is_(None),
    jobs.c.deleted_at.is_(None),
    jobs.c.cancel_reason.is_(None),
    jobs.c.suspended.is_(False),
)
_ACTIVE = (
    sa.select(rollouts.c.job_id, rollouts.c.state, rollouts.c.backend, sa.func.count().label("n"))
    .where(rollouts.c.lease_expires.is_not(None))
    .group_by(rollouts.c.job_id, rollouts.c.state, rollouts.c.backend)
)
_COLUMNS = (
    rollouts.c.id,
    rollouts.c.job_id,
    rollouts.c.group_no,
    rollouts.c.sample,
    rollouts.c.token,
    rollouts.c.since,
    rollouts.c.timings,
    rollouts.c.failures_init,
    rollouts.c.failures_run,
    rollouts.c.failures_eval,
    rollouts.c.sandbox,
    rollouts.c.backend,
)
_WAITING = (
    sa.select(*_COLUMNS)
    .where(
        rollouts.c.job_id == bindparam("b_job"),
        rollouts.c.state == bindparam("b_state"),
        rollouts.c.node == bindparam("b_node"),
    )
    .order_by(rollouts.c.place)
    .limit(bindparam("b_limit"))
    .with_for_update(skip_locked=True)
)
_GRANT = (
    sa.update(rollouts)
    .where(rollouts.c.id == bindparam("b_id"))
    .values(
        state=bindparam("b_state"),
        node=bindparam("b_node"),
        token=bindparam("b_token"),
        worker=bindparam("b_worker"),
        lease_expires=bindparam("b_expires"),
        since=bindparam("b_now"),
        timings=bindparam("b_timings"),
        backend=bindparam("b_backend"),
    )
)
_GROUPS = sa.select(groups.c.job_id, groups.c.no, groups.c.task_id, groups.c.task, groups.c.backend).where(
    groups.c.job_id == bindparam("b_job"), groups.c.no.in_(bindparam("b_nos", expanding=True))
)
_STICK = (
    sa.update(groups)
    .where(groups.c.job_id == bindparam("b_job"), groups.c.no == bindparam("b_no"))
    .values(backend=bindparam("b_backend"))
)
_PAYLOADS = sa.select(payloads).where(payloads.c.rollout_id.in_(bindparam("b_ids", expanding=True)))
_POOLS = sa.select(
    pools.c.namespace,
    pools.c.name,
    pools.c.model,
    pools.c.tokenizer,
    pools.c.max_active,
    backends.c.url,
    backends.c.policy_version,
).join_from(pools, backends, sa.and_(backends.c.pool_id == pools.c.id, backends.c.ready.is_(True)))


def grant(tx: Transaction, ask: Ask, lease_seconds: float) -> list[dict[str, Any]]:
    """Lease up to MAX_BATCH rollouts within the worker's capacity; [] when nothing waits for it."""
    live = {
        row.id: row
        for row in tx.conn.execute(_LIVE)
        if (ask.job is None or row.name == ask.job)
        and (ask.namespace is None or row.namespace == ask.namespace)
    }
    if not live:
        return []
    active = list(tx.conn.execute(_ACTIVE))
    loads: defaultdict[int, int] = defaultdict(int)
    for row in active:
        loads[row.job_id] += row.n
    leases: list[dict[str, Any]] = []
    for stage in SERVED_ORDER:
        places = min(ask.capacity.get(stage, 0), MAX_BATCH - len(leases))
        if places <= 0:
            continue
        routers = _Routers(tx, active) if stage == "run" else None
        shares = [Share(job_id, row.priority, loads[job_id]) for job_id, row in live.items()]
        fetch = partial(_waiting, tx, states.queued(stage), ask.node)
        admit = partial(_admit, live, routers)
        taken = allocate(shares, places, fetch, admit)
        for row in taken:
            loads[row.job_id] += 1
        if taken:
            leases += _granted(tx, ask, live, stage, taken, routers, lease_seconds)
    return leases


class _Routers:
    """A router per pool, filled from this transaction's counts of rollouts in Run."""

    def __init__(self, tx: Transaction, active: Sequence[Any]) -> None:
        load: defaultdict[str, int] = defaultdict(int)
        for row in active:
            if row.state == states.leased("run") and row.backend is not None:
                load[row.backend] += row.n
        self.pools: dict[tuple[str, str], Any] = {}
        ready: defaultdict[tuple[str, str], list[Backend]] = defaultdict(list)
        for row in tx.conn.execute(_POOLS):
            key = (row.namespace, row.name)
            self.pools[key] = row
            ready[key].append(Backend(row.url, row.policy_version, load[row.url]))
        self._routers = {key: Router.of(self.pools[key].max_active, ready[key]) for key in ready}
        # Places promised to rows that are taken and not yet routed.
        self._promised: defaultdict[tuple[str, str], int] = defaultdict(int)

    def get(self, key: tuple[str, str]) -> Router | None:
        return self._routers.get(key)

    def admit(self, key: tuple[str, str]) -> bool:
        """Whether the pool takes one more, all promises of this transaction counted."""
        router = self._routers.get(key)
        if router is None or router.free <= self._promised[key]:
            return False
        self._promised[key] += 1
        return True


def _admit(live: dict[int, Any], routers: _Routers | None, job_id: int) -> bool:
    job = live[job_id]
    return routers is None or job.pool is None or routers.admit((job.namespace, job.pool))


def _waiting(tx: Transaction, state: int, node: str, job_id: int, limit: int) -> list[Any]:
    asked = {"b_job": job_id, "b_state": state, "b_node": node, "b_limit": limit}
    rows: list[Any] = []
    if state != states.queued("init"):
        rows = list(tx.conn.execute(_WAITING, asked))
    if len(rows) < limit:
        rows += tx.conn.execute(_WAITING, asked | {"b_node": "", "b_limit": limit - len(rows)})
    return rows


def _granted(
    tx: Transaction,
    ask: Ask,
    live: dict[int, Any],
    stage: StageName,
    taken: list[Any],
    routers: _Routers | None,
    lease_seconds: float,
) -> list[dict[str, Any]]:
    by_group = _groups(tx, taken)
    kept = {}
    if stage != "init":
        ids = [row.id for row in taken]
        kept = {row.rollout_id: row for row in tx.conn.execute(_PAYLOADS, {"b_ids": ids})}
    changes, leases = [], []
    for row in taken:
        job, group = live[row.job_id], by_group[row.job_id, row.group_no]
        backend, assignment = row.backend, None
        if routers is not None and job.pool is not None:
            chosen = _route(tx, routers, job, row, by_group)
            if chosen is None:
                continue
            backend, assignment = chosen.url, _assignment(routers, job, chosen)
        queued = max(0.0, tx.now - row.since)
        changes.append(
            {
                "b_id": row.id,
                "b_state": states.leased(stage),
                "b_node": ask.node,
                "b_token": row.token + 1,
                "b_worker": ask.worker,
                "b_expires": tx.now + lease_seconds,
                "b_now": tx.now,
                "b_timings": timing.add(row.timings, stage, queued=queued, attempts=1),
                "b_backend": backend,
            }
        )
        payload = kept.get(row.id)
        lease = {
            "rollout": row.id,
            "token": row.token + 1,
            "stage": stage,
            "job": job.name,
            "namespace": job.namespace,
            "job_uid": job.uid,
            "group_id": group.task_id,
            "sample_index": row.sample,
            "attempt": getattr(row, f"failures_{stage}"),
            "queued_seconds": round(queued, 6),
            "lease_seconds": lease_seconds,
            "task": fragment(group.task),
            "sandbox": None if row.sandbox is None or stage == "init" else orjson.Fragment(row.sandbox),
            "backend": assignment,
            "carry": {} if payload is None or payload.carry is None else fragment(payload.carry),
            "trajectory": None,
        }
        if stage == "eval" and payload is not None and payload.trajectory is not None:
            lease["trajectory"] = fragment(payload.trajectory)
        leases.append(lease)
        tx.emit(row.job_id, rollout=row.id, stage=stage, status="leased", reward=None, reason="")
        tx.count("leases", stage)
        tx.count("queue_seconds", stage, value=queued)
    if changes:
        tx.conn.execute(_GRANT, changes)
    return leases


def _groups(tx: Transaction, rows: Sequence[Any]) -> dict[tuple[int, int], Any]:
    wanted: defaultdict[int, set[int]] = defaultdict(set)
    for row in rows:
        wanted[row.job_id].add(row.group_no)
    return {
        (group.job_id, group.no): group
        for job_id, nos in wanted.items()
        for group in tx.conn.execute(_GROUPS, {"b_job": job_id, "b_nos": sorted(nos)})
    }


def _route(
    tx: Transaction, routers: _Routers, job: Any, row: Any, by_group: dict[tuple[int, int], Any]
) -> Backend | None:
    router = routers.get((job.namespace, job.pool))
    if router is None:
        return None
    group = by_group[row.job_id, row.group_no]
    chosen = router.choose(row.backend, group.backend)
    if chosen is not None and (group.backend is None or group.backend not in router.backends):
        tx.conn.execute(_STICK, {"b_job": row.job_id, "b_no": row.group_no, "b_backend": chosen.url})
        by_group[row.job_id, row.group_no] = _Group(group.task_id, group.task, chosen.url)
    return chosen


@dataclass(frozen=True, slots=True)
class _Group:
    """A group's row with the backend that was just chosen for it."""

    task_id: str
    task: bytes
    backend: str


def _assignment(routers: _Routers, job: Any, chosen: Backend) -> dict[str, Any]:
    pool = routers.pools[job.namespace, job.pool]
    return {
        "pool": job.pool,
        "url": chosen.url,
        "model": pool.model,
        "tokenizer": pool.tokenizer,
        "policy_version": chosen.policy_version,
    }


def reroute(tx: Transaction, rollout: str, token: int, failed_url: str) -> tuple[str, dict[str, Any] | None]:
    """Another backend for a rollout whose own failed, or the same if it is the only one.

    Returns:
        The outcome (`accepted`, `stale` or `unknown`) and the assignment, None while no backend is ready.
    """
    found = tx.conn.execute(
        sa.select(
            rollouts.c.token, rollouts.c.state, rollouts.c.group_no, jobs.c.namespace, jobs.c.pool, jobs.c.id
        )
        .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
        .where(rollouts.c.id == rollout)
        .with_for_update(of=rollouts)
    ).one_or_none()
    if found is None:
        return "unknown", None
    if found.token != token or found.state != states.leased("run") or found.pool is None:
        return "stale", None
    routers = _Routers(tx, list(tx.conn.execute(_ACTIVE)))
    key = (found.namespace, found.pool)
    router = routers.get(key)
    if router is None:
        return "accepted", None
    others = Router.of(router.max_active, [b for url, b in router.backends.items() if url != failed_url])
    chosen = others.choose(None, None) or router.backends.get(failed_url)
    if chosen is None:
        return "accepted", None
    tx.conn.execute(sa.update(rollouts).where(rollouts.c.id == rollout).values(backend=chosen.url))
    tx.count("reroutes")
    return "accepted", _assignment(routers, found, chosen)
