"""Moving ended rollouts' records from the database into the trajectory store, each exactly once.

A part is filled in three steps: its members and its number are committed; the object is
written under that number; offsets are committed and the database's copy is dropped. A
process killed between any two of them leaves a part that is written again, with the same
members under the same name, hence the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api import records
from rollyard_api.database import Database, Transaction
from rollyard_api.schema import jobs, payloads, rollouts
from rollyard_api.store import TrajectoryStore

PART_RECORDS = 256

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


def _content(conn: Connection, part: Part) -> tuple[str, list[tuple[str, bytes]]] | None:
    job = conn.execute(
        sa.select(jobs.c.namespace, jobs.c.name, jobs.c.uid).where(jobs.c.id == part.job_id)
    ).one_or_none()
    if job is None:
        return None
    rows = conn.execute(
        records.select()
        .where(
            rollouts.c.job_id == part.job_id, rollouts.c.part == part.number, rollouts.c.pending.is_not(None)
        )
        .order_by(rollouts.c.end_seq)
    )
    lines = [(row.id, records.record(row, job.name, job.namespace) + b"\n") for row in rows]
    return part_path(job.namespace, job.name, job.uid, part.number), lines


def _place(tx: Transaction, lines: Sequence[tuple[str, int]]) -> None:
    offset, places = 0, []
    for rollout, length in lines:
        places.append({"b_id": rollout, "b_offset": offset, "b_length": length})
        offset += length
    tx.conn.execute(_PLACE, places)
    tx.conn.execute(_DROP, [{"b_id": rollout} for rollout, _ in lines])
    tx.count("stored", value=len(places))


class Archive:
    """Writes parts and reads records back. `full` tells whether the store last refused for lack of space."""

    def __init__(self, database: Database, store: TrajectoryStore) -> None:
        self._database = database
        self._store = store
        self._left: list[Part] = []
        self.full = False

    async def adopt(self) -> None:
        """Take over the parts of a process that was killed."""
        self._left = await self._database.write(unfinished_parts)

    async def flush(self) -> int:
        """Store one round of what waits; returns the number of records stored.

        Raises:
            StorageFull, Unavailable: the store refused; what is left is tried again by the next call.
        """
        if not self._left:
            if not await self._database.read(_anything_pending):
                return 0
            self._left = await self._database.write(begin_parts)
        stored = 0
        while self._left:
            content = await self._database.read(partial(_content, part=self._left[0]))
            if content is not None and content[1]:
                path, lines = content
                await asyncio.to_thread(self._store.write, path, b"".join(line for _, line in lines))
                sizes = [(rollout, len(line)) for rollout, line in lines]
                await self._database.write(partial(_place, lines=sizes))
                stored += len(lines)
            self._left.pop(0)
        self.full = False
        return stored

    async def unstored(self) -> int:
        """How many ended rollouts wait for the store."""
        return await self._database.read(_pending)

    def fetch(self, row: Any, namespace: str, job: str, uid: str) -> bytes:
        """The record of an ended rollout, from the store or the database. Blocking: call it in a thread."""
        if row.pending is not None:
            return records.record(row, job, namespace)
        data = self._store.read(part_path(namespace, job, uid, row.part), row.part_offset, row.part_length)
        return data.rstrip(b"\n")


def _pending(conn: Connection) -> int:
    query = sa.select(sa.func.count()).select_from(rollouts).where(rollouts.c.pending.is_not(None))
    return int(conn.execute(query).scalar_one())


def _anything_pending(conn: Connection) -> bool:
    query = (
        sa.select(rollouts.c.id).where(rollouts.c.pending.is_not(None), rollouts.c.part.is_(None)).limit(1)
    )
    return conn.execute(query).first() is not None
