"""Dynamic sampling: what a job has found and thrown away, and the steps of its stream."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("holding", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("rollouts", sa.Column("sampled_tokens", sa.Integer(), nullable=True))
    op.create_table(
        "dynamic_sampling",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("target", sa.BigInteger(), nullable=False),
        sa.Column("started", sa.Integer(), nullable=False),
        sa.Column("informative", sa.Integer(), nullable=False),
        sa.Column("uninformative", sa.Integer(), nullable=False),
        sa.Column("dropped", sa.Integer(), nullable=False),
        sa.Column("surplus", sa.Integer(), nullable=False),
        sa.Column("surplus_rollouts", sa.Integer(), nullable=False),
        sa.Column("discarded_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_dynamic_sampling_job_id"),
        sa.PrimaryKeyConstraint("job_id", name="pk_dynamic_sampling"),
    )
    op.create_table(
        "sampling_targets",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.Column("goal", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_sampling_targets_job_id"),
        sa.PrimaryKeyConstraint("job_id", "id", name="pk_sampling_targets"),
    )
