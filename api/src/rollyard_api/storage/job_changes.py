"""The writer's connection to SQLite notices each change of what the token of a job depends on.

Triggers notice it, whichever code makes the change. They are temporary: they belong to one connection, and
nothing of them is stored in the database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

COLUMNS = ("namespace", "name", "uid", "object_uid", "finished_at", "deleted_at")
"""The columns of a job on which the answer to its tokens depends. Their change is noticed, and so are new and
removed rows."""
_FUNCTION = "rollyard_job_changed"


def watch(connection: sqlite3.Connection, changed: Callable[[], None]) -> bool:
    """Let `changed` be called within each transaction of this connection that changes a job in this way.

    Returns:
        Whether it will be called. It will not in a database without the table `jobs`.
    """
    with_jobs = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'jobs'"
    if connection.execute(with_jobs).fetchone() is None:
        return False
    connection.create_function(_FUNCTION, 0, changed)
    differs = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in COLUMNS)
    for event, condition in (("INSERT", ""), ("DELETE", ""), ("UPDATE", f"WHEN {differs} ")):
        connection.execute(
            f"CREATE TEMP TRIGGER rollyard_{event.lower()}_job AFTER {event} ON main.jobs {condition}"
            f"BEGIN SELECT {_FUNCTION}(); END"
        ).close()
    return True
