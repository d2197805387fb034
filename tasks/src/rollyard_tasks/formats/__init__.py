"""Task formats, which turn rows of known data sets into tasks: entry points of `rollyard.task_formats`."""

from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat

__all__ = ["Row", "RowRefused", "TaskFormat"]
