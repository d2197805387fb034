"""Fold ended rollouts into what is kept for people: narrow rows, statistics of jobs, and rates of the fleet.

The place up to which a job's rollouts were folded is kept with its statistics, and both change in one
transaction. A rollout is therefore counted once, however often a process is killed. Places are given in the
order of the commits (see `rollouts.transitions`), so none is passed over.

The statistics of a job are updated as rollouts end instead of being counted for each request. They are
bounded: the newest policy versions, a fixed number of time buckets that grow wider, and the most frequent
reasons.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from msgspec import Struct, field, structs
from rollyard_crds.rolloutjob import STAGES
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads, pack, unpack
from rollyard_api.machine.states import BY_NUMBER, RolloutState
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import groups, jobs, rollouts
from rollyard_api.storage.statements import by_dialect
from rollyard_api.storage.view_tables import ended_groups, ended_rollouts, job_statistics, rates
from rollyard_api.trajectories import traces

MAX_KEYS: Final = 512
FIRST_STEP: Final = 2.0**-10
BINS: Final = 20


class Sketch(Struct):
    """A histogram of any numbers in bounded space, which need not know their range in advance.

    Numbers are counted by the nearest multiple of a step, a power of two. The step doubles whenever more than
    MAX_KEYS multiples are in use, and the counts are merged. Rewards are usually a few values from 0 to 1,
    which the first step separates. The minimum, the maximum, the sum, and the numbers of zeros and ones are
    exact.
    """

    step: float = FIRST_STEP
    counts: dict[int, int] = field(default_factory=dict)
    """How many numbers are nearest to each multiple of the step."""
    n: int = 0
    sum: float = 0.0
    min: float | None = None
    max: float | None = None
    zeros: int = 0
    ones: int = 0

    def add(self, value: float) -> None:
        """Count a finite number."""
        self.n += 1
        self.sum += value
        self.min = value if self.min is None else min(self.min, value)
        self.max = value if self.max is None else max(self.max, value)
        self.zeros += value == 0.0
        self.ones += value == 1.0
        key = round(value / self.step)
        self.counts[key] = self.counts.get(key, 0) + 1
        while len(self.counts) > MAX_KEYS:
            self._coarsen()

    def _coarsen(self) -> None:
        merged: Counter[int] = Counter()
        for key, n in self.counts.items():
            merged[round(key / 2)] += n
        self.step *= 2
        self.counts = merged

    def histogram(self) -> dict[str, Any]:
        """Return {bins, min, max, n, mean, zeros, ones}: BINS counts of equal parts of min..max.

        A number is counted at most half a step away from its value. If all numbers are equal, the first
        bin has all of them.
        """
        bins = [0] * BINS
        if self.min is not None and self.max is not None:
            width = (self.max - self.min) / BINS
            for key, n in self.counts.items():
                index = 0 if width <= 0 else int((key * self.step - self.min) / width)
                bins[min(max(index, 0), BINS - 1)] += n
        return {
            "bins": bins,
            "min": self.min,
            "max": self.max,
            "n": self.n,
            "mean": self.sum / self.n if self.n else None,
            "zeros": self.zeros,
            "ones": self.ones,
        }


MAX_VERSIONS: Final = 200
MAX_BUCKETS: Final = 200
FIRST_BUCKET: Final = 10
"""The width in seconds of the first buckets of time."""
MAX_REASONS: Final = 64
MAX_MESSAGE: Final = 256
"""The number of characters of the newest failure's message that are kept for each reason."""
OTHER: Final = "Other"
"""The reason under which those beyond MAX_REASONS are counted."""
_SECONDS: Final = ("model_seconds", "tool_seconds", "own_seconds")


class VersionSums(Struct):
    """The rollouts with a reward of one policy version, and the sum of their rewards."""

    n: int = 0
    total: float = 0.0


class TimeSums(Struct):
    """What ended within one bucket of time."""

    n: int = 0
    rewarded: int = 0
    total: float = 0.0
    tokens: int = 0


class StageSums(Struct):
    """The seconds of all rollouts in the queue of a stage and in the stage itself, and its attempts."""

    queued: float = 0.0
    active: float = 0.0
    n: int = 0


class Failures(Struct):
    """The failures of one reason, with the stage, the id and the message of the newest."""

    n: int
    stage: str
    example: str
    message: str


