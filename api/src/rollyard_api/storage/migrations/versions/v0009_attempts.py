"""The attempts of a rollout that did not end well, and the outages of pools."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "rollouts", sa.Column("outages", sa.SmallInteger(), nullable=False, server_default=sa.text("0"))
    )
    op.add_column("rollouts", sa.Column("attempts", sa.LargeBinary(), nullable=True))
    op.add_column("jobs", sa.Column("outage_began", sa.Double(), nullable=True))
