"""The groups of a job as rows of cells, one cell a sample, without their trajectories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, Literal

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict
from sqlalchemy.engine import Connection

from rollyard_api.machine.jobs import prefix_of
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import groups, rollouts
from rollyard_api.storage.statements import PlaceIn
from rollyard_api.storage.view_tables import ended_groups
from rollyard_api.trajectories.records import fitting
from rollyard_api.views import keyset
from rollyard_api.views.job.rollout_list import Chars128, Status
from rollyard_api.views.keyset import Page

GridSort = Literal["no", "ended", "-ended", "reward", "-reward", "variance", "-variance", "reason"]
MAX_GROUPS: Final = 500
MAX_CELLS: Final = 16_384
"""The number of samples in one answer. A page with larger groups has fewer of them, but at least one."""
_KEYS: Final[dict[str, sa.Column[Any]]] = {
    "no": groups.c.no,
    "ended": groups.c.seq,
    "reward": ended_groups.c.mean,
    "variance": ended_groups.c.variance,
    "reason": groups.c.reason,
}
_GROUPS: Final = sa.select(
    *groups.c["no", "task_id", "seq", "delivered", "informative", "reason"]
).outerjoin_from(
    groups,
    ended_groups,
    sa.and_(groups.c.job_id == ended_groups.c.job_id, groups.c.no == ended_groups.c.no),
)


class GroupFilter(BaseModel):
    """Which groups of a job are listed, as a request says it; None and "" stand for no restriction."""

    model_config = ConfigDict(frozen=True)

    sort: GridSort = "no"
    informative: bool | None = None
    status: Status | None = None
    """The groups of which at least one sample has this status."""
    task: Chars128 | None = None
    search: Chars128 = ""
    """A part of the task's id, in any case of letters."""


def page(conn: Connection, job: JobRow, filters: GroupFilter, limit: int, cursor: str) -> Page:
    """Return a page of a job's groups; `cursor` is the `continue` of the page before.

    Raises:
        QueryRefused: `cursor` is not one of this list.
        Gone: It belongs to another job.
    """
    order = _order(filters)
    query = _GROUPS.where(*_where(job.id, filters))
    rows, last = order.rows(conn, query, limit, order.place(cursor, job, filters))
    cells = _cells(conn, job, [row.no for row in rows])
    count = fitting((len(cells[row.no]) for row in rows), MAX_CELLS)
    if count < len(rows):
        last = keyset.place_of(rows[count - 1])
    return [_row(row, cells[row.no]) for row in rows[:count]], keyset.text(job, filters, last)


def _order(filters: GroupFilter) -> keyset.Order:
    name = filters.sort.lstrip("-")
    key = _KEYS[name]
    # All groups that have ended have a place in the order of their ends.
    missing = None if name in ("no", "ended") else key.is_(None)
    return keyset.Order(key, groups.c.no, missing, falls=filters.sort.startswith("-"))


def _where(job_id: int, filters: GroupFilter) -> list[sa.ColumnElement[bool]]:
    conditions = [groups.c.job_id == job_id]
    if filters.sort != "no":
        conditions.append(groups.c.seq.is_not(None))
    if filters.task is not None:
        conditions.append(groups.c.task_id == filters.task)
    if filters.search:
        # `position` and `instr` take the text as it is, so no sign in it has a meaning.
        conditions.append(PlaceIn(sa.func.lower(groups.c.task_id), sa.literal(filters.search.lower())) > 0)
    if filters.informative is not None:
        conditions.append(sa.func.coalesce(groups.c.informative, sa.false()).is_(filters.informative))
    if filters.status is not None:
        states = RolloutState.matching(None, filters.status)
        matching = sa.select(rollouts.c.group_no).where(
            rollouts.c.job_id == job_id, rollouts.c.state.in_(states)
        )
        conditions.append(groups.c.no.in_(matching))
    return conditions


def _cells(conn: Connection, job: JobRow, nos: Sequence[int]) -> defaultdict[int, list[tuple[Any, ...]]]:
    """Return the samples of groups: what follows the job's prefix in the id, a letter, and the reward."""
    cells: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)
    query = (
        sa.select(*rollouts.c["group_no", "id", "state", "reward"])
        .where(rollouts.c.job_id == job.id, rollouts.c.group_no.in_(nos))
        .order_by(rollouts.c.group_no, rollouts.c.sample)
    )
    prefix = len(prefix_of(job.name, job.uid)) + 1
    for row in conn.execute(query):
        cell = (
            row.id[prefix:],
            row.state.status[0],
            row.reward,
            row.state != RolloutState.QUEUED_INIT,
        )
        cells[row.group_no].append(cell)
    return cells


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