class Statistics(Struct):
    """The statistics of one job, which the database keeps as JSON."""

    rewards: Sketch = field(default_factory=Sketch)
    versions: dict[int, VersionSums] = field(default_factory=dict)
    width: int = FIRST_BUCKET
    """The seconds of each bucket of time."""
    times: dict[int, TimeSums] = field(default_factory=dict)
    failures: dict[str, Failures] = field(default_factory=dict)
    truncated: dict[str, int] = field(default_factory=dict)
    stages: dict[str, StageSums] = field(default_factory=lambda: {stage: StageSums() for stage in STAGES})
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SECONDS, 0.0))
    """The sum of each of these timings."""
    tokens: int = 0
    calls: int = 0
    turns: int = 0
    last: float | None = None
    """When the last rollout ended."""

    def add(self, row: Any, timings: Mapping[str, Any]) -> None:
        """Add an ended rollout.

        Args:
            row: Its row, as `folding` reads it.
            timings: The row's decoded timings, with what `traces` keeps.
        """
        if row.reward is not None:
            self.rewards.add(row.reward)
            self._add_version(row.policy_index or 0, row.reward)
        self._add_time(row)
        trace = timings.get(traces.KEY, {})
        if row.state == RolloutState.FAILED:
            self._add_failure(row, trace)
        if cut := trace.get("cut"):
            name = cut if cut in self.truncated or len(self.truncated) < MAX_REASONS else OTHER
            self.truncated[name] = self.truncated.get(name, 0) + 1
        for stage, sums in self.stages.items():
            if entry := timings.get(stage):
                sums.queued += entry.get("queued_seconds", 0.0)
                sums.active += entry.get("active_seconds", 0.0)
                sums.n += entry.get("attempts", 0)
        for name in _SECONDS:
            self.seconds[name] += timings.get(name, 0.0)
        self.tokens += row.tokens
        self.calls += trace.get("calls", 0)
        self.turns += trace.get("turns", 0)
        self.last = row.ended_at if self.last is None else max(self.last, row.ended_at)

    def _add_version(self, index: int, reward: float) -> None:
        sums = self.versions.setdefault(index, VersionSums())
        sums.n += 1
        sums.total += reward
        if len(self.versions) > MAX_VERSIONS:
            del self.versions[min(self.versions)]

    def _add_time(self, row: Any) -> None:
        sums = self.times.setdefault(int(row.ended_at // self.width), TimeSums())
        sums.n += 1
        sums.tokens += row.tokens
        if row.reward is not None:
            sums.rewarded += 1
            sums.total += row.reward
        while len(self.times) > MAX_BUCKETS:
            merged: dict[int, TimeSums] = {}
            for key, value in self.times.items():
                into = merged.setdefault(key // 2, TimeSums())
                into.n += value.n
                into.rewarded += value.rewarded
                into.total += value.total
                into.tokens += value.tokens
            self.width *= 2
            self.times = merged

    def _add_failure(self, row: Any, trace: Mapping[str, Any]) -> None:
        places = trace.get("at")
        stage = BY_NUMBER[places[-2]].stage if places else "init"
        reason = row.reason or ""
        if reason not in self.failures and len(self.failures) >= MAX_REASONS:
            reason = OTHER
        n = self.failures[reason].n + 1 if reason in self.failures else 1
        # The newest example is the one whose pod, log and node are most likely still there.
        self.failures[reason] = Failures(n, stage or "", row.id, (row.message or "")[:MAX_MESSAGE])

    def view(self, labels: Mapping[int, str]) -> dict[str, Any]:
        """Return the statistics as the API returns them.

        Args:
            labels: The policy version of each index that is known.
        """
        by_count = sorted(self.failures.items(), key=lambda item: (-item[1].n, item[0]))
        return {
            "rewards": self.rewards.histogram(),
            "by_version": [
                {"version": labels.get(index, ""), "index": index, "n": sums.n, "mean": sums.total / sums.n}
                for index, sums in sorted(self.versions.items())
            ],
            "by_time": [
                {
                    "start": key * self.width,
                    "seconds": self.width,
                    "n": sums.n,
                    "mean": sums.total / sums.rewarded if sums.rewarded else None,
                    "tokens": sums.tokens,
                }
                for key, sums in sorted(self.times.items())
            ],
            "failures": [{"reason": reason, **structs.asdict(failure)} for reason, failure in by_count],
            "truncated": [
                {"reason": reason, "n": n}
                for reason, n in sorted(self.truncated.items(), key=lambda item: (-item[1], item[0]))
            ],
            "stages": {
                stage: {"queued": round(sums.queued, 3), "active": round(sums.active, 3), "n": sums.n}
                for stage, sums in self.stages.items()
            },
            **{name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "tokens": self.tokens,
            "tool_calls": self.calls,
            "turns": self.turns,
            "last_ended_at": self.last,
        }


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
