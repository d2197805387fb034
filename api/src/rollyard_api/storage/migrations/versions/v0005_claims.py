"""Sandbox claims; the Kubernetes object of a job and the sandboxes it wants warm."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("object_uid", sa.String(length=128), nullable=True))
    op.add_column("jobs", sa.Column("warm", sa.LargeBinary(), nullable=True))
    op.create_table(
        "claims",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("rollout_id", sa.String(length=128), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("job_uid", sa.String(length=36), nullable=False),
        sa.Column("shape", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.Column("address", sa.String(length=512), nullable=False),
        sa.Column("secret", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.String(length=128), nullable=False),
        sa.Column("message", sa.String(length=1024), nullable=False),
        sa.Column("retryable", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claims")),
        sa.UniqueConstraint("rollout_id", "token", name=op.f("uq_claims_rollout_id_token")),
    )
