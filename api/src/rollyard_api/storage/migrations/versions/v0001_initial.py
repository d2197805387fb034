"""The first schema: jobs, groups, rollouts, payloads, pools, backends."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("metadata", sa.LargeBinary(), nullable=False),
        sa.Column("spec", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("limits", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.LargeBinary(), nullable=False),
        sa.Column("pool", sa.String(length=63), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        sa.Column("closed", sa.Boolean(), nullable=False),
        sa.Column("cancel_reason", sa.String(length=128), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("deadline_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("delete_at", sa.Double(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("ended", sa.Integer(), nullable=False),
        sa.Column("succeeded", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("cancelled", sa.Integer(), nullable=False),
        sa.Column("reward_sum", sa.Double(), nullable=False),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.Column("groups_ended", sa.Integer(), nullable=False),
        sa.Column("parts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("uid", name=op.f("uq_jobs_uid")),
    )
    op.create_index(
        "ix_jobs_unfinished",
        "jobs",
        ["id"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_index(
        "uq_jobs_live_name",
        "jobs",
        ["namespace", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_table(
        "payloads",
        sa.Column("rollout_id", sa.String(length=128), nullable=False),
        sa.Column("carry", sa.LargeBinary(), nullable=True),
        sa.Column("trajectory", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_payloads")),
    )
    op.create_table(
        "pools",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("metadata", sa.LargeBinary(), nullable=False),
        sa.Column("spec", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.LargeBinary(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("tokenizer", sa.Text(), nullable=False),
        sa.Column("max_active", sa.Integer(), nullable=False),
        sa.Column("external", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pools")),
        sa.UniqueConstraint("namespace", "name", name=op.f("uq_pools_namespace_name")),
        sa.UniqueConstraint("uid", name=op.f("uq_pools_uid")),
    )
    op.create_table(
        "backends",
        sa.Column("pool_id", sa.Integer(), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("policy_version", sa.String(length=128), nullable=False),
        sa.Column("message", sa.String(length=1024), nullable=False),
        sa.ForeignKeyConstraint(["pool_id"], ["pools.id"], name=op.f("fk_backends_pool_id")),
        sa.PrimaryKeyConstraint("pool_id", "url", name=op.f("pk_backends")),
    )
    op.create_table(
        "groups",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("no", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.String(length=128), nullable=False),
        sa.Column("task", sa.LargeBinary(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=True),
        sa.Column("remaining", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=True),
        sa.Column("delivered", sa.Boolean(), nullable=True),
        sa.Column("informative", sa.Boolean(), nullable=True),
        sa.Column("reason", sa.String(length=128), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_groups_job_id")),
        sa.PrimaryKeyConstraint("job_id", "no", name=op.f("pk_groups")),
        sa.UniqueConstraint("job_id", "task_id", name=op.f("uq_groups_job_id_task_id")),
    )
    op.create_index(
        "ix_groups_seq",
        "groups",
        ["job_id", "seq"],
        unique=False,
        sqlite_where=sa.text("seq IS NOT NULL"),
        postgresql_where=sa.text("seq IS NOT NULL"),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("group_no", sa.Integer(), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("node", sa.String(length=253), nullable=False),
        sa.Column("place", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=253), nullable=True),
        sa.Column("lease_expires", sa.Double(), nullable=True),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("failures_init", sa.SmallInteger(), nullable=False),
        sa.Column("failures_run", sa.SmallInteger(), nullable=False),
        sa.Column("failures_eval", sa.SmallInteger(), nullable=False),
        sa.Column("expiries", sa.SmallInteger(), nullable=False),
        sa.Column("eval_expiries", sa.SmallInteger(), nullable=False),
        sa.Column("settled", sa.Text(), nullable=False),
        sa.Column("timings", sa.Text(), nullable=False),
        sa.Column("sandbox_id", sa.String(length=253), nullable=True),
        sa.Column("sandbox", sa.LargeBinary(), nullable=True),
        sa.Column("backend", sa.Text(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("components", sa.LargeBinary(), nullable=True),
        sa.Column("reason", sa.String(length=128), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("end_seq", sa.Integer(), nullable=True),
        sa.Column("pending", sa.SmallInteger(), nullable=True),
        sa.Column("part", sa.Integer(), nullable=True),
        sa.Column("part_offset", sa.BigInteger(), nullable=True),
        sa.Column("part_length", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rollouts_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
    )
    op.create_index(
        "ix_rollouts_end",
        "rollouts",
        ["job_id", "end_seq"],
        unique=False,
        sqlite_where=sa.text("end_seq IS NOT NULL"),
        postgresql_where=sa.text("end_seq IS NOT NULL"),
    )
    op.create_index("ix_rollouts_group", "rollouts", ["job_id", "group_no"], unique=False)
    op.create_index(
        "ix_rollouts_lease",
        "rollouts",
        ["lease_expires", "job_id", "state", "backend"],
        unique=False,
        sqlite_where=sa.text("lease_expires IS NOT NULL"),
        postgresql_where=sa.text("lease_expires IS NOT NULL"),
    )
    op.create_index(
        "ix_rollouts_pending",
        "rollouts",
        ["job_id", "end_seq"],
        unique=False,
        sqlite_where=sa.text("pending IS NOT NULL"),
        postgresql_where=sa.text("pending IS NOT NULL"),
    )
    op.create_index("ix_rollouts_queue", "rollouts", ["job_id", "state", "node", "place"], unique=False)
    op.create_index(
        "ix_rollouts_sandbox",
        "rollouts",
        ["sandbox_id"],
        unique=False,
        sqlite_where=sa.text("sandbox_id IS NOT NULL"),
        postgresql_where=sa.text("sandbox_id IS NOT NULL"),
    )


def downgrade() -> None:
    for table in ("rollouts", "groups", "backends", "pools", "payloads", "jobs"):
        op.drop_table(table)
