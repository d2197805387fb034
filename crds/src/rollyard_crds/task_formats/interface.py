"""The base class of task formats, and the row that they read: fields of the expected type, or an error."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from rollyard_crds.errors import CrdsError

_KINDS: Final = {str: "a text", dict: "an object", list: "a list", int: "a whole number"}
MAX_NESTED_BYTES: Final = 8 << 20
"""The largest JSON text within a field, in bytes."""


class RowRefused(CrdsError, ValueError):
    """A row that is no task of its format. The message names a field and never shows the row's content.

    Args:
        field: The field.
        problem: What is wrong with it.
        quoting: A message that shows some of the row's content, for those who may see all of it.
    """

    reason = "InvalidTasks"

    def __init__(self, field: str, problem: str, *, quoting: str = "") -> None:
        super().__init__(f"{field}: {problem}")
        self.quoting = quoting or str(self)


class Row:
    """One row of a data set.

    A column that is null is absent, because a table that unites data sets has all their columns in every
    row. NaN, which pandas writes where a text is missing, and an object of nothing but nulls are null.

    Args:
        values: The columns by name. The attribute `values` has those that are not null.
        number: The number of the row; the first is 1.
        field: The path of this object within the row, for messages. It is empty for the row itself.
    """

    def __init__(self, values: Mapping[str, Any], number: int, field: str = "") -> None:
        self.values = {key: value for key, value in values.items() if not _is_null(value)}
        self.number = number
        self._field = field

    def name(self, key: str) -> str:
        """Return the path of a field, as messages show it."""
        return f"{self._field}.{key}" if self._field else key

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text that is not empty, or the default where the field is absent.

        Raises:
            RowRefused: The field is absent and has no default, is empty, or is no text.
        """
        found = self._of(key, str, default, self.values.get(key))
        if found == "" and default is None:
            raise RowRefused(self.name(key), "must not be empty")
        return str(found)

    def items(self, key: str) -> list[Any]:
        """Return a list, which may be written as a JSON text.

        Raises:
            RowRefused: The field is absent, or is no list.
        """
        return list(self._of(key, list, None, self._json(key)))

    def row(self, key: str, *, optional: bool = False) -> Row:
        """Return an object as a row of its own, which may be written as a JSON text.

        Raises:
            RowRefused: The field is no object, or is absent and not optional.
        """
        found = self._of(key, dict, {} if optional else None, self._json(key))
        return Row(found, self.number, self.name(key))

    def _json(self, key: str) -> Any:
        """Return the value of a field, which may be written as a JSON text."""
        value = self.values.get(key)
        if not isinstance(value, str):
            return value
        if len(value) > MAX_NESTED_BYTES:
            raise RowRefused(self.name(key), f"is longer than {MAX_NESTED_BYTES} bytes")
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowRefused(self.name(key), "is a text that is no JSON") from error

    def _of(self, key: str, kind: type, default: Any, value: Any) -> Any:
        if value is None:
            if default is None:
                raise RowRefused(self.name(key), "is missing")
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RowRefused(self.name(key), f"must be {_KINDS[kind]}")
        return value


def _is_null(value: Any) -> bool:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict) and one:
            left += one.values()
        elif one is not None and not (isinstance(one, float) and math.isnan(one)):
            return False
    return True


class TaskFormat(ABC):
    """The base of task formats.

    Implement `task` and name the class in the entry point group `rollyard.task_formats`. An instance is made
    without arguments for each task list, and serves only that one.
    """

    def configure(self, specs: Mapping[str, Any]) -> None:
        """Take the content of the file `tasks.specs`, before the first row. By default, it is refused.

        Raises:
            RowRefused: The format takes no such file, or another form of it.
        """
        raise RowRefused("specs", "this format takes none")

    @abstractmethod
    def task(self, row: Row) -> dict[str, Any]:
        """Return the fields of the task that a row describes. Without an `id`, the row's number is its id.

        Raises:
            RowRefused: The row is no task of this format.
        """
