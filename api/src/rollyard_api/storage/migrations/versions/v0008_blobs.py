"""Uploads, and the one that each job's tasks were read from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "blobs",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("pieces", sa.Integer(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("touched_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_blobs")),
    )
    op.create_index("ix_blobs_namespace", "blobs", ["namespace", "sha256"])
    where = sa.text("complete")
    op.create_index(
        "uq_blobs_complete",
        "blobs",
        ["namespace", "sha256"],
        unique=True,
        sqlite_where=where,
        postgresql_where=where,
    )
    op.create_table(
        "blob_pieces",
        sa.Column("blob_id", sa.Integer(), nullable=False),
        sa.Column("no", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("blob_id", "no", name=op.f("pk_blob_pieces")),
    )
    op.add_column("jobs", sa.Column("blob_id", sa.Integer(), nullable=True))
    held = sa.text("blob_id IS NOT NULL")
    op.create_index("ix_jobs_blob", "jobs", ["blob_id"], sqlite_where=held, postgresql_where=held)
