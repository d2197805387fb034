"""The granting of leases from the stage queues, shared between jobs, with a backend for each Run.

A rollout whose backend failed is moved to another one, and the backend is blamed once for each lease.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import orjson
import sqlalchemy as sa
from rollyard_crds.lease import MAX_BATCH, MOST_PLACES, LeaseRequest, NoBackend, RouteRequest
from rollyard_crds.rolloutjob import StageName

from rollyard_api.backends import circuits
from rollyard_api.backends.assignment import ACTIVE, RETRY_SECONDS, Key, Routers, lock
from rollyard_api.backends.router import Backend, Router
from rollyard_api.core.codec import unpack
from rollyard_api.machine.events import Blamed, Event, Leased, Moved
from rollyard_api.machine.rollout import Rejection, Rollout, Transition, decide
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import transitions
from rollyard_api.rollouts.harness_quota import HarnessRoom, HarnessRuns
from rollyard_api.storage import groups as group_rows
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.groups import LeasedGroup
from rollyard_api.storage.rollouts import Payload, Waiting
from rollyard_api.storage.rows import LeasableJob, columns
from rollyard_api.storage.schema import jobs
from rollyard_api.storage.statements import rows_of
from rollyard_api.trajectories import packed
from rollyard_api.trajectories.records import fitting

R = TypeVar("R")

SERVED_ORDER: tuple[StageName, ...] = ("eval", "run", "init")
"""The order in which the stages are served. Later stages come first: their rollouts hold a sandbox."""
_OVERLOADED: Final = re.compile(r"\banswered 429\b")
"""How a worker reports a busy server, which is not a failure because the server works as it should."""


_LIVE: Final = sa.select(*columns(LeasableJob, jobs)).where(*job_rows.LEASABLE)


@dataclass(frozen=True, slots=True)
class Share:
    """A job that may have waiting rollouts, with its priority and its number of active rollouts."""

    job_id: int
    priority: int
    active: int


def allocate(
    shares: Iterable[Share],
    places: int,
    fetch: Callable[[int, int], Sequence[R]],
    admit: Callable[[int], bool],
) -> list[R]:
    """Take up to `places` rollouts, each from the job that comes first at that moment.

    Jobs of higher priority come first. Among jobs of equal priority, the job with the fewest active rollouts
    comes first.

    Args:
        shares: The candidate jobs.
        places: The largest number of rollouts to take.
        fetch: `fetch(job_id, limit)` returns up to `limit` waiting rollouts of a job, oldest first. It is
            called at most once per job.
        admit: Returns whether the job may have one more rollout, because a backend has room. It is
            called once per rollout taken.

    Returns:
        The rollouts that were taken, in the order in which they are to be leased.
    """
    heap = [(-s.priority, s.active, s.job_id) for s in shares]
    heapq.heapify(heap)
    waiting: dict[int, list[R]] = {}
    taken: list[R] = []
    while heap and len(taken) < places:
        priority, active, job_id = heap[0]
        if job_id not in waiting:
            waiting[job_id] = list(reversed(fetch(job_id, places - len(taken))))
        if not waiting[job_id] or not admit(job_id):
            heapq.heappop(heap)
            continue
        taken.append(waiting[job_id].pop())
        heapq.heapreplace(heap, (priority, active + 1, job_id))
    return taken


class Granted(NamedTuple):
    """What a request for leases gets."""

    leases: list[dict[str, Any]]
    """It is empty if nothing waits for the worker."""
    places: int | None = None
    """See `LeaseResponse.places`."""


def grant(
    tx: Transaction,
    ask: LeaseRequest,
    only: int | None,
    lease_seconds: float,
    max_bytes: int,
    max_harness_runs: int,
) -> Granted:
    """Lease up to MAX_BATCH rollouts within the worker's capacity.

    Args:
        tx: The transaction.
        ask: What the worker asks for.
        only: The id of the only job that the token of the request may reach, whichever job has its name now;
            None allows any job.
        lease_seconds: The time for which the leases hold, in seconds.
        max_bytes: The bytes of the tasks and trajectories in the leases, unless there is only one lease. The
            remaining rollouts stay in their queues.
        max_harness_runs: The largest number of rollouts of harnesses of a namespace that are in Run at once.
    """
    room = max_bytes
    live = {
        row.id: row
        for row in (LeasableJob(*row) for row in rows_of(tx.conn, _LIVE, {}))
        if (ask.job is None or row.name == ask.job)
        and (ask.namespace is None or row.namespace == ask.namespace)
        and only in (None, row.id)
    }
    if not live:
        return Granted([])
    pools = {(row.namespace, row.pool) for row in live.values() if row.pool is not None}
    routed = bool(pools) and ask.capacity.get("run", 0) > 0
    harness_room: HarnessRoom | None = None
    if routed:
        harnesses = HarnessRuns(tx.conn, {row.namespace for row in live.values() if row.limits.harness})
        lock(tx, pools | harnesses.pools)
        harness_room = HarnessRoom(harnesses.count(tx.conn), max_harness_runs)
    # One job alone needs no share, and without a Run no backend is chosen.
    active = tx.conn.execute(ACTIVE).all() if routed or len(live) > 1 else []
    loads: defaultdict[int, int] = defaultdict(int)
    for row in active:
        loads[row.job_id] += row.n
    leases: list[dict[str, Any]] = []
    pool_places = MOST_PLACES if ask.job is not None and not pools else None
    for stage in SERVED_ORDER:
        places = min(ask.capacity.get(stage, 0), MAX_BATCH - len(leases))
        if places <= 0 or room <= 0:
            continue
        routers = None
        if stage == "run" and routed:
            routers = Routers(tx, active)
            routers.count_waiting(tx, pools)
            if ask.job is not None and len(pools) == 1:
                pool_places = routers.places(*pools)
        shares = [
            Share(job_id, row.priority, loads[job_id])
            for job_id, row in live.items()
            if not (row.holding and stage == "init")
        ]
        fetch = partial(_waiting, tx, RolloutState.queued(stage), ask.node)
        admit = partial(_admit, live, routers, harness_room)
        taken = allocate(shares, places, fetch, admit)
        for candidate in taken:
            loads[candidate.rollout.job_id] += 1
        if taken:
            rows = [
                candidate.rollout
                for candidate in taken[: fitting((candidate.bytes for candidate in taken), room)]
            ]
            granted, size = _Grant(tx, ask, live, stage, routers, lease_seconds).leases(rows, room)
            leases += granted
            room -= size
        if routers is not None:
            tx.loads.update(routers.loads())
    return Granted(leases, pool_places)


def _admit(
    live: dict[int, LeasableJob], routers: Routers | None, harness_room: HarnessRoom | None, job_id: int
) -> bool:
    """Return whether a job may have one more rollout in the stage, and if so, keep the room for it.

    There are routers only for Run.
    """
    job = live[job_id]
    if routers is None or job.pool is None:
        return True
    key = (job.namespace, job.pool)
    if harness_room is None or not job.limits.harness:
        return routers.admit(key)
    return harness_room.has(job.namespace) and routers.admit(key) and harness_room.take(job.namespace)


def _waiting(tx: Transaction, state: RolloutState, node: str, job_id: int, limit: int) -> Sequence[Waiting]:
    rows: list[Waiting] = []
    if state != RolloutState.QUEUED_INIT:
        rows = rollout_rows.waiting(tx, job_id, state, node, limit)
    if len(rows) < limit:
        rows += rollout_rows.waiting(tx, job_id, state, "", limit - len(rows))
    return rows


@dataclass(frozen=True, slots=True)
class _Grant:
    """What the leases of one stage for one request depend on."""

    tx: Transaction
    ask: LeaseRequest
    jobs: dict[int, LeasableJob]
    stage: StageName
    routers: Routers | None
    """The routers of the pools, if the leases need backends."""
    lease_seconds: float

    def leases(self, rows: Sequence[Rollout], room: int) -> tuple[list[dict[str, Any]], int]:
        """Lease those of the rollouts that fit into `room` bytes; return the leases and their bytes."""
        tx, stage = self.tx, self.stage
        groups = self._groups(rows)
        payloads = {} if stage == "init" else rollout_rows.payloads_of(tx.conn, [row.id for row in rows])
        decided: list[transitions.Decided] = []
        leases: list[dict[str, Any]] = []
        total = 0
        for row in rows:
            job, group = self.jobs[row.job_id], groups[row.job_id][row.group_no]
            carried = _carried(group, payloads.get(row.id), stage)
            size = sum(map(len, carried.values()))
            # Data that is compressed in the database may be far larger here.
            if leases and total + size > room:
                break
            chosen, assignment = None, None
            if self.routers is not None and job.pool is not None:
                chosen = self._route(self.routers, (job.namespace, job.pool), row, groups[row.job_id])
                if chosen is None:
                    continue
                assignment = self.routers.assignment((job.namespace, job.pool), chosen)
            total += size
            backend = (None, None) if chosen is None else (chosen.url, chosen.policy_index)
            event = Leased(self.ask.worker, self.ask.node, tx.now + self.lease_seconds, *backend)
            decision = decide(row, event, None, tx.now)
            assert isinstance(decision, Transition), f"{row.id} waits for {stage}"
            decided.append((row, decision))
            leases.append(
                {
                    "rollout": row.id,
                    "token": row.token + 1,
                    "stage": stage,
                    "job": job.name,
                    "namespace": job.namespace,
                    "job_uid": job.uid,
                    "group_id": group.task_id,
                    "sample_index": row.sample,
                    "attempt": row.failures(stage),
                    "queued_seconds": round(max(0.0, tx.now - row.since), 6),
                    "lease_seconds": self.lease_seconds,
                    "sandbox": None
                    if row.sandbox is None or stage == "init"
                    else orjson.Fragment(row.sandbox),
                    "backend": assignment,
                    "carry": {},
                    "trajectory": None,
                    "segments": [],
                    **{name: orjson.Fragment(data) for name, data in carried.items()},
                }
            )
        transitions.apply(tx, decided)
        return leases, total

    def _groups(self, rows: Sequence[Rollout]) -> dict[int, dict[int, LeasedGroup]]:
        """Return the groups of the rollouts, by their jobs and numbers."""
        numbers: defaultdict[int, set[int]] = defaultdict(set)
        for row in rows:
            numbers[row.job_id].add(row.group_no)
        return {job_id: group_rows.named(self.tx.conn, job_id, nos) for job_id, nos in numbers.items()}

    def _route(
        self, routers: Routers, key: Key, row: Rollout, groups: dict[int, LeasedGroup]
    ) -> Backend | None:
        router = routers.get(key)
        if router is None:
            return None
        group = groups[row.group_no]
        # After a failed attempt the next one should use another backend; after a hand-over it should not.
        own, avoid = (None, row.backend) if row.failures_run else (row.backend, None)
        chosen = router.choose(own, group.backend, together=group.remaining, avoid=avoid)
        if chosen is None or chosen.url in (group.backend, own):
            return chosen
        if avoid is None or group.backend not in router.backends:
            group_rows.stick(self.tx, row.job_id, group.no, chosen.url)
            groups[group.no] = group._replace(backend=chosen.url)
        return chosen


def _carried(group: LeasedGroup, payload: Payload | None, stage: StageName) -> dict[str, bytes]:
    """Return the large parts of a lease as JSON."""
    carried = {"task": unpack(group.task)}
    if payload is not None and payload.carry is not None:
        carried["carry"] = unpack(payload.carry)
    if stage == "eval" and payload is not None and payload.trajectory is not None:
        carried["trajectory"] = unpack(payload.trajectory)
        if payload.segments is not None:
            carried["segments"] = packed.json_of(payload.segments)
    return carried


@dataclass(frozen=True, slots=True)
class Rerouted:
    """The answer to `reroute`.

    The `outcome` is `accepted`, `stale` or `unknown`. The `backend` is None while none is available.
    """

    outcome: str
    backend: dict[str, Any] | None = None
    retry_after: float = RETRY_SECONDS
    reason: NoBackend = ""
    opened: bool = False
    """Whether this failure opened the backend's circuit."""


