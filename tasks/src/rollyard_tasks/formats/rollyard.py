"""The format `rollyard`: a row is a task already."""

from __future__ import annotations

from typing import Any

from rollyard_tasks.formats.interface import Row, TaskFormat


class RollyardFormat(TaskFormat):
    """Returns rows as they are."""

    columns = (("id", "prompt"), ("id", "messages"))

    def task(self, row: Row) -> dict[str, Any]:
        """Return the row itself."""
        return dict(row.values)
