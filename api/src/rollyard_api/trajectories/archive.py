"""Move the records of ended rollouts from the database into the trajectory store, each exactly once.

A part has two objects: its records as JSON lines, and the same records with their token lists as raw arrays
(see `packed`). It is filled in three steps. First its members and its number are committed, then the objects
are written under that number, and last the offsets are committed and the database's copy is dropped. A
process that is killed between two steps leaves a part that is written again, with the same members
under the same name and therefore with the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.codec import loads
from rollyard_api.core.problems import ApiError, StorageFull, TimedOut, Unavailable
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import EndedRollout, JobRow
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.statements import by_dialect
from rollyard_api.storage.view_tables import rollout_words
from rollyard_api.trajectories import packed, records, words
from rollyard_api.trajectories.delivery import Piece
from rollyard_api.trajectories.object_store import ObjectMissing, TrajectoryStore

P = TypeVar("P", bytes, Piece)
R = TypeVar("R")

PART_RECORDS: Final = 256
PART_BYTES: Final = 32 << 20
"""The most bytes in a part with several records. A new value changes unfinished parts."""
READ_THREADS: Final = 4
WRITE_THREADS: Final = 2
BUILD_THREADS: Final = 2
MAX_WAITING: Final = 1024
"""The number of calls that may wait for a thread of each kind."""
BUILD_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """One object of the store, which holds some ended rollouts of one job."""

    job_id: int
    number: int


def begin_parts(tx: Transaction) -> list[Part]:
    """Assign parts to the waiting rollouts: at most one part of PART_RECORDS rollouts per job."""
    waiting = (
        sa.select(rollouts.c.job_id)
        .where(rollouts.c.pending.is_not(None), rollouts.c.part.is_(None))
        .group_by(rollouts.c.job_id)
        .order_by(rollouts.c.job_id)
    )
    parts = []
    for job_id in list(tx.conn.scalars(waiting)):
        # The job's row is locked first, so two replicas never put one rollout into two parts.
        number = job_rows.next_part(tx, job_id)
        rollout_rows.begin_part(tx, job_id, number, PART_RECORDS)
        parts.append(Part(job_id, number))
    return parts


def unfinished_parts(tx: Transaction) -> list[Part]:
    """Return the parts that a killed process began."""
    query = (
        sa.select(rollouts.c.job_id, rollouts.c.part)
        .where(rollouts.c.pending.is_not(None), rollouts.c.part.is_not(None))
        .distinct()
    )
    return [Part(row.job_id, row.part) for row in tx.conn.execute(query)]


def _content(conn: Connection, part: Part) -> tuple[JobRow | None, list[EndedRollout]]:
    """Return the job and the members of a part, as many as fit into it."""
    members = (
        rollouts.c.job_id == part.job_id,
        rollouts.c.part == part.number,
        rollouts.c.pending.is_not(None),
    )
    rows = records.first_rows(conn, members, rollouts.c.end_seq, PART_BYTES)
    return job_rows.by_id(conn, part.job_id), rows


@dataclass(frozen=True, slots=True)
class _Objects:
    """What is made from the members of a part, as many as fit into it."""

    lines: list[bytes]
    """The records, each with its newline."""
    words: list[bytes]
    """The hashes of the words of each record."""
    arrays: bytes
    """The object with the raw arrays."""


def _objects(rows: Sequence[EndedRollout], job: JobRow) -> _Objects:
    lines: list[bytes] = []
    hashes: list[bytes] = []
    arrays: list[bytes] = []
    total = 0
    for row in rows:
        head = records.head_of(row, job)
        line = records.line_of(head, row) + b"\n"
        total += len(line)
        if lines and total > PART_BYTES:
            break
        lines.append(line)
        hashes.append(words.hashes(words.texts_of(head)))
        arrays.append(packed.packed(head, row.segments))
    return _Objects(lines, hashes, packed.joined(lines, arrays))


def made(rows: Sequence[R], make: Callable[[R], bytes], max_bytes: int) -> list[bytes]:
    """Return records of the first rows, until they have more than `max_bytes` together."""
    outputs: list[bytes] = []
    total = 0
    for row in rows:
        outputs.append(make(row))
        total += len(outputs[-1])
        if total > max_bytes:
            break
    return outputs


_WORDS: Final = by_dialect(lambda insert: insert(rollout_words).on_conflict_do_nothing())


def _place(tx: Transaction, part: Part, rows: Sequence[EndedRollout], objects: _Objects) -> None:
    word_rows = [
        {"job_id": part.job_id, "end_seq": row.end_seq, "words": hashes}
        for row, hashes in zip(rows, objects.words, strict=False)
        if hashes
    ]
    if word_rows:
        tx.conn.execute(_WORDS[tx.sqlite], word_rows)
    lengths = [(row.id, len(line)) for row, line in zip(rows, objects.lines, strict=False)]
    rollout_rows.place(tx, part.job_id, part.number, lengths)
    tx.count("trajectories_stored", value=len(lengths))


class Archive:
    """Writes parts and reads records back, each in threads of its own.

    Args:
        database: The database where records wait for the store.
        store: The store to which they are moved.
        seconds: How long a caller waits for the store, in seconds.
    """

    def __init__(self, database: Database, store: TrajectoryStore, seconds: float) -> None:
        self._database = database
        self._store = store
        self._left: list[Part] = []
        self._flushing = asyncio.Lock()
        self.reads = Bulkhead("trajectory store", threads=READ_THREADS, waiting=MAX_WAITING, seconds=seconds)
        self.writes = Bulkhead(
            "trajectory store", threads=WRITE_THREADS, waiting=MAX_WAITING, seconds=3 * seconds
        )
        self.builds = Bulkhead(
            "encoding of trajectories", threads=BUILD_THREADS, waiting=MAX_WAITING, seconds=BUILD_SECONDS
        )
        self.refused: ApiError | None = None
        """The reason why the store refused the last write, or None if it did not."""

    async def open(self) -> None:
        """Create the store's root if necessary.

        Raises:
            OSError: The root cannot be created.
            TimedOut: The store does not answer now. In that case the first write opens it.
        """
        await self.writes.run(self._store.open)

    def close(self) -> None:
        """End the threads without waiting for calls that hang."""
        for bulkhead in (self.reads, self.writes, self.builds):
            bulkhead.close()

    async def adopt(self) -> None:
        """Take over the parts of a process that was killed."""
        self._left = await self._database.write(unfinished_parts)

    async def flush(self) -> int:
        """Store one round of waiting records and return how many were stored.

        Raises:
            StorageFull, TimedOut, Unavailable: The store refuses or hangs. The next call tries again.
        """
        # A second call waits for the first, and stores what has arrived since.
        async with self._flushing:
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
        job, rows = await self._database.read(partial(_content, part=part))
        if job is None or not rows:
            return 0
        objects = await self.builds.run(partial(_objects, rows, job))
        path = part_path(job, part.number)
        try:
            await self.writes.run(partial(self._store.write, path, b"".join(objects.lines)))
            await self.writes.run(partial(self._store.write, arrays_path(path), objects.arrays))
        except (StorageFull, TimedOut, Unavailable) as error:
            self.refused = error
            raise
        await self._database.write(partial(_place, part=part, rows=rows, objects=objects))
        return len(objects.lines)

    async def unstored(self) -> int:
        """Return the number of ended rollouts that wait for the store."""
        query = sa.select(sa.func.count()).select_from(rollouts).where(rollouts.c.pending.is_not(None))
        return int(await self._database.read(lambda conn: conn.execute(query).scalar_one()))

    async def lines(self, rows: Sequence[EndedRollout], job: JobRow, max_bytes: int) -> list[bytes]:
        """Return the records of ended rollouts, from the store or the database, in the order of the rows.

        If they would have more than `max_bytes` together, fewer are returned, but at least one.

        Raises:
            TimedOut, Unavailable: The store does not answer, or its object was changed.
        """
        return await self._records(rows, job, max_bytes, partial(records.record, job=job), self._read)

    async def arrays(self, rows: Sequence[EndedRollout], job: JobRow, max_bytes: int) -> list[Piece]:
        """Return the same records with their token lists as raw arrays, as `packed` says.

        Those of a part whose object with arrays was deleted to save space are made from its lines.

        Raises:
            TimedOut, Unavailable: The store does not answer, or its object was changed.
        """

        def make(row: EndedRollout) -> bytes:
            return packed.packed(records.head_of(row, job), row.segments)

        return await self._records(rows, job, max_bytes, make, self._read_arrays)

    async def _records(
        self,
        rows: Sequence[EndedRollout],
        job: JobRow,
        max_bytes: int,
        make: Callable[[EndedRollout], bytes],
        read: Callable[[Sequence[PartRange]], list[P]],
    ) -> list[P]:
        """Return the records of rows, each made from its row until the store has it, or read from there."""
        waiting = [row for row in rows if row.pending is not None]
        placed = [row for row in rows if row.pending is None]
        by_id: dict[str, Any] = {}
        if waiting:
            built = await self.builds.run(partial(made, waiting, make, max_bytes), job.namespace)
            by_id |= {row.id: record for row, record in zip(waiting, built, strict=False)}
        if placed:
            ranges = ranges_of(placed, job)
            stored = await self.reads.run(partial(read, ranges), job.namespace)
            by_id |= {row.id: record for row, record in zip(placed, stored, strict=True)}
        there = [by_id[row.id] for row in takewhile(lambda row: row.id in by_id, rows)]
        return there[: records.fitting(map(len, there), max_bytes)]

    def _read_arrays(self, ranges: Sequence[PartRange]) -> list[Piece]:
        indexes: dict[str, dict[int, tuple[int, int]] | None] = {}
        pieces: list[Piece] = []
        for part in ranges:
            path = arrays_path(part.path)
            if path not in indexes:
                indexes[path] = self._index(path)
            index = indexes[path]
            if index is None:
                pieces += [packed.repacked(loads(line)) for line in self._read([part])]
                continue
            try:
                spans = [index[start] for start in accumulate(part.lengths[:-1], initial=part.start)]
            except KeyError as error:
                raise Unavailable(f"the trajectory store's {path} lacks a record: it was changed") from error
            begin, end = spans[0][0], spans[-1][1]
            data = memoryview(self._store.read(path, begin, end - begin))
            pieces += [data[first - begin : last - begin] for first, last in spans]
        return pieces

    def _index(self, path: str) -> dict[int, tuple[int, int]] | None:
        try:
            return packed.places(self._store.read(path, 0, packed.HEAD_BYTES), path)
        except ObjectMissing:
            return None

    def _read(self, ranges: Sequence[PartRange]) -> list[bytes]:
        lines = []
        for part in ranges:
            data = memoryview(self._store.read(part.path, part.start, sum(part.lengths)))
            for length in part.lengths:
                lines.append(bytes(data[:length]).rstrip(b"\n"))
                data = data[length:]
        return lines


def _anything_pending(conn: Connection) -> bool:
    query = (
        sa.select(rollouts.c.id).where(rollouts.c.pending.is_not(None), rollouts.c.part.is_(None)).limit(1)
    )
    return conn.execute(query).first() is not None


def part_path(job: JobRow, number: int) -> str:
    """Return a part's path in the store; each job has a folder, with its uid to distinguish namesakes."""
    return f"{job.namespace}/{job.name}-{job.uid[:8]}/part-{number:06d}.ndjson"


def arrays_path(path: str) -> str:
    """Return the path of the object with raw arrays that belongs to the part at `path`."""
    return f"{path.removesuffix('.ndjson')}.arrays"


@dataclass(frozen=True, slots=True)
class PartRange:
    """Consecutive bytes of one part."""

    path: str
    start: int
    lengths: list[int]


def ranges_of(rows: Sequence[EndedRollout], job: JobRow) -> list[PartRange]:
    """Return the byte ranges of the records. Neighbours in a part are read together."""
    ranges: list[PartRange] = []
    end: tuple[int, int] | None = None
    for row in rows:
        assert row.part is not None
        assert row.part_offset is not None
        assert row.part_length is not None
        if end != (row.part, row.part_offset):
            ranges.append(PartRange(part_path(job, row.part), row.part_offset, []))
        ranges[-1].lengths.append(row.part_length)
        end = (row.part, row.part_offset + row.part_length)
    return ranges
