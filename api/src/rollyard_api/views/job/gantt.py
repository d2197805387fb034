"""The stages of rollouts over time, so that stragglers can be seen."""

from __future__ import annotations

from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads
from rollyard_api.machine.states import UNFINISHED, RolloutState
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.view_tables import ended_rollouts
from rollyard_api.trajectories import traces
from rollyard_api.views.job.rollout_list import task_ids

GanttSort = Literal["-duration", "started"]
MAX_ROWS: Final = 500
_BEGUN: Final = tuple(state for state in UNFINISHED if state != RolloutState.QUEUED_INIT)
_COLUMNS: Final = rollouts.c["id", "group_no", "sample", "state", "reward", "since", "timings"]


def rows(conn: Connection, job: JobRow, sort: GanttSort, limit: int, now: float) -> list[dict[str, Any]]:
    """Return the rollouts of a job that took longest, or those that began last.

    Rollouts that have begun and not ended come with the others; what they do now ends at `now`, in seconds
    since the epoch. By `started`, the newest of both kinds are chosen and come in the order of their begins.
    """
    since = rollouts.c.since.desc() if sort == "started" else rollouts.c.since
    unfinished = sa.select(*_COLUMNS).where(rollouts.c.job_id == job.id, rollouts.c.state.in_(_BEGUN))
    t = ended_rollouts.c
    order = (t.end_seq.desc(),) if sort == "started" else (t.seconds.desc(), t.end_seq.desc())
    chosen = sa.select(t.id).where(t.job_id == job.id).order_by(*order).limit(limit)
    ended = sa.select(*_COLUMNS).where(rollouts.c.id.in_(chosen))
    selected = [*conn.execute(unfinished.order_by(since).limit(limit)), *conn.execute(ended)]
    items = [_item(row, now) for row in selected]
    if sort == "started":
        items.sort(key=lambda item: item["spans"][0][1] if item["spans"] else 0.0, reverse=True)
        items = items[:limit][::-1]
    else:
        items = sorted(items, key=lambda item: (-_busy(item), item["id"]))[:limit]
    tasks = task_ids(conn, job.id, {item["group_no"] for item in items})
    return [{"id": item["id"], "task_id": tasks.get(item.pop("group_no"), ""), **item} for item in items]


def _item(row: Any, now: float) -> dict[str, Any]:
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
