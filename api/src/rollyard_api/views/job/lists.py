"""Lists of one job: its rollouts, its groups with a cell for each sample, and its stages over time.

Rows are sorted and filtered in the database, page by page. Rollouts that have ended come from
`ended_rollouts`, whose indexes sort them, and the others from `rollouts`, of which far fewer are in the hands
of workers. An order by what only ended rollouts have lists only these, and `since` lists those that have not
ended, with the ones that have been in their state for longest first.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationInfo, field_validator
from rollyard_crds.rolloutjob import StageName
from sqlalchemy.engine import Connection

from rollyard_api.core import cursors
from rollyard_api.core.codec import loads
from rollyard_api.core.problems import Malformed
from rollyard_api.machine.jobs import prefix_of
from rollyard_api.machine.states import ENDED, UNFINISHED, RolloutState
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import groups, pools, rollouts, weight_updates
from rollyard_api.storage.statements import PlaceIn
from rollyard_api.storage.view_tables import ended_groups, ended_rollouts
from rollyard_api.trajectories import traces
from rollyard_api.trajectories.records import fitting
from rollyard_api.views import keyset
from rollyard_api.views.job.folding import ATTEMPTS, active_seconds
from rollyard_api.views.keyset import Order, Page

Sort = Literal["id", "ended", "-ended", "reward", "-reward", "duration", "-duration", "-tokens", "since"]
Chars128 = Annotated[str, StringConstraints(max_length=128)]
Status = Literal["queued", "leased", "succeeded", "failed", "cancelled"]
MAX_ROWS: Final = 200
"""The largest number of slim rows in an answer."""

_COLUMN: Final = {"ended": "end_seq", "reward": "reward", "duration": "seconds", "tokens": "tokens"}
_LIMITS: Final[dict[str, tuple[Callable[[Any, Any], sa.ColumnElement[bool]], sa.ColumnElement[Any]]]] = {
    "reason": (operator.eq, ended_rollouts.c.reason),
    "min_reward": (operator.ge, ended_rollouts.c.reward + 0),
    "max_reward": (operator.le, ended_rollouts.c.reward + 0),
    "after_time": (operator.ge, ended_rollouts.c.ended_at),
    "before_time": (operator.lt, ended_rollouts.c.ended_at),
}
"""The filters of what only ended rollouts have: how a column is compared with the value of each."""
_LABELS: Final = (
    sa.select(weight_updates.c.policy_index, weight_updates.c.policy_version)
    .join(pools, pools.c.id == weight_updates.c.pool_id)
    .where(pools.c.namespace == sa.bindparam("b_namespace"), pools.c.name == sa.bindparam("b_pool"))
)


class RolloutFilter(BaseModel):
    """Which rollouts of a job are listed, as a request says it; None and "" stand for no restriction."""

    model_config = ConfigDict(frozen=True)

    sort: Sort = "id"
    stage: StageName | None = None
    status: Status | None = None
    reason: Chars128 | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    task: Chars128 | None = None
    after_time: float | None = None
    """The earliest end, in seconds since the epoch."""
    before_time: float | None = None
    """The time before which the rollouts ended."""
    search: Annotated[str, StringConstraints(max_length=256, strip_whitespace=True)] = ""
    """Words that the conversation must have, all of them."""
    retried: bool = False

    @field_validator("min_reward", "max_reward", "after_time", "before_time")
    @classmethod
    def _finite(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and not math.isfinite(value):
            raise Malformed.of(f"{info.field_name}: must be a finite number (got {value})")
        return value

    @property
    def states(self) -> list[RolloutState]:
        """The states of the rollouts that can be listed."""
        matching = RolloutState.matching(self.stage, self.status)
        if self.sort == "since":
            return [state for state in matching if not state.has_ended]
        if self.of_ended:
            return [state for state in matching if state.has_ended]
        return matching

    @property
    def of_ended(self) -> bool:
        """Whether only rollouts that have ended can match."""
        limited = any(getattr(self, name) is not None for name in _LIMITS)
        return limited or bool(self.search) or self.sort not in ("id", "since")

    @property
    def is_plain(self) -> bool:
        """Whether the request uses only what lists without slim rows have as well."""
        return self == RolloutFilter(stage=self.stage, status=self.status, retried=self.retried)


def rollout_page(conn: Connection, job: JobRow, filters: RolloutFilter, limit: int, cursor: str) -> Page:
    """Return a page of a job's rollouts as slim rows; `cursor` is the `continue` of the page before.

    Raises:
        Malformed: `cursor` is not one of this list.
        Gone: It belongs to another job.
    """
    if filters.sort == "id" and not filters.of_ended:
        return _by_id(conn, job, filters, limit, cursor)
    if not filters.states:
        return [], None
    query, order = _unfinished(job.id, filters) if filters.sort == "since" else ended(job.id, filters)
    rows, last = order.rows(conn, query, limit, order.place(cursor, job, filters))
    return slim(conn, job, rows), keyset.text(job, filters, last)


def ended(job_id: int, filters: RolloutFilter) -> tuple[sa.Select[Any], Order]:
    """Return a query for the requested rows of `ENDED_ROWS`, and their order."""
    t = ended_rollouts.c
    where = [t.job_id == job_id, *_conditions(ended_rollouts, job_id, filters)]
    for name, (compare, column) in _LIMITS.items():
        if (limit := getattr(filters, name)) is not None:
            where.append(compare(column, limit))
    # Ids are not indexed here, so a list of ended rollouts by id comes in the order of their ends.
    column = t[_COLUMN.get(filters.sort.lstrip("-"), "end_seq")]
    # The index of a sort key finds the first rows at once. With filters it would fetch most rows one by one,
    # which takes ten times as long as a scan of the table and a sort of what is left. A sum hides the index.
    key: sa.ColumnElement[Any] = column if len(where) == 1 or column is t.end_seq else column + 0
    missing = (column + 0).is_(None) if column.nullable else None
    return ENDED_ROWS.where(*where), Order(key, t.end_seq, missing, falls=filters.sort.startswith("-"))


def _unfinished(job_id: int, filters: RolloutFilter) -> tuple[sa.Select[Any], Order]:
    where = [rollouts.c.job_id == job_id, *_conditions(rollouts, job_id, filters)]
    return _ROWS.where(*where), Order(rollouts.c.since, rollouts.c.place)


def _conditions(table: sa.Table, job_id: int, filters: RolloutFilter) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that apply to the rows of either table."""
    of_ended = table is ended_rollouts
    conditions: list[sa.ColumnElement[bool]] = []
    if set(filters.states) != set(ENDED if of_ended else RolloutState):
        conditions.append(table.c.state.in_(filters.states))
    if filters.task is not None:
        # A task has one group.
        group = sa.select(groups.c.no).where(groups.c.job_id == job_id, groups.c.task_id == filters.task)
        conditions.append(table.c.group_no == group.scalar_subquery())
    if filters.retried:
        conditions.append(table.c.attempts > 0 if of_ended else table.c.attempts.is_not(None))
    return conditions


