"""Alembic's environment: runs on the connection that `rollyard_api.storage.database` hands over."""

from __future__ import annotations

from alembic import context

from rollyard_api.storage.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
context.run_migrations()
