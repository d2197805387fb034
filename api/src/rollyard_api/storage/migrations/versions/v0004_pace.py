"""How fast a backend gets rollouts through Run, and under which load."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("pace", "pace_seconds", "pace_load", "measured_at"):
        op.add_column("backends", sa.Column(name, sa.Double(), nullable=True))