def labels(conn: Connection, job: JobRow) -> dict[int, str]:
    """Return the policy version of each index of the job's pool."""
    if job.pool is None:
        return {}
    rows = conn.execute(_LABELS, {"b_namespace": job.namespace, "b_pool": job.pool})
    return {row.policy_index: row.policy_version for row in rows}


def task_ids(conn: Connection, job_id: int, nos: set[int]) -> dict[int, str]:
    """Return the task of each of these groups."""
    query = sa.select(groups.c.no, groups.c.task_id).where(groups.c.job_id == job_id, groups.c.no.in_(nos))
    return {row.no: row.task_id for row in conn.execute(query)}


_ROWS: Final = sa.select(
    *rollouts.c["id", "job_id", "group_no", "sample", "state", "reason", "reward", "since", "timings"],
    *rollouts.c["worker", "node", "policy_index"],
    sa.func.coalesce(rollouts.c.sampled_tokens, 0).label("tokens"),
    ATTEMPTS,
)
ENDED_ROWS: Final = sa.select(
    ended_rollouts, ended_rollouts.c.ended_at.label("since"), sa.literal("").label("node")
)
"""A query for rows of `ended_rollouts` that `slim` takes, too."""


def slim(conn: Connection, job: JobRow, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return rows of `rollouts` in any state, or of ENDED_ROWS, as the API returns them."""
    if not rows:
        return []
    tasks, versions = task_ids(conn, job.id, {row.group_no for row in rows}), labels(conn, job)
    return [
        {
            "id": row.id,
            "task_id": tasks.get(row.group_no, ""),
            "sample": row.sample,
            "status": row.state.status,
            "stage": row.state.stage,
            "reason": row.reason or "",
            "reward": row.reward,
            "since": row.since,
            "ended_at": row.since if row.state.has_ended else None,
            "seconds": row.seconds if "seconds" in row._fields else active_seconds(loads(row.timings)),
            "tokens": row.tokens,
            "attempts": row.attempts,
            # While a rollout waits in a queue, its row names the worker of the stage before.
            "worker": (row.worker or "") if row.state.is_leased or row.state.has_ended else "",
            "node": row.node if row.state.is_leased else "",
            "policy_version": versions.get(row.policy_index, ""),
        }
        for row in rows
    ]


def _by_id(conn: Connection, job: JobRow, filters: RolloutFilter, limit: int, cursor: str) -> Page:
    prefix = f"{prefix_of(job.name, job.uid)}-"
    after = ""
    if cursor:
        after = cursors.word(cursor, "rollouts", uid=job.uid, job=job.name, parameter="continue")
    # The ids of a job lie together, so SQLite need not look for them by the job. PostgreSQL may order them by
    # other rules, and plans by what it knows of the table.
    hides_job = conn.dialect.name == "sqlite" and RolloutState.SUCCEEDED in filters.states
    by_job = rollouts.c.job_id + 0 if hides_job else rollouts.c.job_id
    where = [by_job == job.id, rollouts.c.id > max(after, prefix), *_conditions(rollouts, job.id, filters)]
    rows = conn.execute(_ROWS.where(*where).order_by(rollouts.c.id).limit(limit + 1)).all()
    more = cursors.text("rollouts", job.uid, rows[limit - 1].id) if len(rows) > limit else None
    return slim(conn, job, rows[:limit]), more


def held_by(conn: Connection, worker: str, most: int) -> list[Any]:
    """Return the rows of the rollouts that a worker with this name holds, the oldest leases first."""
    # The comparison selects all leases, and lets the planner find their small index.
    query = _ROWS.where(rollouts.c.lease_expires > 0, rollouts.c.worker == worker)
    return list(conn.execute(query.order_by(rollouts.c.since).limit(most)))


GridSort = Literal["no", "ended", "-ended", "reward", "-reward", "variance", "-variance", "reason"]
MAX_GROUPS: Final = 500
MAX_CELLS: Final = 16_384
"""The number of samples in one answer. A page with larger groups has fewer of them, but at least one."""
_GROUP_KEYS: Final[dict[str, sa.Column[Any]]] = {
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
    """A part of the task's id, in upper or lower case."""


def group_page(conn: Connection, job: JobRow, filters: GroupFilter, limit: int, cursor: str) -> Page:
    """Return a page of a job's groups; `cursor` is the `continue` of the page before.

    Raises:
        Malformed: `cursor` is not one of this list.
        Gone: It belongs to another job.
    """
    order = _group_order(filters)
    query = _GROUPS.where(*_group_conditions(job.id, filters))
    rows, last = order.rows(conn, query, limit, order.place(cursor, job, filters))
    cells = _cells(conn, job, [row.no for row in rows])
    count = fitting((len(cells[row.no]) for row in rows), MAX_CELLS)
    if count < len(rows):
        last = keyset.place_of(rows[count - 1])
    return [_group_row(row, cells[row.no]) for row in rows[:count]], keyset.text(job, filters, last)


def _group_order(filters: GroupFilter) -> keyset.Order:
    name = filters.sort.lstrip("-")
    key = _GROUP_KEYS[name]
    # All groups that have ended have a place in the order of their ends.
    missing = None if name in ("no", "ended") else key.is_(None)
    return keyset.Order(key, groups.c.no, missing, falls=filters.sort.startswith("-"))


def _group_conditions(job_id: int, filters: GroupFilter) -> list[sa.ColumnElement[bool]]:
    conditions = [groups.c.job_id == job_id]
    if filters.sort != "no":
        conditions.append(groups.c.seq.is_not(None))
    if filters.task is not None:
        conditions.append(groups.c.task_id == filters.task)
    if filters.search:
        # `position` and `instr` take the text as it is, so no character in it is special.
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


def _group_row(row: Any, cells: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
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


GanttSort = Literal["-duration", "started"]
MAX_GANTT_ROWS: Final = 500
_BEGUN: Final = tuple(state for state in UNFINISHED if state != RolloutState.QUEUED_INIT)
_GANTT_COLUMNS: Final = rollouts.c["id", "group_no", "sample", "state", "reward", "since", "timings"]


def gantt(conn: Connection, job: JobRow, sort: GanttSort, limit: int, now: float) -> list[dict[str, Any]]:
    """Return the rollouts of a job that took longest, or those that began last.

    Rollouts that have begun and not ended are included; what they do now ends at `now`, in seconds since the
    epoch. By `started`, the newest of both kinds are chosen and come in the order of their starts.
    """
    since = rollouts.c.since.desc() if sort == "started" else rollouts.c.since
    unfinished = sa.select(*_GANTT_COLUMNS).where(rollouts.c.job_id == job.id, rollouts.c.state.in_(_BEGUN))
    t = ended_rollouts.c
    order = (t.end_seq.desc(),) if sort == "started" else (t.seconds.desc(), t.end_seq.desc())
    chosen = sa.select(t.id).where(t.job_id == job.id).order_by(*order).limit(limit)
    ended = sa.select(*_GANTT_COLUMNS).where(rollouts.c.id.in_(chosen))
    selected = [*conn.execute(unfinished.order_by(since).limit(limit)), *conn.execute(ended)]
    items = [_gantt_item(row, now) for row in selected]
    if sort == "started":
        items.sort(key=lambda item: item["spans"][0][1] if item["spans"] else 0.0, reverse=True)
        items = items[:limit][::-1]
    else:
        items = sorted(items, key=lambda item: (-_busy(item), item["id"]))[:limit]
    tasks = task_ids(conn, job.id, {item["group_no"] for item in items})
    return [{"id": item["id"], "task_id": tasks.get(item.pop("group_no"), ""), **item} for item in items]


def _gantt_item(row: Any, now: float) -> dict[str, Any]:
    ended = row.state.has_ended
    item = {
        "id": row.id,
        "group_no": row.group_no,
        "sample": row.sample,
        "status": row.state.status,
        "reward": row.reward,
        "spans": traces.spans(loads(row.timings), row.since if ended else now),
    }
    return item if ended else item | {"open": True}


def _busy(item: dict[str, Any]) -> float:
    """Return the seconds of work in all stages."""
    return float(sum(end - start for name, start, end in item["spans"] if not name.endswith("-queue")))
