"""The jobs that drivers offer to workers that stand ready."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "assignments",
        sa.Column("namespace", sa.String(63), nullable=False),
        sa.Column("worker", sa.String(63), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("arguments", sa.LargeBinary(), nullable=False),
        sa.Column("offered_at", sa.Double(), nullable=False),
        sa.Column("taken_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("namespace", "worker", name="pk_assignments"),
    )
