"""Groups as a GRPO or DAPO trainer needs them: whole, or dropped with a reason. Each is one document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.rows import EndedGroup, EndedRollout, RolloutSize, columns, read_all
from rollyard_api.storage.schema import groups, jobs, rollouts
from rollyard_api.trajectories import records
from rollyard_api.trajectories.delivery import Piece
from rollyard_api.trajectories.packed import ARRAYS
from rollyard_api.trajectories.records import EndedResults


def ended_after(
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
        query = records.sizes().where(*_members(job_id, rows))
        ordered = query.order_by(rollouts.c.group_no, rollouts.c.sample)
        for row in read_all(RolloutSize, conn.execute(ordered)):
            members[row.group_no].append(row)
    sizes = [sum(row.bytes for row in members[group.no]) for group in rows]
    count = records.fitting(sizes, max_bytes)
    full = count < len(rows) or len(rows) == limit
    after = rows[count - 1].seq if full else max(cursor, ended)
    large = count == 1 and sizes[0] > max_bytes
    chosen = [(group, members[group.no]) for group in rows[:count]]
    return EndedResults([row for _, its in chosen for row in its], after, ended, chosen, large)


def rows_of(conn: Connection, job_id: int, of: Sequence[EndedGroup]) -> dict[str, EndedRollout]:
    """Return the rows of these groups' trajectories, by rollout id."""
    rows = conn.execute(records.select().where(*_members(job_id, of)))
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
    return records.first_rows(conn, conditions, rollouts.c.sample, max_bytes)


def beginning(group: EndedGroup, members: int, form: str) -> bytes:
    """Return what comes before the records of a group with this many members.

    Args:
        form: The media type of the answer. The records are msgpack for ARRAYS, and else JSON.
    """
    head: dict[str, Any] = {
        "group_id": group.task_id,
        "task_id": group.task_id,
        "delivered": bool(group.delivered),
        "informative": bool(group.informative),
        "reason": group.reason or "",
    }
    if form != ARRAYS:
        return dumps(head)[:-1] + b',"trajectories":['
    # An empty list ends with its header, which is one byte.
    empty = msgpack.packb(head | {"trajectories": []})
    return bytes(empty[:-1] + msgpack.Packer().pack_array_header(members))


def separator(form: str) -> bytes:
    """Return what comes between two records."""
    return b"" if form == ARRAYS else b","


def end(form: str) -> bytes:
    """Return what comes after the last record."""
    return b"" if form == ARRAYS else b"]}"


def whole(
    ended: Sequence[tuple[EndedGroup, Sequence[RolloutSize]]], pieces: Sequence[Piece], form: str
) -> list[bytes]:
    """Return the documents of the first groups, as many as have all of their members among `pieces`."""
    groups: list[bytes] = []
    at = 0
    for group, members in ended:
        if at + len(members) > len(pieces):
            break
        body = separator(form).join(pieces[at : at + len(members)])
        groups.append(beginning(group, len(members), form) + body + end(form))
        at += len(members)
    return groups
