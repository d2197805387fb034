"""Leases are granted here, from the stage queues, with shares of the jobs and a backend for each Run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
import sqlalchemy as sa
from rollyard_crds.lease import MAX_BATCH
from rollyard_crds.rolloutjob import StageName
from sqlalchemy import bindparam

from rollyard_api.backends.assignment import ACTIVE, STICK, Key, Routers, lock
from rollyard_api.backends.router import Backend
from rollyard_api.core.codec import unpack
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import timing
from rollyard_api.rollouts.fairness import Share, allocate
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import GroupRow, LeasableJob, PayloadRow, WaitingRollout, columns, read_all
from rollyard_api.storage.schema import groups, jobs, payloads, rollouts
from rollyard_api.trajectories import spans
from rollyard_api.trajectories.records import fitting

SERVED_ORDER: tuple[StageName, ...] = ("eval", "run", "init")
"""The order in which the stages are served. Later stages come first: their rollouts hold a sandbox."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A LeaseRequest that has been checked."""

    worker: str
    node: str
    capacity: dict[StageName, int]
    job: str | None
    namespace: str | None
    job_id: int | None = None
    """The only job that the token of the request may reach, whichever job has its name now; None allows any
    job."""


_LIVE = sa.select(*columns(LeasableJob, jobs)).where(
    jobs.c.finished_at.is_(None),
    jobs.c.deleted_at.is_(None),
    jobs.c.cancel_reason.is_(None),
    jobs.c.suspended.is_(False),
)
_WAITING = (
    sa.select(*columns(WaitingRollout, rollouts))
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
        policy_index=bindparam("b_policy_index"),
    )
)
_GROUPS = sa.select(*columns(GroupRow, groups)).where(
    groups.c.job_id == bindparam("b_job"), groups.c.no.in_(bindparam("b_nos", expanding=True))
)
_TASK_BYTES = sa.select(groups.c.no, sa.func.length(groups.c.task).label("bytes")).where(
    groups.c.job_id == bindparam("b_job"), groups.c.no.in_(bindparam("b_nos", expanding=True))
)
_PAYLOAD_BYTES = sa.select(
    payloads.c.rollout_id,
    (
        sa.func.coalesce(sa.func.length(payloads.c.carry), 0)
        + sa.func.coalesce(sa.func.length(payloads.c.trajectory), 0)
    ).label("bytes"),
).where(payloads.c.rollout_id.in_(bindparam("b_ids", expanding=True)))
_PAYLOADS = sa.select(payloads).where(payloads.c.rollout_id.in_(bindparam("b_ids", expanding=True)))


def grant(tx: Transaction, ask: Ask, lease_seconds: float, max_bytes: int) -> list[dict[str, Any]]:
    """Lease up to MAX_BATCH rollouts within the worker's capacity; return [] if nothing waits for it.

    The tasks and trajectories in the leases have at most `max_bytes` bytes, unless there is only one lease.
    The remaining rollouts stay in their queues.
    """
    room = max_bytes
    live = {
        row.id: row
        for row in read_all(LeasableJob, tx.conn.execute(_LIVE))
        if (ask.job is None or row.name == ask.job)
        and (ask.namespace is None or row.namespace == ask.namespace)
        and ask.job_id in (None, row.id)
    }
    if not live:
        return []
    pools = {(row.namespace, row.pool) for row in live.values() if row.pool is not None}
    if ask.capacity.get("run", 0) > 0:
        lock(tx, pools)
    active = tx.conn.execute(ACTIVE).all()
    loads: defaultdict[int, int] = defaultdict(int)
    for row in active:
        loads[row.job_id] += row.n
    leases: list[dict[str, Any]] = []
    for stage in SERVED_ORDER:
        places = min(ask.capacity.get(stage, 0), MAX_BATCH - len(leases))
        if places <= 0 or room <= 0:
            continue
        routers = None
        if stage == "run":
            routers = Routers(tx, active)
            routers.count_waiting(tx, pools)
        shares = [
            Share(job_id, row.priority, loads[job_id])
            for job_id, row in live.items()
            if not (row.holding and stage == "init")
        ]
        fetch = partial(_waiting, tx, RolloutState.queued(stage), ask.node)
        admit = partial(_admit, live, routers)
        taken = allocate(shares, places, fetch, admit)
        for one in taken:
            loads[one.job_id] += 1
        if taken:
            granted, size = _granted(tx, ask, live, stage, taken, routers, lease_seconds, room)
            leases += granted
            room -= size
        if routers is not None:
            tx.loads.update(routers.loads())
    return leases


def _admit(live: dict[int, LeasableJob], routers: Routers | None, job_id: int) -> bool:
    job = live[job_id]
    return routers is None or job.pool is None or routers.admit((job.namespace, job.pool))


def _waiting(
    tx: Transaction, state: RolloutState, node: str, job_id: int, limit: int
) -> list[WaitingRollout]:
    asked = {"b_job": job_id, "b_state": state, "b_node": node, "b_limit": limit}
    rows: list[WaitingRollout] = []
    if state != RolloutState.QUEUED_INIT:
        rows = read_all(WaitingRollout, tx.conn.execute(_WAITING, asked))
    if len(rows) < limit:
        more = asked | {"b_node": "", "b_limit": limit - len(rows)}
        rows += read_all(WaitingRollout, tx.conn.execute(_WAITING, more))
    return rows


