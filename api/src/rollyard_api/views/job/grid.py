"""The groups of a job as rows of cells, one cell a sample, without their trajectories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.machine.jobs import prefix_of
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import groups, rollouts
from rollyard_api.storage.statements import PlaceIn
from rollyard_api.storage.view_tables import ended_groups
from rollyard_api.trajectories.records import fitting
from rollyard_api.views import keyset
from rollyard_api.views.job.rollout_list import Status
from rollyard_api.views.keyset import ListPlace

GridSort = Literal["no", "ended", "-ended", "reward", "-reward", "variance", "-variance", "reason"]
MAX_GROUPS: Final = 500
MAX_CELLS: Final = 16_384
"""The number of samples in one answer. A page with larger groups has fewer of them, but at least one."""
_LETTERS: Final = {"queued": "q", "leased": "l", "succeeded": "s", "failed": "f", "cancelled": "c"}
_COLUMN: Final = {"no": "no", "ended": "seq", "reward": "mean", "variance": "variance", "reason": "reason"}


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups of a job are listed; None and "" stand for no restriction."""

    sort: GridSort = "no"
    informative: bool | None = None
    status: Status | None = None
    """The groups of which at least one sample has this status."""
    task: str | None = None
    search: str = ""
    """A part of the task's id, in any case of letters."""


def page(
    conn: Connection, job: JobRow, asked: GroupFilter, limit: int, given: str
) -> tuple[list[dict[str, Any]], str | None]:
    """Return a page of a job's groups, and the `continue` of the next page or None.

    Raises:
        QueryRefused: `given` is not a `continue` of this list.
        Gone: It belongs to another job.
    """
    kind: type[float] | type[str] = str if asked.sort == "reason" else float
    place = keyset.place(given, job.uid, job.name, asdict(asked), kind)
    rows = _rows(conn, job.id, asked, limit, place)
    more = len(rows) > limit
    rows = rows[:limit]
    cells = _cells(conn, job, [row.no for row in rows])
    count = fitting((len(cells[row.no]) for row in rows), MAX_CELLS)
    more = more or count < len(rows)
    items = [_row(row, cells[row.no]) for row in rows[:count]]
    last = rows[count - 1] if count else None
    if not more or last is None:
        return items, None
    key = getattr(last, _COLUMN[asked.sort.lstrip("-")])
    if isinstance(key, int):
        key = float(key)
    return items, keyset.text(job.uid, asdict(asked), ListPlace(key, last.no))


_GROUP = groups.c["no", "task_id", "seq", "delivered", "informative", "reason"]


def _where(job_id: int, asked: GroupFilter) -> list[sa.ColumnElement[bool]]:
    found = [groups.c.job_id == job_id]
    if asked.task is not None:
        found.append(groups.c.task_id == asked.task)
    if asked.search:
        # `position` and `instr` take the text as it is, so no sign in it has a meaning.
        found.append(PlaceIn(sa.func.lower(groups.c.task_id), sa.literal(asked.search.lower())) > 0)
    if asked.informative is not None:
        found.append(sa.func.coalesce(groups.c.informative, sa.false()).is_(asked.informative))
    if asked.status is not None:
        states = RolloutState.matching(None, asked.status)
        some = sa.select(rollouts.c.group_no).where(rollouts.c.job_id == job_id, rollouts.c.state.in_(states))
        found.append(groups.c.no.in_(some))
    return found


def _rows(
    conn: Connection, job_id: int, asked: GroupFilter, limit: int, place: ListPlace | None
) -> Sequence[Any]:
    """Return groups after a place: by number, or in an order by what only those that have ended have."""
    if asked.sort == "no":
        query = sa.select(*_GROUP).where(*_where(job_id, asked))
        return keyset.Order(groups.c.no, groups.c.no).rows(conn, query, limit, place)
    name, falls = asked.sort.lstrip("-"), asked.sort.startswith("-")
    column, number = ended_groups.c[_COLUMN[name]], ended_groups.c.no
    both = sa.and_(groups.c.job_id == ended_groups.c.job_id, groups.c.no == ended_groups.c.no)
    kept = (ended_groups.c.mean, ended_groups.c.variance)
    base: sa.Select[Any] = sa.select(*_GROUP, *kept).join_from(ended_groups, groups, both)
    where = (ended_groups.c.job_id == job_id, *_where(job_id, asked))
    missing = column.is_(None) if column.nullable else None
    return keyset.Order(column, number, missing, falls=falls).rows(conn, base.where(*where), limit, place)


def _cells(conn: Connection, job: JobRow, nos: Sequence[int]) -> defaultdict[int, list[tuple[Any, ...]]]:
    """Return the samples of groups: what follows the job's prefix in the id, a letter, and the reward."""
    found: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)
    if not nos:
        return found
    query = (
        sa.select(*rollouts.c["group_no", "id", "state", "reward"])
        .where(rollouts.c.job_id == job.id, rollouts.c.group_no.in_(nos))
        .order_by(rollouts.c.group_no, rollouts.c.sample)
    )
    prefix = len(prefix_of(job.name, job.uid)) + 1
    for row in conn.execute(query):
        cell = (
            row.id[prefix:],
            _LETTERS[row.state.status],
            row.reward,
            row.state != RolloutState.QUEUED_INIT,
        )
        found[row.group_no].append(cell)
    return found


def _row(row: Any, cells: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    rewards = [cell[2] for cell in cells if cell[2] is not None]
    begun = any(cell[3] for cell in cells)
    return {
        "no": row.no,
        "task_id": row.task_id,
        "state": "ended" if row.seq is not None else "active" if begun else "waiting",
        "informative": bool(row.informative),
        "delivered": bool(row.delivered),
        "reason": row.reason or "",
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "samples": [cell[:3] for cell in cells],
    }
