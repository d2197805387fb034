"""The stage workers that were heard from lately, with their places and their last trouble.

Requests note their worker in memory, which costs them next to nothing, and a background task writes what has
changed into a small table every few seconds, so that each replica knows the workers of all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.rolloutjob import STAGES, StageName
from rollyard_process.log_text import one_line
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.storage.database import Database, StageTrouble, Transaction
from rollyard_api.storage.schema import jobs, rollouts
from rollyard_api.storage.statements import by_dialect
from rollyard_api.storage.view_tables import seen_workers

MAX_NOTED: Final = 16_384
"""The number of workers that are noted between two writes. Further ones are noted later."""
MAX_TROUBLES: Final = 1024
ALIVE_SECONDS: Final = 120.0
"""The seconds for which a worker that is not heard from counts as present."""
TROUBLE_SECONDS: Final = 900.0
"""The seconds for which the last trouble of a worker is shown."""
KEPT_SECONDS: Final = 3600.0
MAX_SHOWN: Final = 500
"""The number of workers and of nodes in an answer."""
_MAX_MESSAGE: Final = 512


@dataclass(slots=True)
class _Noted:
    node: str
    heard_at: float
    places: dict[str, int] = field(default_factory=dict)
    """The most places per stage that were free at once."""
    written: float = 0.0


_HEARD: Final = by_dialect(
    lambda insert: (insertion := insert(seen_workers)).on_conflict_do_update(
        index_elements=[seen_workers.c.job_id, seen_workers.c.name],
        set_={name: insertion.excluded[name] for name in ("node", "stages", "heard_at")},
    )
)
_TROUBLE: Final = (
    sa.update(seen_workers)
    .where(seen_workers.c.job_id.in_((0, bindparam("b_job"))), seen_workers.c.name == bindparam("b_name"))
    .values(
        error_at=bindparam("b_at"),
        error_reason=bindparam("b_reason"),
        error_message=bindparam("b_message"),
        error_rollout=bindparam("b_rollout"),
    )
)


class SeenWorkers:
    """What this process has heard from workers since the last write.

    Args:
        database: The database.
        seconds: The shortest time between two writes about a worker that has only been heard from again.
    """

    def __init__(self, database: Database, seconds: float) -> None:
        self._database = database
        self._seconds = seconds
        self._noted: dict[tuple[int, str], _Noted] = {}
        self._troubles: dict[tuple[int, str], tuple[StageTrouble, float]] = {}

    def heard(
        self,
        job_id: int | None,
        name: str,
        node: str,
        now: float,
        capacity: Mapping[StageName, int] | None = None,
    ) -> None:
        """Note that a worker has sent a request.

        Args:
            job_id: The only job that its token reaches, or None.
            name: The worker's name.
            node: Its node.
            now: The time, in seconds since the epoch.
            capacity: The places per stage that are free, if the request says so.
        """
        key = (job_id or 0, name)
        noted = self._noted.get(key)
        if noted is None:
            if len(self._noted) >= MAX_NOTED:
                return
            noted = self._noted[key] = _Noted(node, now)
        noted.node, noted.heard_at = node, now
        for stage, places in (capacity or {}).items():
            if places > noted.places.get(stage, 0):
                noted.places[stage] = places
                noted.written = 0.0

    def troubled(self, troubles: Sequence[StageTrouble], now: float) -> None:
        """Note stages that did not end well. Only the last one of each worker is kept."""
        for trouble in troubles:
            key = trouble.job_id, trouble.worker
            if key in self._troubles or len(self._troubles) < MAX_TROUBLES:
                self._troubles[key] = (trouble, now)

    async def write(self) -> None:
        """Write what was noted."""
        due = {
            key: noted
            for key, noted in self._noted.items()
            if noted.heard_at - noted.written >= self._seconds
        }
        troubles, self._troubles = self._troubles, {}
        if due or troubles:
            rows = [
                {
                    "job_id": job_id,
                    "name": name,
                    "node": noted.node,
                    "stages": ",".join(f"{s}={noted.places[s]}" for s in STAGES if s in noted.places),
                    "heard_at": noted.heard_at,
                }
                for (job_id, name), noted in sorted(due.items())
            ]
            changes = [
                {
                    "b_job": trouble.job_id,
                    "b_name": trouble.worker,
                    "b_rollout": trouble.rollout,
                    "b_reason": one_line(trouble.reason)[:128],
                    "b_message": one_line(trouble.message[:_MAX_MESSAGE])[:_MAX_MESSAGE],
                    "b_at": at,
                }
                for _, (trouble, at) in sorted(troubles.items())
            ]

            def op(tx: Transaction) -> None:
                if rows:
                    tx.conn.execute(_HEARD[tx.sqlite], rows)
                if changes:
                    tx.conn.execute(_TROUBLE, changes)
                old = seen_workers.c.heard_at < tx.now - KEPT_SECONDS
                tx.conn.execute(sa.delete(seen_workers).where(old))

            await self._database.write(op, durable=False)
        for noted in due.values():
            noted.written = noted.heard_at
        newest = max((noted.heard_at for noted in self._noted.values()), default=0.0)
        for key, noted in list(self._noted.items()):
            if key not in due and noted.heard_at < newest - KEPT_SECONDS:
                del self._noted[key]


_SEEN: Final = sa.select(seen_workers, jobs.c.namespace, jobs.c.name.label("job")).outerjoin(
    jobs, jobs.c.id == seen_workers.c.job_id
)
_ACTIVE: Final = (
    sa.select(*rollouts.c["job_id", "worker", "node", "state"], sa.func.count().label("n"))
    # The comparison selects all leases, and lets the planner find their small index.
    .where(rollouts.c.lease_expires > 0)
    .group_by(*rollouts.c["job_id", "worker", "node", "state"])
)


@dataclass(frozen=True, slots=True)
class WorkersView:
    """The workers and nodes as the API returns them, and what follows from them for the rest of the fleet."""

    nodes: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    more: int
    """The number of workers that were left out."""
    slots: dict[StageName, int]
    """The places of all workers per stage, as far as they are known."""
    jobs: frozenset[int]
    """The jobs of which a worker was heard from lately. 0 stands for all jobs."""


def view(conn: Connection, now: float) -> WorkersView:
    """Return what is known about the workers at the time `now`, in seconds since the epoch."""
    # What a worker that serves any job holds is counted under 0, apart from each job's own.
    active: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    of_node: Counter[str] = Counter()
    for row in conn.execute(_ACTIVE):
        for job_id in (row.job_id, 0):
            active[job_id, row.worker or ""][row.state.stage or ""] += row.n
        of_node[row.node] += row.n
    recent = sa.or_(
        seen_workers.c.heard_at > now - ALIVE_SECONDS, seen_workers.c.error_at > now - TROUBLE_SECONDS
    )
    rows = conn.execute(_SEEN.where(recent)).all()
    slots: dict[StageName, int] = dict.fromkeys(STAGES, 0)
    nodes: dict[str, dict[str, Any]] = {}
    workers = []
    alive = set()
    for row in rows:
        leased = active[row.job_id, row.name]
        is_alive = row.heard_at > now - ALIVE_SECONDS
        pairs = (part.partition("=") for part in row.stages.split(",") if part)
        places = {stage: int(number) for stage, _, number in pairs}
        if is_alive:
            alive.add(row.job_id)
            for stage in STAGES:
                slots[stage] += max(places.get(stage, 0), leased[stage])
            node = nodes.setdefault(
                row.node, {"name": row.node, "heard_at": 0.0, "workers": 0, "active": of_node[row.node]}
            )
            node["heard_at"] = max(node["heard_at"], row.heard_at)
            node["workers"] += 1
        workers.append(
            {
                "name": row.name,
                "node": row.node,
                "namespace": row.namespace,
                "job": row.job,
                "stages": [stage for stage in STAGES if stage in places or stage in leased],
                "active": leased.total(),
                "heard_at": row.heard_at,
                "last_error": None
                if row.error_at is None
                else {
                    "time": row.error_at,
                    "reason": row.error_reason or "",
                    "message": row.error_message or "",
                    "rollout": row.error_rollout or "",
                },
            }
        )
    workers.sort(
        key=lambda entry: (-(entry["last_error"] or {}).get("time", 0.0), -entry["active"], entry["name"])
    )
    listed = sorted(nodes.values(), key=lambda entry: entry["name"])
    return WorkersView(
        listed[:MAX_SHOWN], workers[:MAX_SHOWN], max(0, len(workers) - MAX_SHOWN), slots, frozenset(alive)
    )
