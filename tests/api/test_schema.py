"""The migrations make exactly the schema that the code reads and writes."""

from __future__ import annotations

from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.storage import view_tables
from rollyard_api.storage.database import Database, migration_config, revisions, upgrade
from rollyard_api.storage.schema import metadata


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'rollyard.db'}"
    found: str = request.getfixturevalue("fresh_postgres")
    return found


async def test_upgraded_schema_is_the_metadata(empty: str) -> None:
    assert view_tables.rates.name in metadata.tables, "the tables of views are among them"
    database = Database(empty)
    try:
        upgrade(database.writer)
        upgrade(database.writer)
        with database.writer.connect() as conn:
            context = MigrationContext.configure(conn, opts={"compare_type": True})
            assert compare_metadata(context, metadata) == []
            assert set(sa.inspect(conn).get_table_names()) == {*metadata.tables, "alembic_version"}
    finally:
        await database.close()


async def test_a_database_with_the_last_migration_is_not_migrated_again(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(empty)
    stamps: list[str] = []
    stamp = alembic.command.stamp

    def counted(config: Config, revision: str) -> None:
        stamps.append(revision)
        stamp(config, revision)

    monkeypatch.setattr(alembic.command, "stamp", counted)
    try:
        with database.writer.connect() as conn:
            packaged = ScriptDirectory.from_config(migration_config(conn))
            assert packaged.get_heads() == revisions()[-1:]
            assert sorted(one.revision for one in packaged.walk_revisions()) == revisions()
        upgrade(database.writer)
        upgrade(database.writer)
        assert stamps == ["head"]
    finally:
        await database.close()


async def test_a_database_of_an_unknown_version_is_refused_and_not_touched(empty: str) -> None:
    database = Database(empty)
    try:
        with database.writer.begin() as conn:
            conn.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
            conn.execute(sa.text("INSERT INTO alembic_version VALUES ('9999')"))
        with pytest.raises(
            ControlPlaneError, match=r"has the schema 9999, .* name an empty database"
        ) as refused:
            upgrade(database.writer)
        assert refused.value.reason == "UnknownSchema"
        with database.writer.connect() as conn:
            assert sa.inspect(conn).get_table_names() == ["alembic_version"]
    finally:
        await database.close()
