"""A job none of whose tool calls can be read says so, because its parser may not fit its model.

Rollouts and calls are counted until the first well-formed call comes. From then on nothing is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollyard_api.machine.events import RunCounts
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import jobs

MIN_ROLLOUTS: Final = 32
"""The number of rollouts with calls after which a job says so."""
_COUNT: Final = (
    sa.update(jobs)
    .where(jobs.c.id == bindparam("b_job"), jobs.c.well_formed.is_(False))
    .values(
        malformed_rollouts=jobs.c.malformed_rollouts + bindparam("b_rollouts"),
        malformed_calls=jobs.c.malformed_calls + bindparam("b_calls"),
        well_formed=bindparam("b_well_formed"),
    )
)


def count(tx: Transaction, runs: Iterable[tuple[int, RunCounts]]) -> None:
    """Count the calls of Runs that are complete, each with the id of its job."""
    by_job: defaultdict[int, list[RunCounts]] = defaultdict(list)
    for job_id, counts in runs:
        if counts.written_calls:
            by_job[job_id].append(counts)
    for job_id, found in sorted(by_job.items()):
        total, malformed = sum(run.written_calls for run in found), sum(run.malformed_calls for run in found)
        values = {"b_rollouts": len(found), "b_calls": total, "b_well_formed": malformed < total}
        tx.conn.execute(_COUNT, {"b_job": job_id, **values})


def status(job: JobRow) -> dict[str, int] | None:
    """Return the MalformedCalls of a job, or None if its calls are well-formed or too few."""
    if job.well_formed or job.malformed_rollouts < MIN_ROLLOUTS:
        return None
    return {"rollouts": job.malformed_rollouts, "calls": job.malformed_calls}
