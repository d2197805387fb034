"""Installed task formats are found by their entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from rollyard_crds.errors import CrdsError
from rollyard_crds.task_formats.interface import TaskFormat

GROUP: Final = "rollyard.task_formats"
DEFAULT: Final = "rollyard"


class FormatUnknown(CrdsError, ValueError):
    """No installed distribution provides the task format."""

    reason = "NotInstalled"


def task_format(name: str | None) -> TaskFormat:
    """Return a new instance of a format; None stands for the default.

    Raises:
        FormatUnknown: The format is not installed, or is no subclass of TaskFormat.
    """
    name = name or DEFAULT
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise FormatUnknown(
            f"no task format {name!r} is installed; installed: {', '.join(sorted(found)) or 'none'}"
        )
    made = found[name].load()
    if not isinstance(made, type) or not issubclass(made, TaskFormat):
        raise FormatUnknown(f"the task format {name!r} is no subclass of TaskFormat")
    return made()
