"""The room of each namespace for rollouts of harnesses in Run, which use the gateway of a worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.backends.assignment import Key
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.schema import jobs, rollouts

_JOBS: Final = sa.select(*jobs.c["id", "namespace", "pool", "limits"]).where(
    jobs.c.finished_at.is_(None), jobs.c.namespace.in_(bindparam("b_namespaces", expanding=True))
)
_RUNNING: Final = (
    sa.select(rollouts.c.job_id, sa.func.count().label("n"))
    .where(rollouts.c.lease_expires.is_not(None), rollouts.c.state == RolloutState.LEASED_RUN)
    .where(rollouts.c.job_id.in_(bindparam("b_ids", expanding=True)))
    .group_by(rollouts.c.job_id)
)


class HarnessRuns:
    """The unfinished jobs of some namespaces whose agent is a harness, and their rollouts in Run."""

    def __init__(self, conn: Connection, namespaces: Collection[str]) -> None:
        rows = conn.execute(_JOBS, {"b_namespaces": sorted(namespaces)}).all() if namespaces else []
        self._jobs = {row.id: row for row in rows if row.limits.harness}

    @property
    def pools(self) -> set[Key]:
        """The pools of the jobs. Who holds their locks is alone to grant such rollouts."""
        return {(row.namespace, row.pool) for row in self._jobs.values() if row.pool is not None}

    def count(self, conn: Connection) -> Mapping[str, int]:
        """Return how many of the jobs' rollouts are in Run, by namespace; 0 for others."""
        running: Counter[str] = Counter()
        if self._jobs:
            for row in conn.execute(_RUNNING, {"b_ids": sorted(self._jobs)}):
                running[self._jobs[row.job_id].namespace] += row.n
        return running


@dataclass(frozen=True, slots=True)
class HarnessUse:
    """How much of the quota is in use, for those who read jobs."""

    running: Mapping[str, int]
    """The rollouts of harnesses in Run, by namespace."""
    most: int
    """The largest number of these for each namespace."""

    @classmethod
    def of(cls, conn: Connection, rows: Iterable[Any], most: int) -> HarnessUse:
        """Return the use in the namespaces of those jobs that may wait for the quota.

        Args:
            conn: The database.
            rows: Rows of jobs with `namespace`, `limits` and `finished_at`.
            most: The largest number of rollouts of harnesses of a namespace that are in Run at once.
        """
        namespaces = {row.namespace for row in rows if row.limits.harness and row.finished_at is None}
        return cls(HarnessRuns(conn, namespaces).count(conn), most)


class HarnessRoom:
    """The rollouts of harnesses that each namespace may have in Run in addition, in one transaction."""

    def __init__(self, running: Mapping[str, int], most: int) -> None:
        self._left: defaultdict[str, int] = defaultdict(lambda: most)
        self._left.update({namespace: most - count for namespace, count in running.items()})

    def has(self, namespace: str) -> bool:
        """Return whether there is room for one."""
        return self._left[namespace] > 0

    def take(self, namespace: str) -> bool:
        """Count one more, and return whether there was room for it."""
        self._left[namespace] -= 1
        return self._left[namespace] >= 0
