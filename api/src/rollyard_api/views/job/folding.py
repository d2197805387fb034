"""Fold ended rollouts into what is kept for people: narrow rows, statistics of jobs, and rates of the fleet.

The place up to which a job's rollouts were folded is kept with its statistics, and both change in one
transaction. A rollout is therefore counted once, however often a process is killed. Places are given in the
order of the commits (see `rollouts.transitions`), so none is passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from rollyard_crds.rolloutjob import STAGES
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads, pack, unpack
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import groups, jobs, rollouts
from rollyard_api.storage.statements import by_dialect
from rollyard_api.storage.view_tables import ended_groups, ended_rollouts, job_statistics, rates
from rollyard_api.views.job.statistics import Statistics

BATCH: Final = 500
"""The number of rollouts and of groups that one transaction folds. Other requests run in between."""
RATE_SECONDS: Final = 10
"""The width of a bucket of the fleet's rates, in seconds."""
RATE_KEPT: Final = 900
"""The seconds for which rates are kept."""

ATTEMPTS: Final = (rollouts.c.failures_init + rollouts.c.failures_run + rollouts.c.failures_eval).label(
    "attempts"
)
"""The attempts of a rollout that did not end well, in all of its stages."""

_STATISTICS: Final = sa.select(job_statistics).where(job_statistics.c.job_id == bindparam("b_job"))
_JOB: Final = sa.select(jobs.c.ended, jobs.c.groups_ended).where(
    jobs.c.id == bindparam("b_job"), jobs.c.deleted_at.is_(None)
)
_ENDED: Final = (
    sa.select(
        *rollouts.c["id", "group_no", "sample", "state", "end_seq", "reward", "reason", "message"],
        *rollouts.c["policy_index", "worker", "timings"],
        sa.func.coalesce(rollouts.c.sampled_tokens, 0).label("tokens"),
        rollouts.c.since.label("ended_at"),
        ATTEMPTS,
    )
    .where(rollouts.c.job_id == bindparam("b_job"), rollouts.c.end_seq > bindparam("b_after"))
    .order_by(rollouts.c.end_seq)
    .limit(BATCH)
)
_GROUPS: Final = (
    sa.select(*groups.c["no", "seq"])
    .where(groups.c.job_id == bindparam("b_job"), groups.c.seq > bindparam("b_after"))
    .order_by(groups.c.seq)
    .limit(BATCH)
)
_MEMBERS: Final = sa.select(rollouts.c.group_no, rollouts.c.reward).where(
    rollouts.c.job_id == bindparam("b_job"),
    rollouts.c.group_no.in_(bindparam("b_nos", expanding=True)),
    rollouts.c.reward.is_not(None),
)

_FIRST: Final = by_dialect(lambda insert: insert(job_statistics).on_conflict_do_nothing())
"""Makes a job's row of statistics unless it is there."""
_RATES: Final = by_dialect(
    lambda insert: (insertion := insert(rates)).on_conflict_do_update(
        index_elements=[rates.c.start],
        set_={
            "rollouts": rates.c.rollouts + insertion.excluded.rollouts,
            "tokens": rates.c.tokens + insertion.excluded.tokens,
        },
    )
)


def behind(conn: Connection, job_id: int | None = None) -> list[int]:
    """Return the numbers of the jobs with ended rollouts or groups that are not folded yet.

    Args:
        job_id: The only job that is considered, or None for all.
    """
    query = (
        sa.select(jobs.c.id)
        .outerjoin(job_statistics, job_statistics.c.job_id == jobs.c.id)
        .where(
            jobs.c.deleted_at.is_(None) if job_id is None else jobs.c.id == job_id,
            sa.or_(
                jobs.c.ended > sa.func.coalesce(job_statistics.c.rollouts, 0),
                jobs.c.groups_ended > sa.func.coalesce(job_statistics.c.groups, 0),
            ),
        )
        .order_by(jobs.c.id)
    )
    return list(conn.scalars(query))


