"""The tables from which pages are made. Their content follows from the other tables and can be rebuilt."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollyard_api.storage.schema import StateNumber, metadata

# What is kept of each ended rollout for lists that are sorted and filtered, in narrow rows. A background task
# adds them a moment after the end, so that no completion pays for their indexes.
ended_rollouts = sa.Table(
    "ended_rollouts",
    metadata,
    sa.Column("job_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("end_seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("id", sa.String(128), nullable=False),
    sa.Column("group_no", sa.Integer, nullable=False),
    sa.Column("sample", sa.Integer, nullable=False),
    sa.Column("state", StateNumber, nullable=False),
    sa.Column("reward", sa.Double),
    # The seconds of work in Init, Run and Eval together.
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("tokens", sa.Integer, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=False),
    sa.Column("attempts", sa.SmallInteger, nullable=False),
    sa.Column("policy_index", sa.Integer),
    sa.Column("reason", sa.String(128)),
    sa.Column("worker", sa.String(253)),
    sa.Index("ix_ended_rollouts_group", "job_id", "group_no"),
    sa.Index("ix_ended_rollouts_reward", "job_id", "reward", "end_seq", "state"),
    sa.Index("ix_ended_rollouts_seconds", "job_id", "seconds", "end_seq", "state"),
    sa.Index("ix_ended_rollouts_tokens", "job_id", "tokens", "end_seq", "state"),
    sqlite_with_rowid=False,
)

# The mean and the variance of the rewards of each ended group, for the same lists.
ended_groups = sa.Table(
    "ended_groups",
    metadata,
    sa.Column("job_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("mean", sa.Double),
    sa.Column("variance", sa.Double),
    sqlite_with_rowid=False,
)

# The statistics of a job up to a place in the order in which its rollouts ended, as JSON.
job_statistics = sa.Table(
    "job_statistics",
    metadata,
    sa.Column("job_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rollouts", sa.Integer, nullable=False),
    sa.Column("groups", sa.Integer, nullable=False),
    sa.Column("document", sa.LargeBinary, nullable=False),
)

# The rollouts that ended, and their tokens, in each bucket of time of the last minutes.
rates = sa.Table(
    "rates",
    metadata,
    sa.Column("start", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rollouts", sa.Integer, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)

# The stage workers that were heard from lately, and the last trouble of each.
seen_workers = sa.Table(
    "seen_workers",
    metadata,
    # The number of the job whose token the worker has, or 0 if its token reaches every job.
    sa.Column("job_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.String(253), primary_key=True),
    sa.Column("node", sa.String(253), nullable=False),
    sa.Column("stages", sa.String(32), nullable=False),
    sa.Column("heard_at", sa.Double, nullable=False),
    sa.Column("error_at", sa.Double),
    sa.Column("error_reason", sa.String(128)),
    sa.Column("error_message", sa.String(1024)),
    sa.Column("error_rollout", sa.String(128)),
)

# The rollouts that somebody watches while they run, and the turns that their workers have sent, as JSON.
watched_rollouts = sa.Table(
    "watched_rollouts",
    metadata,
    sa.Column("rollout_id", sa.String(128), primary_key=True),
    sa.Column("job_id", sa.Integer, nullable=False),
    sa.Column("until", sa.Double, nullable=False),
    # The fencing token under which the turns were sent.
    sa.Column("token", sa.Integer, nullable=False),
    sa.Column("turns", sa.LargeBinary),
)

# The words of an ended rollout's conversation, as their sorted hashes of four bytes each.
rollout_words = sa.Table(
    "rollout_words",
    metadata,
    sa.Column("job_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("end_seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("words", sa.LargeBinary, nullable=False),
)

_LARGE: Final = (ended_rollouts, rollout_words)
_SMALL: Final = (ended_groups, job_statistics, seen_workers, watched_rollouts)


def forget(conn: Connection, job_id: int, most: int) -> bool:
    """Remove up to `most` rows of each kind that a deleted job has, and return whether nothing is left."""
    left = False
    for table in _LARGE:
        places = (
            sa.select(table.c.end_seq).where(table.c.job_id == job_id).order_by(table.c.end_seq).limit(most)
        )
        ends = list(conn.scalars(places))
        if ends:
            conn.execute(sa.delete(table).where(table.c.job_id == job_id, table.c.end_seq <= ends[-1]))
        left = left or len(ends) == most
    if left:
        return False
    for table in _SMALL:
        conn.execute(sa.delete(table).where(table.c.job_id == job_id))
    return True
