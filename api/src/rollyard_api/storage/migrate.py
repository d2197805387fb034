"""Bring a database's schema up to date at start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

if TYPE_CHECKING:
    from alembic.config import Config

_FOLDER: Final = Path(__file__).parent / "migrations"
_LOCK = 7_382_946_110
"""The key of a PostgreSQL advisory lock. If several replicas start at once, one migrates, others wait."""


def config(connection: Connection) -> Config:
    """Return Alembic's configuration for the packaged migrations on this connection."""
    from alembic.config import Config

    made = Config()
    made.set_main_option("script_location", str(_FOLDER))
    made.attributes["connection"] = connection
    return made


def head() -> str:
    """Return the revision of the last packaged migration, which its file name begins with."""
    return max(path.name[1:5] for path in (_FOLDER / "versions").glob("v[0-9][0-9][0-9][0-9]_*.py"))


def upgrade(engine: Engine) -> None:
    """Run every migration that the database lacks, in one transaction."""
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if _revisions(connection) == [head()]:
            return
        # Loading Alembic takes most of the time of a start, and a restarted control plane needs no migration.
        from alembic import command

        command.upgrade(config(connection), "head")


def _revisions(connection: Connection) -> list[str]:
    """Return the revisions that Alembic has noted in the database."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return []
    return list(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars())
