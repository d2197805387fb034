"""Circuits, measured speeds and weights of backends; weight updates; the policy a rollout began with."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    of_pools: tuple[sa.Column[Any], ...] = (
        sa.Column("policy_version", sa.String(length=128), nullable=False, server_default=""),
        sa.Column("policy_index", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("paused", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("served_model", sa.Text(), nullable=True),
    )
    of_backends: tuple[sa.Column[Any], ...] = (
        sa.Column("weights", sa.String(length=16), nullable=False, server_default="Current"),
        sa.Column("weights_message", sa.String(length=1024), nullable=False, server_default=""),
        sa.Column("policy_index", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("restart_requested", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("draining", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("circuit", sa.String(length=16), nullable=False, server_default="Closed"),
        sa.Column("failures", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("opened_at", sa.Double(), nullable=True),
        sa.Column("speed", sa.Double(), nullable=True),
        sa.Column("stats", sa.LargeBinary(), nullable=True),
    )
    for column in of_pools:
        op.add_column("pools", column)
    for column in of_backends:
        op.add_column("backends", column)
    op.add_column("rollouts", sa.Column("policy_index", sa.Integer(), nullable=True))
    op.create_table(
        "weight_updates",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("pool_id", sa.Integer(), nullable=False),
        sa.Column("policy_version", sa.String(length=128), nullable=False),
        sa.Column("policy_index", sa.Integer(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("verified", sa.Boolean(), nullable=False),
        sa.Column("verified_by", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("progress", sa.LargeBinary(), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("owner_expires", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["pool_id"], ["pools.id"], name=op.f("fk_weight_updates_pool_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_weight_updates")),
    )
    op.create_index("ix_weight_updates_pool_id", "weight_updates", ["pool_id"], unique=False)
