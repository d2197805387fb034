"""Bring a database's schema up to date at start."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection, Engine

_LOCK = 7_382_946_110
"""The key of a PostgreSQL advisory lock. If several replicas start at once, one migrates, others wait."""


def config(connection: Connection) -> Config:
    """Return Alembic's configuration for the packaged migrations on this connection."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    made.attributes["connection"] = connection
    return made


def upgrade(engine: Engine) -> None:
    """Run every migration that the database lacks, in one transaction."""
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        command.upgrade(config(connection), "head")
