"""Sign-in of browsers: one-time codes, sessions, and the name of the installation."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    used: sa.Column[Any] = sa.Column("used_at", sa.Double(), nullable=False)
    for table, more in (("sign_in_codes", []), ("browser_sessions", [used])):
        op.create_table(
            table,
            sa.Column("digest", sa.String(64), nullable=False),
            sa.Column("role", sa.String(16), nullable=False),
            sa.Column("maker", sa.String(16), nullable=False),
            sa.Column("proof", sa.String(64), nullable=False),
            sa.Column("made_at", sa.Double(), nullable=False),
            *more,
            sa.Column("expires_at", sa.Double(), nullable=False),
            sa.PrimaryKeyConstraint("digest", name=f"pk_{table}"),
        )
    op.create_table(
        "installation",
        sa.Column("no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("no", name="pk_installation"),
    )
