"""What pages of people read: narrow rows of ended rollouts, statistics, rates, workers and words."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ended_rollouts",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("end_seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("group_no", sa.Integer(), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("attempts", sa.SmallInteger(), nullable=False),
        sa.Column("policy_index", sa.Integer(), nullable=True),
        sa.Column("reason", sa.String(128), nullable=True),
        sa.Column("worker", sa.String(253), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "end_seq", name="pk_ended_rollouts"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_ended_rollouts_group", "ended_rollouts", ["job_id", "group_no"])
    for name in ("reward", "seconds", "tokens"):
        columns = ["job_id", name, "end_seq", "state"]
        op.create_index(f"ix_ended_rollouts_{name}", "ended_rollouts", columns)
    op.create_table(
        "ended_groups",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("mean", sa.Double(), nullable=True),
        sa.Column("variance", sa.Double(), nullable=True),
        sa.Column("informative", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(128), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "no", name="pk_ended_groups"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job_statistics",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rollouts", sa.Integer(), nullable=False),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_job_statistics"),
    )
    op.create_table(
        "rates",
        sa.Column("start", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rollouts", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("start", name="pk_rates"),
    )
    op.create_table(
        "seen_workers",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(253), nullable=False),
        sa.Column("node", sa.String(253), nullable=False),
        sa.Column("stages", sa.String(32), nullable=False),
        sa.Column("heard_at", sa.Double(), nullable=False),
        sa.Column("error_at", sa.Double(), nullable=True),
        sa.Column("error_reason", sa.String(128), nullable=True),
        sa.Column("error_message", sa.String(1024), nullable=True),
        sa.Column("error_rollout", sa.String(128), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "name", name="pk_seen_workers"),
    )
    op.create_table(
        "watched_rollouts",
        sa.Column("rollout_id", sa.String(128), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("turns", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("rollout_id", name="pk_watched_rollouts"),
    )
    op.create_table(
        "rollout_words",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("end_seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("words", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "end_seq", name="pk_rollout_words"),
    )
