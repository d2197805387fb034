"""The steps before the database is opened: locking the state folder, and bringing the schema up to date.

An empty database gets the tables that `schema.metadata` describes, and the revision of the last
migration. A migration therefore only changes a database that an earlier release has made.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.storage import view_tables  # noqa: F401  It adds tables to the metadata.
from rollyard_api.storage.schema import metadata

if TYPE_CHECKING:
    from alembic.config import Config

_FOLDER: Final = Path(__file__).parent / "migrations"
_LOCK: Final = 7_382_946_110
"""The key of a PostgreSQL advisory lock. If several replicas start at once, one migrates, others wait."""


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state folder, which permits one control plane where the database is a file in it.

    The kernel frees the lock when the process ends, even if it is killed.

    Raises:
        ControlPlaneError: Another process holds the lock.
    """
    with (state_dir / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ControlPlaneError(
                f"another control plane uses {state_dir}: stop it, or choose another --state-dir "
                "(several replicas need a PostgreSQL --db)",
                reason="StateFolderInUse",
            ) from error
        yield


def config(connection: Connection) -> Config:
    """Return Alembic's configuration for the packaged migrations on this connection."""
    from alembic.config import Config

    settings = Config()
    settings.set_main_option("script_location", str(_FOLDER))
    settings.attributes["connection"] = connection
    return settings


def revisions() -> list[str]:
    """Return the revisions of the packaged migrations, in their order. File names begin with them."""
    return sorted(path.name[1:5] for path in (_FOLDER / "versions").glob("v[0-9][0-9][0-9][0-9]_*.py"))


def upgrade(engine: Engine) -> None:
    """Create all tables in an empty database, or run the migrations that it lacks, in one transaction.

    Raises:
        ControlPlaneError: The database is that of a version that this one does not know.
    """
    known = revisions()
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        present = _present(connection)
        if present == [known[-1]]:
            return
        if unknown := sorted(set(present) - set(known)):
            raise ControlPlaneError(
                f"the database has the schema {', '.join(unknown)}, and this version of Rollyard knows none "
                f"after {known[-1]}: start the version that has written it, or name an empty database (--db)",
                reason="UnknownSchema",
            )
        # Loading Alembic takes most of the time of a start, and a restarted control plane needs no migration.
        from alembic import command

        if present:
            command.upgrade(config(connection), "head")
        else:
            # Tables of something else that have such a name are an error, and are not taken over.
            metadata.create_all(connection, checkfirst=False)
            command.stamp(config(connection), "head")


def _present(connection: Connection) -> list[str]:
    """Return the revisions that Alembic has noted in the database."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return []
    return list(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars())
