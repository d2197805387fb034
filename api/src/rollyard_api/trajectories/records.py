"""Trajectory records, which combine a rollout's row with what Run recorded.

The record is a pure function of what the database holds when a rollout has ended, so writing it twice
gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from rollyard_crds.rolloutjob import STAGES
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps, loads, unpack
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.rows import EndedGroup, EndedRollout, JobRow, RolloutSize, columns, read_all
from rollyard_api.storage.schema import groups, jobs, payloads, rollouts
from rollyard_api.trajectories import attempts, packed, traces

_ROW_BYTES: Final = 1024
"""The approximate size in bytes of a record apart from what Run recorded."""
_GROUP: Final = sa.and_(groups.c.job_id == rollouts.c.job_id, groups.c.no == rollouts.c.group_no)
_STAGE: Final = {"queued_seconds": 0.0, "active_seconds": 0.0, "attempts": 0}


def select() -> sa.Select[Any]:
    """Return a query for the rows that `record` takes."""
    return (
        sa.select(*columns(EndedRollout, rollouts, groups, payloads))
        .join_from(rollouts, groups, _GROUP)
        .outerjoin(payloads, payloads.c.rollout_id == rollouts.c.id)
    )


def timings(text: str) -> dict[str, Any]:
    """Return a row's accumulated timings in the form of the record."""
    seconds = dict.fromkeys(("model_seconds", "tool_seconds", "own_seconds"), 0.0)
    document = {**dict.fromkeys(STAGES, _STAGE), **seconds, **loads(text)}
    document.pop(traces.KEY, None)
    return document


def record(row: EndedRollout, job: JobRow) -> bytes:
    """Return the Trajectory of an ended rollout, as one line of JSON without its newline."""
    return line_of(head_of(row, job), row)


def line_of(head: dict[str, Any], row: EndedRollout) -> bytes:
    """Return the line of a record, of which `head` is all but the segments."""
    segments = [dict(segment.lists()) for segment in packed.segments_of(row.segments)]
    return dumps(head | {"segments": segments})


def head_of(row: EndedRollout, job: JobRow) -> dict[str, Any]:
    """Return the Trajectory of an ended rollout without its segments, before it is encoded."""
    document: dict[str, Any] = {"messages": [], "turns": []}  # Records without a Run have these.
    if row.trajectory is not None:
        document |= loads(unpack(row.trajectory))
        del document["segment_sizes"]
    document |= {
        "id": row.id,
        "job": job.name,
        "namespace": job.namespace,
        "task_id": row.task_id,
        "group_id": row.task_id,
        "sample_index": row.sample,
        "attempt": row.failures_init + row.failures_run + row.failures_eval,
        "status": row.state.status,
        "reason": row.reason or "",
        "message": row.message or "",
        "reward": row.reward,
        "reward_components": {} if row.components is None else loads(row.components),
        "timings": timings(row.timings),
    }
    # As docs/trajectories.md says, these are given only if they say something.
    if row.reward_reason:
        document["reward_reason"] = row.reward_reason
    if row.reward_output:
        document["reward_output"] = row.reward_output
    listed, dropped = attempts.listing(row.attempts)
    if listed:
        document |= {"attempts": listed, "attempts_dropped": dropped}
    if row.backend and not document.get("backend"):
        document["backend"] = row.backend
    return document


