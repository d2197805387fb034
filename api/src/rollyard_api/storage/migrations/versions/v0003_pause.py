"""How a pool's servers are to be paused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pools", sa.Column("pause_mode", sa.String(length=8), nullable=True))
