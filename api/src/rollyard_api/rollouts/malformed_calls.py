"""A job none of whose tool calls can be read says so, because its parser may not fit its model.

Rollouts and calls are counted until the first well-formed call comes. From then on nothing is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from rollyard_api.machine.events import RunCounts
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rows import JobRow

MIN_ROLLOUTS: Final = 32
"""The number of rollouts with calls after which a job says so."""


def count(tx: Transaction, runs: Iterable[tuple[int, RunCounts]]) -> None:
    """Count the calls of Runs that are complete, each with the id of its job."""
    by_job: defaultdict[int, list[RunCounts]] = defaultdict(list)
    for job_id, counts in runs:
        if counts.written_calls:
            by_job[job_id].append(counts)
    for job_id, counted in sorted(by_job.items()):
        written = sum(counts.written_calls for counts in counted)
        malformed = sum(counts.malformed_calls for counts in counted)
        job_rows.count_calls(tx, job_id, len(counted), written, well_formed=malformed < written)


def status(job: JobRow) -> dict[str, int] | None:
    """Return the MalformedCalls of a job, or None if its calls are well-formed or too few."""
    if job.well_formed or job.malformed_rollouts < MIN_ROLLOUTS:
        return None
    return {"rollouts": job.malformed_rollouts, "calls": job.malformed_calls}