def summaries(
    conn: Connection,
    job_id: int,
    states: Sequence[RolloutState],
    limit: int,
    after: str,
    max_bytes: int,
    *,
    retried: bool = False,
) -> tuple[list[dict[str, Any]], str | None]:
    """Return short rows for the rollouts in these states, ordered by id, after the id `after`.

    With `retried`, only rollouts with an attempt that did not end well are returned.

    Returns:
        At most `limit` rows, of about `max_bytes` at most, and the last one's id if there are more.
    """
    query = (
        sa.select(
            *rollouts.c["id", "sample", "state", "reward", "reason", "message", "timings", "worker"],
            *rollouts.c["failures_init", "failures_run", "failures_eval", "attempts", "backend"],
            groups.c.task_id,
        )
        .join_from(rollouts, groups, _GROUP)
        .where(rollouts.c.job_id == job_id, rollouts.c.state.in_(states), rollouts.c.id > after)
        .order_by(rollouts.c.id)
        .limit(limit + 1)
    )
    if retried:
        query = query.where(rollouts.c.attempts.is_not(None))
    rows = list(conn.execute(query))
    lists = [attempts.listing(row.attempts) for row in rows]
    sizes = (
        _ROW_BYTES + len(row.message or "") + len(row.timings) + (len(dumps(listed)) if listed else 0)
        for row, (listed, _) in zip(rows, lists, strict=True)
    )
    limit = min(limit, fitting(sizes, max_bytes))
    more = rows[limit - 1].id if len(rows) > limit else None
    return [
        {
            "id": row.id,
            "task_id": row.task_id,
            "group_id": row.task_id,
            "sample_index": row.sample,
            "stage": row.state.stage,
            "status": row.state.status,
            "attempt": row.failures_init + row.failures_run + row.failures_eval,
            "reason": row.reason or "",
            "message": row.message or "",
            "reward": row.reward,
            "timings": timings(row.timings),
            "worker": row.worker or "",
            "backend": row.backend or "",
            "attempts": listed,
            "attempts_dropped": dropped,
        }
        for row, (listed, dropped) in zip(rows[:limit], lists, strict=False)
    ], more


def waiting_bytes() -> sa.ColumnElement[int]:
    """Return the bytes that a row adds to a page while its data is in the database."""
    return (
        sa.func.coalesce(sa.func.length(payloads.c.trajectory), 0)
        + sa.func.coalesce(sa.func.length(payloads.c.segments), 0)
        + sa.func.coalesce(sa.func.length(rollouts.c.attempts), 0)
        + _ROW_BYTES
    )


def _bytes() -> sa.ColumnElement[int]:
    """Return the bytes that a row adds to a page: of its stored record, or of its data in the database."""
    return sa.case((rollouts.c.pending.is_(None), rollouts.c.part_length), else_=waiting_bytes())


def sizes() -> sa.Select[Any]:
    """Return a query for short rows of `select`: where each belongs and how many bytes it adds to a page."""
    row = rollouts.c["id", "end_seq", "group_no", "sample", "pending"]
    query = sa.select(*row, _bytes().label("bytes"))
    return query.outerjoin(payloads, payloads.c.rollout_id == rollouts.c.id)


def fitting(sizes: Iterable[int], max_bytes: int) -> int:
    """Return how many of the first sizes together have at most `max_bytes`; one always fits."""
    total = count = 0
    for size in sizes:
        total += size
        if count and total > max_bytes:
            break
        count += 1
    return count


def first_rows(
    conn: Connection,
    where: Sequence[sa.ColumnElement[bool]],
    order: sa.Column[int],
    max_bytes: int,
) -> list[EndedRollout]:
    """Return the first rows of `select` under these conditions: as many as fit, and always one."""
    short = read_all(RolloutSize, conn.execute(sizes().where(*where).order_by(order)))
    ids = [row.id for row in short[: fitting((row.bytes for row in short), max_bytes)]]
    return read_all(EndedRollout, conn.execute(select().where(rollouts.c.id.in_(ids)).order_by(order)))


@dataclass(frozen=True, slots=True)
class EndedResults:
    """Some ended rollouts or groups of a job, oldest first."""

    sizes: list[RolloutSize]
    """The rollouts, or all trajectories of the groups, in their order."""
    after: int
    """The place in the order of ends up to which results were read, including those not requested."""
    ended: int
    """The number of rollouts or groups of the job that have ended."""
    groups: Sequence[tuple[EndedGroup, list[RolloutSize]]] = ()
    """The groups, with the rows of their trajectories."""
    large: bool = False
    """Whether the first group is larger than a page. It is then alone and must be read in parts."""


def _chosen(job_id: int, cursor: int, states: Sequence[RolloutState]) -> tuple[sa.ColumnElement[bool], ...]:
    return (rollouts.c.job_id == job_id, rollouts.c.end_seq > cursor, rollouts.c.state.in_(states))


