"""The migrations make exactly the schema that the code reads and writes."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from rollyard_api.storage import migrate
from rollyard_api.storage.database import Database
from rollyard_api.storage.schema import metadata


async def test_upgraded_schema_is_the_metadata(settings: Any) -> None:
    database = Database(settings.database_url)
    try:
        migrate.upgrade(database.writer)
        migrate.upgrade(database.writer)
        with database.writer.connect() as conn:
            context = MigrationContext.configure(conn, opts={"compare_type": True})
            assert compare_metadata(context, metadata) == []
            assert set(sa.inspect(conn).get_table_names()) == {*metadata.tables, "alembic_version"}
    finally:
        await database.close()