def reroute(tx: Transaction, request: RouteRequest) -> Rerouted:
    """Return another backend for a rollout whose backend failed, or the same one if no other has room.

    Only the backend that the rollout is assigned to is blamed, in its own pool and once per token, so a
    lease holder cannot open a circuit by naming another server or by repeating its report.

    A backend's limit holds for rollouts that move, too. If every other backend is full and the failed
    one is not eligible, the rollout has to ask again. Places that become free are kept for such rollouts
    before any are given to the queue (Router.reserved).
    """
    row = rollout_rows.named(tx, [request.rollout]).get(request.rollout)
    if row is None:
        return Rerouted("unknown")
    job = rollout_rows.jobs_of(tx, [row.job_id])[row.job_id]
    if row.token != request.token or row.state != RolloutState.LEASED_RUN or job.pool is None:
        return Rerouted("stale")
    key = (job.namespace, job.pool)
    opened, changed = False, None
    if request.blame and not _OVERLOADED.search(request.error):
        changed = _changed(tx, row, Blamed(request.token, request.failed_url))
        opened = changed is not None and circuits.failed(tx, row.job_id, request.failed_url)
        row = changed or row
    lock(tx, [key])
    routers = Routers(tx, tx.conn.execute(ACTIVE).all())
    router = routers.get(key)
    chosen = None if router is None else _elsewhere(tx, router, row, request.failed_url)
    if chosen is None:
        return Rerouted("accepted", None, routers.retry_after(key, tx.now), routers.why_none(key), opened)
    if chosen.url != row.backend:
        _changed(tx, row, Moved(request.token, chosen.url))
    return Rerouted("accepted", routers.assignment(key, chosen), opened=opened)


def _changed(tx: Transaction, row: Rollout, event: Event) -> Rollout | None:
    """Apply what follows from an event, and return the rollout with it, or None if it is refused."""
    decision = decide(row, event, None, tx.now)
    if isinstance(decision, Rejection):
        return None
    transitions.apply(tx, [(row, decision)])
    return msgspec.structs.replace(row, **decision.changes)


def _elsewhere(tx: Transaction, router: Router, row: Rollout, failed_url: str) -> Backend | None:
    if row.backend is not None and row.backend != failed_url and row.backend in router.backends:
        # The rollout was moved by an earlier call whose answer was lost.
        return router.backends[row.backend]
    group = group_rows.named(tx.conn, row.job_id, [row.group_no])[row.group_no]
    others = Router.of([b for url, b in router.backends.items() if url != failed_url])
    chosen = others.choose(None, group.backend, together=group.remaining)
    if chosen is None:
        return router.backends.get(failed_url)
    if group.backend not in others.backends:
        # The group's other samples follow it to the new backend.
        group_rows.stick(tx, row.job_id, row.group_no, chosen.url)
    return chosen
