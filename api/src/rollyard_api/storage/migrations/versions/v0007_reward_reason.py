"""Why a reward is what it is, where the evaluation could not simply decide."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("reward_reason", sa.String(length=128), nullable=True))
