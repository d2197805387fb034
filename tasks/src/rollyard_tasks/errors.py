"""The root of the exceptions of this package. Each exception stands beside the code that raises it."""

from __future__ import annotations


class TasksError(Exception):
    """The base class of every exception of this package. Its text says what is wrong with which task."""

    reason: str = "TasksError"
    """A CamelCase word for programs. It is stable."""