def _granted(
    tx: Transaction,
    ask: Ask,
    live: dict[int, LeasableJob],
    stage: StageName,
    taken: list[WaitingRollout],
    routers: Routers | None,
    lease_seconds: float,
    room: int,
) -> tuple[list[dict[str, Any]], int]:
    """Return the leases of the taken rollouts that fit into `room` bytes, and the bytes that they carry."""
    taken = _fitting(tx, taken, stage, room)
    by_group = _groups(tx, taken)
    kept = {}
    if stage != "init":
        ids = [row.id for row in taken]
        kept = {
            row.rollout_id: row for row in read_all(PayloadRow, tx.conn.execute(_PAYLOADS, {"b_ids": ids}))
        }
    changes: list[dict[str, Any]] = []
    leases: list[dict[str, Any]] = []
    total = 0
    for row in taken:
        job, group = live[row.job_id], by_group[row.job_id, row.group_no]
        carried = _carried(group, kept.get(row.id), stage)
        size = sum(map(len, carried.values()))
        # Data that is compressed in the database may be far larger here.
        if leases and total + size > room:
            break
        backend, policy_index, assignment = row.backend, row.policy_index, None
        if routers is not None and job.pool is not None:
            chosen = _route(tx, routers, (job.namespace, job.pool), row, by_group)
            if chosen is None:
                continue
            backend, policy_index = chosen.url, chosen.policy_index
            assignment = routers.assignment((job.namespace, job.pool), chosen)
        total += size
        queued = max(0.0, tx.now - row.since)
        changes.append(
            {
                "b_id": row.id,
                "b_state": RolloutState.leased(stage),
                "b_node": ask.node,
                "b_token": row.token + 1,
                "b_worker": ask.worker,
                "b_expires": tx.now + lease_seconds,
                "b_now": tx.now,
                "b_timings": timing.add(
                    row.timings,
                    stage,
                    queued=queued,
                    attempts=1,
                    step=timing.Step(
                        RolloutState.queued(stage), row.since, RolloutState.leased(stage), tx.now
                    ),
                ),
                "b_backend": backend,
                "b_policy_index": policy_index,
            }
        )
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
            "sandbox": None if row.sandbox is None or stage == "init" else orjson.Fragment(row.sandbox),
            "backend": assignment,
            "carry": {},
            "trajectory": None,
            **{name: orjson.Fragment(data) for name, data in carried.items()},
        }
        leases.append(lease)
        tx.emit(row.job_id, rollout=row.id, stage=stage, status="leased", reward=None, reason="")
        tx.count("leases", stage)
        tx.count("queue_seconds", stage, value=queued)
        spans.waited(tx, row.id, stage, row.since)
    if changes:
        tx.conn.execute(_GRANT, changes)
    return leases, total


def _carried(group: GroupRow, payload: PayloadRow | None, stage: StageName) -> dict[str, bytes]:
    """Return the large parts of a lease as JSON."""
    carried = {"task": unpack(group.task)}
    if payload is not None and payload.carry is not None:
        carried["carry"] = unpack(payload.carry)
    if stage == "eval" and payload is not None and payload.trajectory is not None:
        carried["trajectory"] = unpack(payload.trajectory)
    return carried


def _fitting(
    tx: Transaction, taken: list[WaitingRollout], stage: StageName, room: int
) -> list[WaitingRollout]:
    """Return the first taken rollouts whose compressed parts fit into `room` bytes, but at least one."""
    if len(taken) == 1:
        return taken
    wanted: defaultdict[int, set[int]] = defaultdict(set)
    for row in taken:
        wanted[row.job_id].add(row.group_no)
    tasks = {
        (job_id, found.no): found.bytes
        for job_id, nos in wanted.items()
        for found in tx.conn.execute(_TASK_BYTES, {"b_job": job_id, "b_nos": sorted(nos)})
    }
    kept: dict[str, int] = {}
    if stage != "init":
        for found in tx.conn.execute(_PAYLOAD_BYTES, {"b_ids": [row.id for row in taken]}):
            kept[found.rollout_id] = found.bytes
    sizes = (tasks[row.job_id, row.group_no] + kept.get(row.id, 0) for row in taken)
    return taken[: fitting(sizes, room)]


def _groups(tx: Transaction, rows: Sequence[WaitingRollout]) -> dict[tuple[int, int], GroupRow]:
    wanted: defaultdict[int, set[int]] = defaultdict(set)
    for row in rows:
        wanted[row.job_id].add(row.group_no)
    return {
        (group.job_id, group.no): group
        for job_id, nos in wanted.items()
        for group in read_all(GroupRow, tx.conn.execute(_GROUPS, {"b_job": job_id, "b_nos": sorted(nos)}))
    }


def _route(
    tx: Transaction,
    routers: Routers,
    key: Key,
    row: WaitingRollout,
    by_group: dict[tuple[int, int], GroupRow],
) -> Backend | None:
    router = routers.get(key)
    if router is None:
        return None
    group = by_group[row.job_id, row.group_no]
    # After a failed attempt the next one should use another backend; after a hand-over it should not.
    own, avoid = (None, row.backend) if row.failures_run else (row.backend, None)
    chosen = router.choose(own, group.backend, together=group.remaining, avoid=avoid)
    if chosen is None or chosen.url in (group.backend, own):
        return chosen
    if avoid is None or group.backend not in router.backends:
        # The samples that follow use the same backend, which keeps a group that must be split in few parts.
        tx.conn.execute(STICK, {"b_job": row.job_id, "b_no": row.group_no, "b_backend": chosen.url})
        by_group[row.job_id, row.group_no] = replace(group, backend=chosen.url)
    return chosen
