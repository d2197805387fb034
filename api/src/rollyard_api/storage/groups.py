"""Every statement that writes `groups`, and the reads of leases and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from rollyard_api.machine.groups import GroupResult
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import columns
from rollyard_api.storage.schema import groups
from rollyard_api.storage.statements import chunks, rows_of, run

_OF_JOB: Final = groups.c.job_id == bindparam("b_job")
_THIS: Final = sa.and_(_OF_JOB, groups.c.no == bindparam("b_no"))
_AMONG: Final = groups.c.no.in_(bindparam("b_nos", expanding=True))
_UPDATE: Final = sa.update(groups).where(_THIS)
_LEAVE: Final = _UPDATE.values(remaining=groups.c.remaining - bindparam("b_count"))
_COMPLETE: Final = (
    sa.select(groups.c.no).where(_OF_JOB, _AMONG, groups.c.remaining == 0).order_by(groups.c.no)
)
_DELETE: Final = sa.delete(groups).where(_OF_JOB)
_NUMBERS: Final = sa.select(groups.c.task_id, groups.c.no).where(
    _OF_JOB, groups.c.task_id.in_(bindparam("b_tasks", expanding=True))
)


class LeasedGroup(NamedTuple):
    """The columns of a group that leases read."""

    no: int
    task_id: str
    task: bytes
    backend: str | None
    remaining: int


_LEASED: Final = sa.select(*columns(LeasedGroup, groups)).where(_OF_JOB, _AMONG)


def add(tx: Transaction, new: Sequence[Mapping[str, Any]]) -> None:
    """Insert groups, each of which has a task and no rollouts yet."""
    tx.conn.execute(sa.insert(groups), new)


def named(conn: Connection, job_id: int, numbers: Iterable[int]) -> dict[int, LeasedGroup]:
    """Return the groups of a job with these numbers, by their numbers."""
    rows = rows_of(conn, _LEASED, {"b_job": job_id, "b_nos": sorted(set(numbers))})
    return {row[0]: LeasedGroup(*row) for row in rows}


def numbers(conn: Connection, job_id: int, task_ids: Sequence[str]) -> dict[str, int]:
    """Return the numbers of the groups of a job that have these tasks, by the ids of the tasks."""
    known: dict[str, int] = {}
    for batch in chunks(task_ids):
        rows = conn.execute(_NUMBERS, {"b_job": job_id, "b_tasks": batch})
        known.update((row.task_id, row.no) for row in rows)
    return known


def stick(tx: Transaction, job_id: int, no: int, backend: str) -> None:
    """Let later samples use this backend, which keeps a group that must be split in few parts."""
    tx.conn.execute(_UPDATE, {"b_job": job_id, "b_no": no, "backend": backend})


def leave(tx: Transaction, job_id: int, ended: Mapping[int, int]) -> list[int]:
    """Note how many members of groups have ended, by the groups' numbers.

    Returns:
        The numbers of those groups whose members have all ended.
    """
    numbers = sorted(ended)
    run(tx, _LEAVE, [{"b_job": job_id, "b_no": no, "b_count": ended[no]} for no in numbers])
    return [row[0] for row in rows_of(tx.conn, _COMPLETE, {"b_job": job_id, "b_nos": numbers})]


def end(tx: Transaction, job_id: int, first: int, results: Mapping[int, GroupResult]) -> None:
    """Note the results of groups, by their numbers, in the order in which the groups ended.

    The first of them has the place `first` in the order in which the job's groups ended.
    """
    ends = [
        {
            "b_job": job_id,
            "b_no": no,
            "seq": seq,
            "delivered": result.delivered,
            "informative": result.informative,
            "reason": result.reason,
        }
        for seq, (no, result) in enumerate(results.items(), first)
    ]
    run(tx, _UPDATE, ends)


def remove(tx: Transaction, job_id: int) -> None:
    """Remove the groups of a deleted job."""
    tx.conn.execute(_DELETE, {"b_job": job_id})
