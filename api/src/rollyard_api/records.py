"""Trajectory records: a rollout's row and what Run recorded, put together.

The record is a pure function of what is in the database when a rollout has ended, so that
writing it twice gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api import states
from rollyard_api.codec import dumps, loads, unpack
from rollyard_api.schema import groups, jobs, payloads, rollouts

COLUMNS = (
    rollouts.c.id,
    rollouts.c.job_id,
    rollouts.c.sample,
    rollouts.c.state,
    rollouts.c.failures_init,
    rollouts.c.failures_run,
    rollouts.c.failures_eval,
    rollouts.c.timings,
    rollouts.c.backend,
    rollouts.c.reward,
    rollouts.c.components,
    rollouts.c.reason,
    rollouts.c.message,
    rollouts.c.end_seq,
    rollouts.c.pending,
    rollouts.c.part,
    rollouts.c.part_offset,
    rollouts.c.part_length,
    rollouts.c.group_no,
    groups.c.task_id,
    payloads.c.trajectory,
)
_STAGE = {"queued_seconds": 0.0, "active_seconds": 0.0, "attempts": 0}


def select() -> sa.Select[Any]:
    """Rows that `record` understands."""
    return (
        sa.select(*COLUMNS)
        .join_from(
            rollouts,
            groups,
            sa.and_(groups.c.job_id == rollouts.c.job_id, groups.c.no == rollouts.c.group_no),
        )
        .outerjoin(payloads, payloads.c.rollout_id == rollouts.c.id)
    )


def timings(text: str) -> dict[str, Any]:
    """A row's accumulated timings in the record's form."""
    return {
        "init": _STAGE,
        "run": _STAGE,
        "eval": _STAGE,
        "model_seconds": 0.0,
        "tool_seconds": 0.0,
        "own_seconds": 0.0,
        **loads(text),
    }


def record(row: Any, job: str, namespace: str) -> bytes:
    """The Trajectory of an ended rollout, as one line of JSON without its newline."""
    document: dict[str, Any] = {"segments": [], "messages": [], "turns": []}  # what never ran has them too
    if row.trajectory is not None:
        document |= loads(unpack(row.trajectory))
    document |= {
        "id": row.id,
        "job": job,
        "namespace": namespace,
        "task_id": row.task_id,
        "group_id": row.task_id,
        "sample_index": row.sample,
        "attempt": row.failures_init + row.failures_run + row.failures_eval,
        "status": states.status_of(row.state),
        "reason": row.reason or "",
        "message": row.message or "",
        "reward": row.reward,
        "reward_components": {} if row.components is None else loads(row.components),
        "timings": timings(row.timings),
    }
    if row.backend and not document.get("backend"):
        document["backend"] = row.backend
    return dumps(document)


def summaries(
    conn: Connection, job_id: int, wanted: Sequence[int], limit: int, after: str
) -> tuple[list[dict[str, Any]], str | None]:
    """Rollouts in these states as short rows, ordered by id, from the one after `after` on."""
    query = (
        sa.select(
            rollouts.c.id,
            rollouts.c.state,
            rollouts.c.worker,
            rollouts.c.timings,
            rollouts.c.reward,
            rollouts.c.reason,
            rollouts.c.message,
            rollouts.c.failures_init,
            rollouts.c.failures_run,
            rollouts.c.failures_eval,
            rollouts.c.sample,
            rollouts.c.backend,
            groups.c.task_id,
        )
        .join_from(
            rollouts,
            groups,
            sa.and_(groups.c.job_id == rollouts.c.job_id, groups.c.no == rollouts.c.group_no),
        )
        .where(rollouts.c.job_id == job_id, rollouts.c.state.in_(wanted), rollouts.c.id > after)
        .order_by(rollouts.c.id)
        .limit(limit + 1)
    )
    rows = list(conn.execute(query))
    more = rows[limit - 1].id if len(rows) > limit else None
    return [
        {
            "id": row.id,
            "task_id": row.task_id,
            "group_id": row.task_id,
            "sample_index": row.sample,
            "stage": states.stage_of(row.state),
            "status": states.status_of(row.state),
            "attempt": row.failures_init + row.failures_run + row.failures_eval,
            "reason": row.reason or "",
            "message": row.message or "",
            "reward": row.reward,
            "timings": timings(row.timings),
            "worker": row.worker or "",
            "backend": row.backend or "",
        }
        for row in rows[:limit]
    ], more


def ended_after(
    conn: Connection, job_id: int, cursor: int, limit: int, wanted: Sequence[int]
) -> tuple[list[Any], int, int]:
    """Ended rollouts after a cursor, oldest first.

    Returns:
        The rows, the cursor after them, and the job's number of ended rollouts.
    """
    ended = conn.execute(sa.select(jobs.c.ended).where(jobs.c.id == job_id)).scalar_one()
    rows = list(
        conn.execute(
            select()
            .where(rollouts.c.job_id == job_id, rollouts.c.end_seq > cursor, rollouts.c.state.in_(wanted))
            .order_by(rollouts.c.end_seq)
            .limit(limit)
        )
    )
    # Where the page is not full, all up to `ended` have been looked at, those of another status too.
    after = rows[-1].end_seq if len(rows) == limit else max(cursor, ended)
    return rows, after, ended
