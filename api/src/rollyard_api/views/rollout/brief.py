"""A rollout's record without its tokens and messages, with its neighbours and its time in each state."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.telemetry.identity import trace_id
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.view_tables import ended_rollouts
from rollyard_api.trajectories import traces
from rollyard_api.views.rollout.records import CompactRecord

MAX_TURNS: Final = 2000
"""The number of turns that are shown."""
_ROW = sa.select(
    rollouts.c.id,
    rollouts.c.end_seq,
    rollouts.c.group_no,
    rollouts.c.sample,
    rollouts.c.since,
    rollouts.c.timings,
)


def brief(
    record: CompactRecord, spans: list[tuple[str, float, float]], neighbours: dict[str, Any]
) -> dict[str, Any]:
    """Return a record's head with the sizes of what is left out.

    Args:
        record: The record.
        spans: The name, begin and end of each state, in seconds since the epoch.
        neighbours: The ids of the rollouts around it.
    """
    head = dict(record.head)
    turns = head.pop("turns", [])
    head["turns"] = [
        turn | {"tool_calls": [_call(call) for call in turn.get("tool_calls") or ()]}
        for turn in turns[:MAX_TURNS]
    ]
    return {
        **head,
        "turns_total": len(turns),
        "segments": [{"prompt": one.prompt, "response": one.total - one.prompt} for one in record.segments],
        "messages": len(record.messages),
        "spans": spans,
        "neighbours": neighbours,
        "trace_id": trace_id(head["id"]),
    }


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "arguments"}


def around(
    conn: Connection, job_id: int, rollout: str
) -> tuple[list[tuple[str, float, float]], dict[str, Any]]:
    """Return the spans of an ended rollout and the ids of its neighbours, or None where there is no other.

    The neighbours are the samples of its group by number, and the failed rollouts of the job in the order of
    their ends.
    """
    row = conn.execute(_ROW.where(rollouts.c.job_id == job_id, rollouts.c.id == rollout)).one_or_none()
    if row is None or row.end_seq is None:
        return [], {}
    spans = [(one.name, one.start, one.end) for one in traces.spans(loads(row.timings), row.since)]
    return spans, {
        "sample_before": _sample(conn, job_id, row, later=False),
        "sample_after": _sample(conn, job_id, row, later=True),
        "failed_before": _failed(conn, job_id, row.end_seq, later=False),
        "failed_after": _failed(conn, job_id, row.end_seq, later=True),
    }


def _sample(conn: Connection, job_id: int, row: Any, *, later: bool) -> str | None:
    number = rollouts.c.sample
    query = sa.select(rollouts.c.id).where(
        rollouts.c.job_id == job_id,
        rollouts.c.group_no == row.group_no,
        number > row.sample if later else number < row.sample,
    )
    found: str | None = conn.scalar(query.order_by(number if later else number.desc()).limit(1))
    return found


def _failed(conn: Connection, job_id: int, end_seq: int, *, later: bool) -> str | None:
    place = ended_rollouts.c.end_seq
    query = sa.select(ended_rollouts.c.id).where(
        ended_rollouts.c.job_id == job_id,
        ended_rollouts.c.state == RolloutState.FAILED,
        place > end_seq if later else place < end_seq,
    )
    found: str | None = conn.scalar(query.order_by(place if later else place.desc()).limit(1))
    return found
