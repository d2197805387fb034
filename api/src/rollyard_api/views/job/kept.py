"""Reads what is kept of a job."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads, unpack
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.view_tables import job_statistics
from rollyard_api.views.job.rollout_list import labels
from rollyard_api.views.job.statistics import Statistics

_PLACES = sa.select(job_statistics.c.rollouts, job_statistics.c.groups).where(
    job_statistics.c.job_id == sa.bindparam("b_job")
)
_DOCUMENT = sa.select(job_statistics.c.rollouts, job_statistics.c.document).where(
    job_statistics.c.job_id == sa.bindparam("b_job")
)


def is_behind(conn: Connection, job: JobRow) -> bool:
    """Return whether rollouts or groups of a job have ended that are not folded yet."""
    row = conn.execute(_PLACES, {"b_job": job.id}).one_or_none()
    rollouts, groups = (0, 0) if row is None else row
    return job.ended > rollouts or job.groups_ended > groups


def statistics(conn: Connection, job: JobRow) -> dict[str, Any]:
    """Return the statistics of a job as the API answers them."""
    row = conn.execute(_DOCUMENT, {"b_job": job.id}).one_or_none()
    kept = Statistics(None if row is None else loads(unpack(row.document)))
    return {"upto": 0 if row is None else row.rollouts, **kept.view(labels(conn, job))}
