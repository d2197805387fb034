"""Move the records of ended rollouts from the database into the trajectory store, each exactly once.

A part has two objects: its records as JSON lines, and the same records with their token lists as raw arrays
(see `packed`). It is filled in three steps. First its members and its number are committed, then the objects
are written under that number, and last the offsets are committed and the database's copy is dropped. A
process that is killed between two steps leaves a part that is written again, with the same members
under the same name and therefore with the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.codec import loads
from rollyard_api.core.problems import ApiError, StorageFull, TimedOut, Unavailable
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.rows import EndedRollout, RolloutSize, read_all
from rollyard_api.storage.schema import jobs, rollouts
from rollyard_api.storage.view_tables import rollout_words
from rollyard_api.trajectories import packed, records, words
from rollyard_api.trajectories.delivery import Piece
from rollyard_api.trajectories.object_store import ObjectMissing, TrajectoryStore
from rollyard_api.trajectories.part_places import PartRange, arrays_path, part_path, ranges_of

P = TypeVar("P", bytes, Piece)

PART_RECORDS = 256
PART_BYTES = 32 << 20
"""The most bytes in a part with several records. A new value changes parts that are unfinished."""
READ_THREADS = 4
WRITE_THREADS = 2
BUILD_THREADS = 2
MAX_WAITING = 1024
"""The number of calls that may wait for a thread of each kind."""
BUILD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """One object of the store, which holds some ended rollouts of one job."""

    job_id: int
    number: int


def begin_parts(tx: Transaction) -> list[Part]:
    """Assign parts to the waiting rollouts: at most one part of PART_RECORDS rollouts per job."""
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
    # The job's row is locked first, so two replicas never put one rollout into two parts.
    number = job_rows.next_part(tx, job_id)
    rollout_rows.begin_part(tx, job_id, number, PART_RECORDS)
    return number


def unfinished_parts(tx: Transaction) -> list[Part]:
    """Return the parts that a killed process began."""
    query = (
        sa.select(rollouts.c.job_id, rollouts.c.part)
        .where(rollouts.c.pending.is_not(None), rollouts.c.part.is_not(None))
        .distinct()
    )
    return [Part(row.job_id, row.part) for row in tx.conn.execute(query)]


@dataclass(frozen=True, slots=True)
class _Content:
    """The members of a part, as many as fit into it."""

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
    """Return records, each with its newline: as many as fit, but at least one."""
    lines: list[bytes] = []
    total = 0
    for row in rows:
        line = records.record(row, job, namespace) + b"\n"
        total += len(line)
        if lines and total > max_bytes:
            break
        lines.append(line)
    return lines


@dataclass(frozen=True, slots=True)
class _Objects:
    """What is made of the members of a part, as many as fit into it."""

    lines: list[bytes]
    """The records, each with its newline."""
    words: list[bytes]
    """The hashes of the words of each record."""
    arrays: bytes
    """The object with the raw arrays."""


def _objects(rows: Sequence[EndedRollout], namespace: str, job: str) -> _Objects:
    lines: list[bytes] = []
    hashes: list[bytes] = []
    arrays: list[bytes] = []
    total = 0
    for row in rows:
        head = records.head_of(row, job, namespace)
        line = records.line_of(head, row) + b"\n"
        total += len(line)
        if lines and total > PART_BYTES:
            break
        lines.append(line)
        hashes.append(words.hashes(words.texts_of(head)))
        arrays.append(packed.packed(head, row.segments))
    return _Objects(lines, hashes, packed.joined(lines, arrays))


def _packed(rows: Sequence[EndedRollout], namespace: str, job: str, max_bytes: int) -> list[bytes]:
    """Return records with raw arrays: as many as fit, but at least one."""
    found: list[bytes] = []
    total = 0
    for row in rows:
        record = packed.packed(records.head_of(row, job, namespace), row.segments)
        total += len(record)
        if found and total > max_bytes:
            break
        found.append(record)
    return found


def _words(module: Any) -> Any:
    return module.insert(rollout_words).on_conflict_do_nothing()


_WORDS = {"sqlite": _words(sqlite), "postgresql": _words(postgresql)}


def _place(
    tx: Transaction, part: Part, lines: Sequence[tuple[str, int]], of_words: Sequence[tuple[int, bytes]]
) -> None:
    kept = [
        {"job_id": part.job_id, "end_seq": place, "words": hashes} for place, hashes in of_words if hashes
    ]
    if kept:
        tx.conn.execute(_WORDS["sqlite" if tx.sqlite else "postgresql"], kept)
    rollout_rows.place(tx, part.job_id, part.number, lines)
    tx.count("stored", value=len(lines))


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

    @property
    def full(self) -> bool:
        """Whether the store's last refusal was for lack of space."""
        return isinstance(self.refused, StorageFull)

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
        # A second call waits for the first, and stores what has come since.
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
        content = await self._database.read(partial(_content, part=part))
        if content is None or not content.rows:
            return 0
        made = await self.builds.run(partial(_objects, content.rows, content.namespace, content.job))
        lines, arrays = made.lines, made.arrays
        path = part_path(content.namespace, content.job, content.uid, part.number)
        try:
            await self.writes.run(partial(self._store.write, path, b"".join(lines)))
            await self.writes.run(partial(self._store.write, arrays_path(path), arrays))
        except (StorageFull, TimedOut, Unavailable) as error:
            self.refused = error
            raise
        placed = [(row.id, len(line)) for row, line in zip(content.rows, lines, strict=False)]
        of_words = [(row.end_seq, hashes) for row, hashes in zip(content.rows, made.words, strict=False)]
        await self._database.write(partial(_place, part=part, lines=placed, of_words=of_words))
        return len(lines)

    async def unstored(self) -> int:
        """Return the number of ended rollouts that wait for the store."""
        return await self._database.read(_pending)

    async def lines(
        self, rows: Sequence[EndedRollout], namespace: str, job: str, uid: str, max_bytes: int
    ) -> list[bytes]:
        """Return the records of ended rollouts, from the store or the database, in the order of the rows.

        If all together would have more than `max_bytes`, fewer are returned, but at least one.

        Raises:
            TimedOut, Unavailable: The store does not answer, or its object was changed.
        """
        waiting = [row for row in rows if row.pending is not None]
        placed = [row for row in rows if row.pending is None]
        made: dict[str, bytes] = {}
        if waiting:
            build = partial(_lines, waiting, namespace, job, max_bytes)
            for row, line in zip(waiting, await self.builds.run(build, namespace), strict=False):
                made[row.id] = line[:-1]
        if placed:
            read = partial(self._read, ranges_of(placed, namespace, job, uid))
            for row, data in zip(placed, await self.reads.run(read, namespace), strict=True):
                made[row.id] = data.rstrip(b"\n")
        return _first(rows, made, max_bytes)

    async def arrays(
        self, rows: Sequence[EndedRollout], namespace: str, job: str, uid: str, max_bytes: int
    ) -> list[Piece]:
        """Return the same records with their token lists as raw arrays, as `packed` says.

        Those of a part that an older release has written, without such an object, are made of its lines.

        Raises:
            TimedOut, Unavailable: The store does not answer, or its object was changed.
        """
        waiting = [row for row in rows if row.pending is not None]
        placed = [row for row in rows if row.pending is None]
        made: dict[str, Piece] = {}
        if waiting:
            build = partial(_packed, waiting, namespace, job, max_bytes)
            built = await self.builds.run(build, namespace)
            made |= {row.id: record for row, record in zip(waiting, built, strict=False)}
        if placed:
            read = partial(self._read_arrays, ranges_of(placed, namespace, job, uid))
            stored = await self.reads.run(read, namespace)
            made |= {row.id: record for row, record in zip(placed, stored, strict=True)}
        return _first(rows, made, max_bytes)

    def _read_arrays(self, ranges: Sequence[PartRange]) -> list[Piece]:
        indexes: dict[str, dict[int, tuple[int, int]] | None] = {}
        found: list[Piece] = []
        for one in ranges:
            path = arrays_path(one.path)
            if path not in indexes:
                indexes[path] = self._index(path)
            index = indexes[path]
            if index is None:
                found += [packed.repacked(loads(line)) for line in self._read([one])]
                continue
            try:
                spans = [index[start] for start in accumulate(one.lengths[:-1], initial=one.start)]
            except KeyError as error:
                raise Unavailable(f"the trajectory store's {path} lacks a record: it was changed") from error
            begin, end = spans[0][0], spans[-1][1]
            data = memoryview(self._store.read(path, begin, end - begin))
            found += [data[first - begin : last - begin] for first, last in spans]
        return found

    def _index(self, path: str) -> dict[int, tuple[int, int]] | None:
        try:
            return packed.places(self._store.read(path, 0, packed.HEAD_BYTES), path)
        except ObjectMissing:
            return None

    def _read(self, ranges: Sequence[PartRange]) -> list[bytes]:
        found = []
        for one in ranges:
            data = memoryview(self._store.read(one.path, one.start, sum(one.lengths)))
            for length in one.lengths:
                found.append(bytes(data[:length]))
                data = data[length:]
        return found


def _first(rows: Sequence[EndedRollout], made: Mapping[str, P], max_bytes: int) -> list[P]:
    """Return the records of the first rows: as many as were made and fit, but at least one."""
    found: list[P] = []
    total = 0
    for row in rows:
        if row.id not in made:
            break
        total += len(made[row.id])
        if found and total > max_bytes:
            break
        found.append(made[row.id])
    return found


def _pending(conn: Connection) -> int:
    query = sa.select(sa.func.count()).select_from(rollouts).where(rollouts.c.pending.is_not(None))
    return int(conn.execute(query).scalar_one())


def _anything_pending(conn: Connection) -> bool:
    query = (
        sa.select(rollouts.c.id).where(rollouts.c.pending.is_not(None), rollouts.c.part.is_(None)).limit(1)
    )
    return conn.execute(query).first() is not None
