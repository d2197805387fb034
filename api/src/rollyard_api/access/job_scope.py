"""The token of one job reaches that job in its present form, its rollouts, its sandboxes and its claims."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import sqlalchemy as sa
from rollyard_crds.security.job_token import JobIdentity
from sqlalchemy.engine import Connection

from rollyard_api.access.permissions import Stand
from rollyard_api.core.problems import Forbidden
from rollyard_api.storage.database import Database
from rollyard_api.storage.schema import jobs, rollouts

LOOKED_UP = 500
"""The largest number of names in one query, because SQLite limits the variables of a query."""
REMEMBERED = 4096
"""The largest number of jobs that are remembered for their tokens."""


@dataclass(frozen=True, slots=True)
class BoundJob:
    """The job for which a token was made, and the state of that job."""

    identity: JobIdentity
    stand: Stand
    id: int | None
    """The id of the job's row, or None if the job is gone."""
    uid: str | None
    """The uid of the job itself, which claims carry, or None if the job is gone."""


def look_up(conn: Connection, identity: JobIdentity) -> BoundJob:
    """Return the job of a token with its present state.

    The uid in the token may be that of the job or of the Kubernetes object for which the job is registered.
    """
    columns = (jobs.c.id, jobs.c.uid, jobs.c.object_uid, jobs.c.finished_at)
    row = conn.execute(
        sa.select(*columns).where(
            jobs.c.namespace == identity.namespace,
            jobs.c.name == identity.name,
            jobs.c.deleted_at.is_(None),
        )
    ).one_or_none()
    if row is None or identity.uid not in (row.uid, row.object_uid):
        return BoundJob(identity, "gone", None, None)
    return BoundJob(identity, "live" if row.finished_at is None else "finished", row.id, row.uid)


class BoundJobs:
    """The jobs of the tokens in use.

    A job that was looked up is remembered until a commit changes a job, if the database can notice that (see
    `Database.job_changes`). A look that begins before such a commit counts for one request only.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[JobIdentity, tuple[int, BoundJob]] = {}

    async def of(self, identity: JobIdentity) -> BoundJob:
        """Return the job of a token with its present state; see `look_up`."""
        changes = self._database.job_changes
        known = self._known.get(identity)
        if known is not None and known[0] == changes:
            return known[1]
        job = await self._database.read(partial(look_up, identity=identity))
        if changes is not None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[identity] = (changes, job)
        return job


def refused(bound: BoundJob) -> Forbidden:
    """Return the error for a token whose job has ended."""
    who = bound.identity
    what = f"{who.namespace}/{who.name} with uid {who.uid}"
    how = "has ended" if bound.stand == "finished" else "was deleted, or replaced by another of its name"
    return Forbidden(f"this token was for the workers of job {what}, which {how}", reason="JobEnded")


def others(identity: JobIdentity) -> sa.ColumnElement[bool]:
    """Return the condition that selects all jobs but the token's own, even deleted jobs that have rows."""
    # A job without an object has null here. Compared as null, it would match no job and pass the check.
    object_uid = sa.func.coalesce(jobs.c.object_uid, "")
    ours = sa.and_(
        jobs.c.namespace == identity.namespace,
        jobs.c.name == identity.name,
        sa.or_(jobs.c.uid == identity.uid, object_uid == identity.uid),
    )
    return sa.not_(ours)


@lru_cache(maxsize=256)
def _of_others(identity: JobIdentity, by: Literal["id", "sandbox_id"]) -> sa.Select[tuple[str]]:
    """Return the query for one rollout of another job, which is kept because each report asks it."""
    joined = sa.select(rollouts.c.id).join(jobs, jobs.c.id == rollouts.c.job_id)
    return joined.where(rollouts.c[by].in_(sa.bindparam("b_names", expanding=True)), others(identity)).limit(
        1
    )


def reaches_others(
    conn: Connection, identity: JobIdentity, rollouts_of: Collection[str], sandboxes: Collection[str]
) -> bool:
    """Return whether one of these rollouts, or one that has one of these sandboxes, is of another job."""
    asked: tuple[tuple[Literal["id", "sandbox_id"], list[str]], ...]
    asked = (("id", sorted(rollouts_of)), ("sandbox_id", sorted(sandboxes)))
    for by, names in asked:
        for at in range(0, len(names), LOOKED_UP):
            some = {"b_names": names[at : at + LOOKED_UP]}
            if conn.execute(_of_others(identity, by), some).first() is not None:
                return True
    return False
