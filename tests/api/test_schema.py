"""The migrations make exactly the schema that the code reads and writes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from rollyard_api.storage import migrate, rows, view_tables
from rollyard_api.storage.database import Database
from rollyard_api.storage.sign_in_tables import metadata


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
        migrate.upgrade(database.writer)
        migrate.upgrade(database.writer)
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
    upgrades: list[str] = []
    upgrade = alembic.command.upgrade

    def counted(config: Config, revision: str) -> None:
        upgrades.append(revision)
        upgrade(config, revision)

    monkeypatch.setattr(alembic.command, "upgrade", counted)
    try:
        with database.writer.connect() as conn:
            assert ScriptDirectory.from_config(migrate.config(conn)).get_heads() == [migrate.head()]
        migrate.upgrade(database.writer)
        assert upgrades == ["head"]
        migrate.upgrade(database.writer)
        assert upgrades == ["head"]
        with database.writer.begin() as conn:
            conn.execute(sa.text("UPDATE alembic_version SET version_num = '0000'"))
        with pytest.raises(CommandError, match="0000"):
            migrate.upgrade(database.writer)
    finally:
        await database.close()


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (rows.JobRow, "jobs"),
        (rows.PayloadRow, "payloads"),
        (rows.BlobRow, "blobs"),
        (rows.ClaimRow, "claims"),
        (rows.PoolRow, "pools"),
        (rows.BackendRow, "backends"),
        (rows.WeightUpdateRow, "weight_updates"),
    ],
)
def test_a_row_has_the_columns_of_its_table(kind: Any, table: str) -> None:
    """Rows are made of a whole table's columns by position."""
    assert [field.name for field in fields(kind)] == [
        column.name for column in metadata.tables[table].columns
    ]