def ended_after(
    conn: Connection, job_id: int, cursor: int, limit: int, states: Sequence[RolloutState], max_bytes: int
) -> EndedResults:
    """Return ended rollouts after a cursor: at most `limit`, with at most `max_bytes` if several."""
    ended = conn.execute(sa.select(jobs.c.ended).where(jobs.c.id == job_id)).scalar_one()
    query = sizes().where(*_chosen(job_id, cursor, states)).order_by(rollouts.c.end_seq).limit(limit)
    rows = read_all(RolloutSize, conn.execute(query))
    count = fitting((row.bytes for row in rows), max_bytes)
    # If the page is not full, all rollouts up to `ended` were read, including those of another status.
    full = count < len(rows) or len(rows) == limit
    return EndedResults(rows[:count], rows[count - 1].end_seq if full else max(cursor, ended), ended)


def rows_of(
    conn: Connection, job_id: int, cursor: int, states: Sequence[RolloutState], last: int
) -> list[Any]:
    """Return the rows of ended rollouts after a cursor, up to the place `last` in the order of ends."""
    query = select().where(*_chosen(job_id, cursor, states), rollouts.c.end_seq <= last)
    return read_all(EndedRollout, conn.execute(query.order_by(rollouts.c.end_seq)))


def ended_groups_after(
    conn: Connection,
    job_id: int,
    cursor: int,
    limit: int,
    *,
    informative: bool,
    dropped: bool,
    max_bytes: int,
) -> EndedResults:
    """Return groups that ended after a cursor: at most `limit`, and if several at most `max_bytes`.

    Args:
        informative: Whether to return only groups whose rewards are not all equal.
        dropped: Whether to also return the groups with too few rewards.
    """
    ended = conn.execute(sa.select(jobs.c.groups_ended).where(jobs.c.id == job_id)).scalar_one()
    query = sa.select(*columns(EndedGroup, groups)).where(groups.c.job_id == job_id, groups.c.seq > cursor)
    if informative:
        query = query.where(groups.c.informative.is_(True))
    if not dropped:
        query = query.where(groups.c.delivered.is_(True))
    rows = read_all(EndedGroup, conn.execute(query.order_by(groups.c.seq).limit(limit)))
    members: dict[int, list[RolloutSize]] = {group.no: [] for group in rows}
    if rows:
        query = sizes().where(*_members(job_id, rows))
        ordered = query.order_by(rollouts.c.group_no, rollouts.c.sample)
        for row in read_all(RolloutSize, conn.execute(ordered)):
            members[row.group_no].append(row)
    group_bytes = [sum(row.bytes for row in members[group.no]) for group in rows]
    count = fitting(group_bytes, max_bytes)
    full = count < len(rows) or len(rows) == limit
    after = rows[count - 1].seq if full else max(cursor, ended)
    large = count == 1 and group_bytes[0] > max_bytes
    chosen = [(group, members[group.no]) for group in rows[:count]]
    return EndedResults([row for _, its in chosen for row in its], after, ended, chosen, large)


def rows_of_groups(conn: Connection, job_id: int, of: Sequence[EndedGroup]) -> dict[str, EndedRollout]:
    """Return the rows of these groups' trajectories, by rollout id."""
    rows = conn.execute(select().where(*_members(job_id, of)))
    return {row.id: row for row in read_all(EndedRollout, rows)}


def _members(job_id: int, of: Sequence[EndedGroup]) -> tuple[sa.ColumnElement[bool], ...]:
    """Select the members of delivered groups that have a reward, which infrastructure failures lack."""
    delivered = [group.no for group in of if group.delivered]
    return (
        rollouts.c.job_id == job_id,
        rollouts.c.group_no.in_(delivered),
        rollouts.c.state == RolloutState.SUCCEEDED,
    )


def some_members(
    conn: Connection, job_id: int, group: EndedGroup, after: int, max_bytes: int
) -> list[EndedRollout]:
    """Return rows of a delivered group's trajectories after sample `after`: as many as fit, at least one."""
    conditions = (*_members(job_id, [group]), rollouts.c.sample > after)
    return first_rows(conn, conditions, rollouts.c.sample, max_bytes)
