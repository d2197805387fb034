"""Moving ended rollouts' records from the database into the trajectory store, each exactly once.

A part is filled in three steps: its members and its number are committed; the object is
written under that number; offsets are committed and the database's copy is dropped. A
process killed between any two of them leaves a part that is written again, with the same
members under the same name, hence the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.problems import ApiError, StorageFull, TimedOut, Unavailable
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import EndedRollout, RolloutSize, read_all
from rollyard_api.storage.schema import jobs, payloads, rollouts
from rollyard_api.trajectories import records
from rollyard_api.trajectories.object_store import TrajectoryStore

PART_RECORDS = 256
PART_BYTES = 32 << 20
"""Bytes of a part's records, unless it has a single one. Another value changes parts that are unfinished."""
READ_THREADS = 4
WRITE_THREADS = 2
BUILD_THREADS = 2
MAX_WAITING = 1024
"""Calls that wait for a thread of each kind."""
BUILD_SECONDS = 60.0

_PLACE = (
    sa.update(rollouts)
    .where(rollouts.c.id == bindparam("b_id"), rollouts.c.pending.is_not(None))
    .values(pending=None, part_offset=bindparam("b_offset"), part_length=bindparam("b_length"))
)
_DROP = sa.delete(payloads).where(payloads.c.rollout_id == bindparam("b_id"))


@dataclass(frozen=True, slots=True)
class Part:
    """One object of the store: some ended rollouts of one job."""

    job_id: int
    number: int


def part_path(namespace: str, job: str, uid: str, number: int) -> str:
    """Where a part lies, relative to the store: one folder a job, its uid tells it from a namesake."""
    return f"{namespace}/{job}-{uid[:8]}/part-{number:06d}.ndjson"


def begin_parts(tx: Transaction) -> list[Part]:
    """Give numbers to what waits: at most one part of PART_RECORDS rollouts per job."""
    ids = list(
        tx.conn.scalars(
            sa.select(rollouts.c.job_id)
            .where(rollouts.c.pending.is_not(None), rollouts.c.part.is_(None))
            .group_by(rollouts.c.job_id)
            .order_by(rollouts.c.job_id)
        )
    )
    return [Part(job_id, _begin(tx, job_id)) for job_id in ids]


def _begin(tx: Transaction, job_id: int) -> int:
    # The job's row is locked first: two replicas never put one rollout into two parts.
    number: int = tx.conn.execute(
        sa.update(jobs).where(jobs.c.id == job_id).values(parts=jobs.c.parts + 1).returning(jobs.c.parts)
    ).scalar_one()
    members = (
        sa.select(rollouts.c.id)
        .where(rollouts.c.job_id == job_id, rollouts.c.pending.is_not(None), rollouts.c.part.is_(None))
        .order_by(rollouts.c.end_seq)
        .limit(PART_RECORDS)
    )
    tx.conn.execute(
        sa.update(rollouts).where(rollouts.c.id.in_(members.scalar_subquery())).values(part=number)
    )
    return number


def unfinished_parts(tx: Transaction) -> list[Part]:
    """Parts that a killed process began."""
    query = (
        sa.select(rollouts.c.job_id, rollouts.c.part)
        .where(rollouts.c.pending.is_not(None), rollouts.c.part.is_not(None))
        .distinct()
    )
    return [Part(row.job_id, row.part) for row in tx.conn.execute(query)]


@dataclass(frozen=True, slots=True)
class _Content:
    """The members of a part, as far as they fit into one."""

    namespace: str
    job: str
    uid: str
    rows: list[EndedRollout]


def _content(conn: Connection, part: Part) -> _Content | None:
    job = conn.execute(
        sa.select(jobs.c.namespace, jobs.c.name, jobs.c.uid).where(jobs.c.id == part.job_id)
    ).one_or_none()
    if job is None:
        return None
    members = (
        rollouts.c.job_id == part.job_id, rollouts.c.part == part.number, rollouts.c.pending.is_not(None)
    )  # fmt: skip
    sizes = records.sizes().where(*members).order_by(rollouts.c.end_seq)
    found = read_all(RolloutSize, conn.execute(sizes))
    count = records.fitting((row.bytes for row in found), PART_BYTES)
    rows: list[EndedRollout] = []
    if found:
        chosen = records.select().where(*members, rollouts.c.end_seq <= found[count - 1].end_seq)
        rows = read_all(EndedRollout, conn.execute(chosen.order_by(rollouts.c.end_seq)))
    return _Content(job.namespace, job.name, job.uid, rows)


def _lines(rows: Sequence[EndedRollout], namespace: str, job: str, max_bytes: int) -> list[bytes]:
    """Records, each with its newline: as many as fit, at least one."""
    lines: list[bytes] = []
    total = 0
    for row in rows:
        line = records.record(row, job, namespace) + b"\n"
        total += len(line)
        if lines and total > max_bytes:
            break
        lines.append(line)
    return lines


def _place(tx: Transaction, part: Part, lines: Sequence[tuple[str, int]]) -> None:
    offset, places = 0, []
    for rollout, length in lines:
        places.append({"b_id": rollout, "b_offset": offset, "b_length": length})
        offset += length
    tx.conn.execute(_PLACE, places)
    tx.conn.execute(_DROP, [{"b_id": rollout} for rollout, _ in lines])
    # Members that had no room wait for another part.
    left = (rollouts.c.job_id == part.job_id, rollouts.c.part == part.number, rollouts.c.pending.is_not(None))
    tx.conn.execute(sa.update(rollouts).where(*left).values(part=None))
    tx.count("stored", value=len(places))


