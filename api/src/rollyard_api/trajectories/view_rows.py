"""What is kept of a job for people to look at is removed with the job, piece by piece."""

from __future__ import annotations

import sqlalchemy as sa

from rollyard_api.storage.database import Transaction
from rollyard_api.storage.view_tables import (
    ended_groups,
    ended_rollouts,
    job_statistics,
    rollout_words,
    seen_workers,
    watched_rollouts,
)

_LARGE = (ended_rollouts, rollout_words)
_SMALL = (ended_groups, job_statistics, seen_workers, watched_rollouts)


def forget(tx: Transaction, job_id: int, most: int) -> bool:
    """Remove up to `most` rows of each kind that a deleted job has, and return whether nothing is left."""
    left = False
    for table in _LARGE:
        places = (
            sa.select(table.c.end_seq).where(table.c.job_id == job_id).order_by(table.c.end_seq).limit(most)
        )
        found = list(tx.conn.scalars(places))
        if found:
            tx.conn.execute(sa.delete(table).where(table.c.job_id == job_id, table.c.end_seq <= found[-1]))
        left = left or len(found) == most
    if left:
        return False
    for table in _SMALL:
        tx.conn.execute(sa.delete(table).where(table.c.job_id == job_id))
    return True
