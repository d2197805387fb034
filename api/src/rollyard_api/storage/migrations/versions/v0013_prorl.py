"""The ProRL calls: whether a batch is open, the jobs that they made, and the calls of the batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "prorl_state",
        sa.Column("namespace", sa.String(63), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("running", sa.Boolean(), nullable=False),
        sa.Column("pool_uid", sa.String(36), nullable=True),
        sa.PrimaryKeyConstraint("namespace", name="pk_prorl_state"),
    )
    op.create_table(
        "prorl_jobs",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("namespace", sa.String(63), nullable=False),
        sa.Column("settings", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_prorl_jobs"),
    )
    op.create_index("ix_prorl_jobs_namespace", "prorl_jobs", ["namespace"])
    op.create_table(
        "prorl_calls",
        sa.Column("namespace", sa.String(63), nullable=False),
        sa.Column("batch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("rollout_id", sa.String(128), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("cancelled", sa.Boolean(), nullable=False),
        sa.Column("anonymous", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "batch", "key", name="pk_prorl_calls"),
    )
