"""Installed task formats, which are found by their entry points, and for a row by its columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import Final

from rollyard_tasks.errors import TasksError
from rollyard_tasks.formats.interface import TaskFormat

GROUP: Final = "rollyard.task_formats"
DEFAULT: Final = "rollyard"


class FormatUnknown(TasksError, ValueError):
    """No installed distribution provides the task format."""

    reason = "NotInstalled"


def task_format(name: str | None) -> TaskFormat:
    """Return a new instance of a format; None stands for the default.

    Raises:
        FormatUnknown: The format is not installed, or is not a subclass of TaskFormat.
    """
    name = name or DEFAULT
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise FormatUnknown(
            f"no task format {name!r} is installed; installed: {', '.join(sorted(points)) or 'none'}"
        )
    loaded = points[name].load()
    if not isinstance(loaded, type) or not issubclass(loaded, TaskFormat):
        raise FormatUnknown(f"the task format {name!r} is not a subclass of TaskFormat")
    return loaded()


Layout = tuple[str, tuple[str, ...]]
"""A format, and columns by which its rows are recognised."""


def layouts() -> list[Layout]:
    """Return the layouts of all installed formats. Those with the most columns come first."""
    result: list[Layout] = []
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
        except Exception:
            continue  # A package that cannot be loaded must not hide what is wrong with a row.
        result += [(point.name, columns) for columns in getattr(loaded, "columns", ())]
    return sorted(result, key=lambda layout: (-len(layout[1]), layout[0]))


def other_format(filled: Iterable[str], name: str | None, known: Sequence[Layout]) -> str:
    """Return which format reads rows with these columns, as a message, or "" if none is known.

    Args:
        filled: The columns that a row fills.
        name: The format that has refused the row; None stands for the default.
        known: The layouts of the installed formats.
    """
    names = set(filled)
    fits = [layout for layout in known if names.issuperset(layout[1])]
    best = [layout for layout in fits if len(layout[1]) == len(fits[0][1])]
    if not best or (name or DEFAULT) in dict(best):
        return ""
    columns = best[0][1]
    others = [layout_name for layout_name, layout_columns in best if layout_columns == columns]
    if others == [DEFAULT] and name in dict(fits):
        return ""  # A conversation with an id is a task in both formats, which refuse the same messages.
    listed = f"{', '.join(columns[:-1])} and {columns[-1]}" if len(columns) > 1 else columns[0]
    return f"rows with {listed} are read by tasks.format: {' or '.join(others)}"
