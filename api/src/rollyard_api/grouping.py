"""Groups as a GRPO or DAPO trainer wants them: whole, or dropped with a reason."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api import records, states
from rollyard_api.schema import groups, jobs, rollouts


def ended_after(
    conn: Connection, job_id: int, cursor: int, limit: int, *, informative: bool, dropped: bool
) -> tuple[list[tuple[Any, list[Any]]], int]:
    """Groups that ended after a cursor, each with its members' rows, and the cursor after them.

    Args:
        informative: only groups whose rewards are not all equal.
        dropped: also those with too few rewards.
    """
    ended = conn.execute(sa.select(jobs.c.groups_ended).where(jobs.c.id == job_id)).scalar_one()
    query = sa.select(groups).where(groups.c.job_id == job_id, groups.c.seq > cursor)
    if informative:
        query = query.where(groups.c.informative.is_(True))
    if not dropped:
        query = query.where(groups.c.delivered.is_(True))
    found = list(conn.execute(query.order_by(groups.c.seq).limit(limit)))
    after = found[-1].seq if len(found) == limit else max(cursor, ended)
    members: dict[int, list[Any]] = {group.no: [] for group in found}
    if found:
        rows = conn.execute(
            records.select()
            .where(rollouts.c.job_id == job_id, rollouts.c.group_no.in_(list(members)))
            .order_by(rollouts.c.group_no, rollouts.c.sample)
        )
        for row in rows:
            members[row.group_no].append(row)
    return [(group, members[group.no]) for group in found], after


def trained_on(members: list[Any]) -> list[Any]:
    """The members that have a reward: an infrastructure failure is not one."""
    return [row for row in members if row.state == states.SUCCEEDED]
