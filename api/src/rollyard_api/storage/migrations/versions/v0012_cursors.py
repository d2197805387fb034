"""Cursors that a job's readers acknowledge, and how far its results were read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("read_trajectories", "read_groups"):
        op.add_column("jobs", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "cursors",
        sa.Column("job_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("moved_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_cursors_job_id"),
        sa.PrimaryKeyConstraint("job_id", "name", name="pk_cursors"),
    )
