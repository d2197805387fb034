"""Task formats, which make tasks of the rows of known data sets. Entry points of `rollyard.task_formats`."""

from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat

__all__ = ["Row", "RowRefused", "TaskFormat"]