@dataclass(frozen=True, slots=True)
class _Range:
    """Consecutive bytes of one part."""

    path: str
    start: int
    lengths: list[int]


class Archive:
    """Writes parts and reads records back, each in threads of its own.

    Args:
        database: where records wait for the store.
        store: where they go to.
        seconds: how long a caller waits for the store.
    """

    def __init__(self, database: Database, store: TrajectoryStore, seconds: float) -> None:
        self._database = database
        self._store = store
        self._left: list[Part] = []
        self.reads = Bulkhead("trajectory store", threads=READ_THREADS, waiting=MAX_WAITING, seconds=seconds)
        self.writes = Bulkhead(
            "trajectory store", threads=WRITE_THREADS, waiting=MAX_WAITING, seconds=3 * seconds
        )
        self.builds = Bulkhead(
            "encoding of trajectories", threads=BUILD_THREADS, waiting=MAX_WAITING, seconds=BUILD_SECONDS
        )
        self.refused: ApiError | None = None
        """Why the store took nothing when it was last written to."""

    @property
    def full(self) -> bool:
        """Whether the store last refused for lack of space."""
        return isinstance(self.refused, StorageFull)

    async def open(self) -> None:
        """Make the store's root where that is needed.

        Raises:
            OSError: it cannot be made.
            TimedOut: the store does not answer now; it is opened by the first write then.
        """
        await self.writes.run(self._store.open)

    def close(self) -> None:
        """End the threads; what hangs is not waited for."""
        for bulkhead in (self.reads, self.writes, self.builds):
            bulkhead.close()

    async def adopt(self) -> None:
        """Take over the parts of a process that was killed."""
        self._left = await self._database.write(unfinished_parts)

    async def flush(self) -> int:
        """Store one round of what waits; returns the number of records stored.

        Raises:
            StorageFull, TimedOut, Unavailable: the store refused or hangs; the next call tries again.
        """
        if not self._left:
            if not await self._database.read(_anything_pending):
                return 0
            self._left = await self._database.write(begin_parts)
        stored = 0
        while self._left:
            stored += await self._store_part(self._left[0])
            self._left.pop(0)
        self.refused = None
        return stored

    async def _store_part(self, part: Part) -> int:
        content = await self._database.read(partial(_content, part=part))
        if content is None or not content.rows:
            return 0
        lines = await self.builds.run(
            partial(_lines, content.rows, content.namespace, content.job, PART_BYTES)
        )
        path = part_path(content.namespace, content.job, content.uid, part.number)
        try:
            await self.writes.run(partial(self._store.write, path, b"".join(lines)))
        except (StorageFull, TimedOut, Unavailable) as error:
            self.refused = error
            raise
        placed = [(row.id, len(line)) for row, line in zip(content.rows, lines, strict=False)]
        await self._database.write(partial(_place, part=part, lines=placed))
        return len(lines)

    async def unstored(self) -> int:
        """How many ended rollouts wait for the store."""
        return await self._database.read(_pending)

    async def lines(
        self, rows: Sequence[EndedRollout], namespace: str, job: str, uid: str, max_bytes: int
    ) -> list[bytes]:
        """The records of ended rollouts, from the store or the database, in the order of the rows.

        Fewer than asked for where they would have more than `max_bytes` together; at least one.

        Raises:
            TimedOut, Unavailable: the store does not answer, or its object was changed.
        """
        waiting = [row for row in rows if row.pending is not None]
        placed = [row for row in rows if row.pending is None]
        made: dict[str, bytes] = {}
        if waiting:
            build = partial(_lines, waiting, namespace, job, max_bytes)
            for row, line in zip(waiting, await self.builds.run(build, namespace), strict=False):
                made[row.id] = line[:-1]
        if placed:
            read = partial(self._read, _ranges(placed, namespace, job, uid))
            for row, data in zip(placed, await self.reads.run(read, namespace), strict=True):
                made[row.id] = data.rstrip(b"\n")
        lines: list[bytes] = []
        total = 0
        for row in rows:
            total += len(made.get(row.id, b""))
            if row.id not in made or (lines and total > max_bytes):
                break
            lines.append(made[row.id])
        return lines

    def _read(self, ranges: Sequence[_Range]) -> list[bytes]:
        found = []
        for one in ranges:
            data = memoryview(self._store.read(one.path, one.start, sum(one.lengths)))
            for length in one.lengths:
                found.append(bytes(data[:length]))
                data = data[length:]
        return found


def _ranges(rows: Sequence[EndedRollout], namespace: str, job: str, uid: str) -> list[_Range]:
    """Where the records lie; neighbours in a part are read together."""
    ranges: list[_Range] = []
    end: tuple[int, int] | None = None
    for row in rows:
        assert row.part is not None
        assert row.part_offset is not None
        assert row.part_length is not None
        if end != (row.part, row.part_offset):
            ranges.append(_Range(part_path(namespace, job, uid, row.part), row.part_offset, []))
        ranges[-1].lengths.append(row.part_length)
        end = (row.part, row.part_offset + row.part_length)
    return ranges


def _pending(conn: Connection) -> int:
    query = sa.select(sa.func.count()).select_from(rollouts).where(rollouts.c.pending.is_not(None))
    return int(conn.execute(query).scalar_one())


def _anything_pending(conn: Connection) -> bool:
    query = (
        sa.select(rollouts.c.id).where(rollouts.c.pending.is_not(None), rollouts.c.part.is_(None)).limit(1)
    )
    return conn.execute(query).first() is not None