def fold(tx: Transaction, job_id: int) -> bool:
    """Fold up to BATCH rollouts and groups of a job, and return whether there are more of them."""
    job = tx.conn.execute(_JOB, {"b_job": job_id}).one_or_none()
    if job is None:
        return False
    empty = {"job_id": job_id, "rollouts": 0, "groups": 0, "document": b"{}"}
    tx.conn.execute(_FIRST[tx.sqlite], empty)
    stored = tx.conn.execute(_STATISTICS.with_for_update(), {"b_job": job_id}).one()
    ended = tx.conn.execute(_ENDED, {"b_job": job_id, "b_after": stored.rollouts}).all()
    closed = tx.conn.execute(_GROUPS, {"b_job": job_id, "b_after": stored.groups}).all()
    if not ended and not closed:
        return False
    document = stored.document
    if ended:
        document = _fold_rollouts(tx, job_id, unpack(document), ended)
    if closed:
        _fold_groups(tx, job_id, closed)
    tx.conn.execute(
        sa.update(job_statistics)
        .where(job_statistics.c.job_id == job_id)
        .values(
            rollouts=ended[-1].end_seq if ended else stored.rollouts,
            groups=closed[-1].seq if closed else stored.groups,
            document=document,
        )
    )
    return len(ended) == BATCH or len(closed) == BATCH


def _fold_rollouts(tx: Transaction, job_id: int, document: bytes, ended: Sequence[Any]) -> bytes:
    statistics = msgspec.json.decode(document, type=Statistics)
    recent: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    rows = []
    for row in ended:
        timings = loads(row.timings)
        statistics.add(row, timings)
        values = {name: value for name, value in row._mapping.items() if name in ended_rollouts.c}
        rows.append({**values, "job_id": job_id, "seconds": active_seconds(timings)})
        if row.ended_at > tx.now - RATE_KEPT:
            bucket = recent[int(row.ended_at // RATE_SECONDS) * RATE_SECONDS]
            bucket[0] += 1
            bucket[1] += row.tokens
    tx.conn.execute(sa.insert(ended_rollouts), rows)
    if recent:
        # Two replicas take the buckets in the same order, because they could deadlock otherwise.
        added = [{"start": start, "rollouts": n, "tokens": t} for start, (n, t) in sorted(recent.items())]
        tx.conn.execute(_RATES[tx.sqlite], added)
        tx.conn.execute(sa.delete(rates).where(rates.c.start < int(tx.now) - 2 * RATE_KEPT))
    return pack(msgspec.json.encode(statistics))


def active_seconds(timings: dict[str, Any]) -> float:
    """Return the seconds of work in all stages of decoded timings."""
    seconds = (float((timings.get(stage) or {}).get("active_seconds", 0.0)) for stage in STAGES)
    return round(sum(seconds), 6)


def _fold_groups(tx: Transaction, job_id: int, closed: Sequence[Any]) -> None:
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for row in tx.conn.execute(_MEMBERS, {"b_job": job_id, "b_nos": [group.no for group in closed]}):
        rewards[row.group_no].append(row.reward)
    rows = []
    for group in closed:
        values = rewards[group.no]
        mean = fmean(values) if values else None
        variance = None if mean is None else fmean((value - mean) ** 2 for value in values)
        rows.append({"job_id": job_id, "no": group.no, "mean": mean, "variance": variance})
    tx.conn.execute(sa.insert(ended_groups), rows)


class Folding:
    """The jobs of this process whose rollouts have ended and are not folded yet.

    Args:
        database: The database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._jobs: dict[int, None] = {}
        self._looked = False

    def note(self, job_ids: Iterable[int]) -> None:
        """Remember jobs with rollouts that have just ended."""
        self._jobs.update(dict.fromkeys(job_ids))

    async def round(self) -> None:
        """Fold everything that is known to be left. The first round adds what earlier processes left."""
        if not self._looked:
            self.note(await self._database.read(behind))
            self._looked = True
        for job_id in list(self._jobs):
            # A rollout that ends during the fold notes the job again.
            del self._jobs[job_id]
            try:
                await self.fold(job_id)
            except BaseException:
                self.note((job_id,))
                raise

    async def fold(self, job_id: int, batches: int = 1_000_000) -> None:
        """Fold what is left of one job, in at most this many transactions."""
        for _ in range(batches):
            if not await self._database.write(partial(fold, job_id=job_id), durable=False):
                return


def statistics(conn: Connection, job: JobRow, labels: Mapping[int, str]) -> dict[str, Any]:
    """Return the statistics of a job as the API returns them.

    Args:
        labels: The policy version of each index that is known.
    """
    row = conn.execute(_STATISTICS, {"b_job": job.id}).one_or_none()
    stored = Statistics() if row is None else msgspec.json.decode(unpack(row.document), type=Statistics)
    return {"upto": 0 if row is None else row.rollouts, **stored.view(labels)}
