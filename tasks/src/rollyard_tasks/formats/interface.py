"""The base class of task formats, the format of rows that are tasks, and the row that they read.

A row gives fields of the expected type, or an error.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from rollyard_crds.fields.chat_messages import MessageRefused, plain_messages
from rollyard_crds.fields.harbor import HarborOptions
from rollyard_crds.fields.json_values import MAX_VALUES, deeper_than, too_many_values
from rollyard_crds.task import MAX_DEPTH

from rollyard_tasks.errors import TasksError
from rollyard_tasks.file_rows import json_value

_KINDS: Final = {str: "a text", dict: "an object", list: "a list", int: "a whole number"}

_UNSEEN: Final = "holds pictures, video or sound, and a model gets only texts here: leave such rows out"
_UNREAD: Final = (
    "would be a part of the task, and this format does not read it: write it into the text of the task, or "
    "leave the column out"
)
_TOOLS: Final = (
    "would be the tools of this task alone, and those of all tasks are the job's: name them in agent.tools, "
    "and leave the column out"
)
_CHANGING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("image", "images", "decoded_image", "image_assets", "picture", "pictures"), _UNSEEN),
    **dict.fromkeys(
        ("video", "videos", "audio", "audios", "multi_modal_data", "multi_modal_inputs"), _UNSEEN
    ),
    **dict.fromkeys(("hint", "hints", "context", "passage", "article", "paragraph", "premise"), _UNREAD),
    **dict.fromkeys(("system", "system_prompt", "starter_code"), _UNREAD),
    **dict.fromkeys(("tools", "functions", "tool_choice"), _TOOLS),
    "tool_calls": "belongs to a message of the conversation: write it there",
    "chat_template_kwargs": "would be those of this task alone: name them in agent.chatTemplateKwargs, "
    "and leave the column out",
}
"""What is wrong with a column that changes the task, by its name, if the format does not read it."""
_NUMBERED_IMAGE: Final = re.compile(r"image_?[0-9]+")


class RowRefused(TasksError, ValueError):
    """A row that is not a task of its format. The message names a field and never shows the row's content.

    Args:
        field: The field.
        problem: What is wrong with it.
        quoting: A message that shows some of the row's content, for those who may see all of that content.
    """

    reason = "InvalidTasks"

    def __init__(self, field: str, problem: str, *, quoting: str = "") -> None:
        super().__init__(f"{field}: {problem}")
        self.quoting = quoting or str(self)


class Row:
    """One row of a data set.

    A column that is null counts as absent, because a table that unites data sets has all their columns in
    every row. NaN, which pandas writes where a text is missing, and an object of nothing but nulls count as
    null.

    Args:
        values: The columns by name. The attribute `values` has those that are not null. A column that is
            looked up there by name counts as read; one that is only listed does not.
        number: The number of the row; the first is 1.
        field: The path of this object within the row, for messages. It is empty for the row itself.
    """

    def __init__(self, values: Mapping[str, Any], number: int, field: str = "") -> None:
        self.values = _Columns({key: value for key, value in values.items() if not _is_null(value)})
        self.number = number
        self._field = field

    def filled(self, nothing: Sequence[Any]) -> Row:
        """Return this row without the columns that hold one of `nothing`. What it reads counts here, too."""
        row = Row({key: value for key, value in self.values.items() if value not in nothing}, self.number)
        row.values.read = self.values.read
        return row

    def rest(self) -> dict[str, Any]:
        """Return the columns that have not been read so far.

        Raises:
            RowRefused: One of them is not empty and changes the task, such as `images`, `hint` or `tools`.
        """
        columns = {key: value for key, value in self.values.items() if key not in self.values.read}
        for name, value in columns.items():
            plain = name.lower()
            problem = _UNSEEN if _NUMBERED_IMAGE.fullmatch(plain) else _CHANGING.get(plain)
            if problem is not None and not _is_empty(value):
                raise RowRefused(self.name(name), problem)
        return columns

    def name(self, key: str) -> str:
        """Return the path of a field, as messages show it."""
        return f"{self._field}.{key}" if self._field else key

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text that is not empty, or the default where the field is absent.

        Raises:
            RowRefused: The field is absent and has no default, is empty, or is not a text.
        """
        value = self._of(key, str, default, self.values.get(key))
        if value == "" and default is None:
            raise RowRefused(self.name(key), "must not be empty")
        return str(value)

    def items(self, key: str) -> list[Any]:
        """Return a list, which may be written as a JSON text.

        Raises:
            RowRefused: The field is absent, or is not a list.
        """
        return list(self._of(key, list, None, self.json(key)))

    def chat(self, key: str) -> list[dict[str, Any]]:
        """Return a conversation as the messages of a task, which may be written as a JSON text.

        The messages may be in the forms of OpenAI, TRL and verl. A table has the fields of all messages in
        each, so nulls count as absent everywhere, even in the arguments of calls.

        Raises:
            RowRefused: The field is absent, is not a list of messages, or is an empty one, or a message
                cannot be shown to a model.
        """
        messages = self.items(key)
        if not messages:
            raise RowRefused(self.name(key), "must not be empty")
        if deeper_than(messages, MAX_DEPTH):
            raise RowRefused(self.name(key), f"lists and objects may nest {MAX_DEPTH} deep")
        try:
            return plain_messages(_without_nulls(messages))
        except MessageRefused as error:
            field = f"{self.name(key)}{error.path}"
            shown = "" if error.shown is None else f" (got {ascii(error.shown)[:80]})"
            quoting = f"{field}: {error.problem}{shown}"
            raise RowRefused(field, error.problem, quoting=quoting) from error

    def row(self, key: str, *, optional: bool = False) -> Row:
        """Return an object as a row of its own, which may be written as a JSON text.

        Raises:
            RowRefused: The field is not an object, or is absent and not optional.
        """
        value = self._of(key, dict, {} if optional else None, self.json(key))
        return Row(value, self.number, self.name(key))

    def json(self, key: str) -> Any:
        """Return the value of a field, which may be written as a JSON text, or None where it is absent.

        Raises:
            RowRefused: It is a text that is not JSON.
        """
        value = self.values.get(key)
        if not isinstance(value, str):
            return value
        if too_many_values(value):
            raise RowRefused(self.name(key), f"holds more than {MAX_VALUES} values")
        try:
            return json_value(value)
        except ValueError as error:
            long = "digits" in str(error) or "out of range" in str(error)
            problem = "has an integer of more than 4,300 digits" if long else "is a text that is not JSON"
            raise RowRefused(self.name(key), problem) from error

    def _of(self, key: str, kind: type, default: Any, value: Any) -> Any:
        if value is None:
            if default is None:
                raise RowRefused(self.name(key), "is missing")
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RowRefused(self.name(key), f"must be {_KINDS[kind]}")
        return value


class _Columns(dict[str, Any]):
    """Columns by name. It notes those that are looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _is_empty(value: Any) -> bool:
    """Return whether a value is nothing: null, a text of white space, or a container of nothing else."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            stack += item.values() if isinstance(item, dict) else item
        elif item.strip() if isinstance(item, str) else not _is_null(item):
            return False
    return True


def _is_null(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict) and item:
            stack += item.values()
        elif item is not None and not (isinstance(item, float) and math.isnan(item)):
            return False
    return True


class TaskFormat(ABC):
    """The base of task formats.

    Implement `task` and name the class in the entry point group `rollyard.task_formats`. An instance is made
    without arguments for each task list, and serves only that one.
    """

    harbor: HarborOptions | None = None
    """The job's `tasks.harbor`, which only the format `harbor` has."""

    columns: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """The columns by which rows of this format are recognised, for messages about rows that are read in
    another one; each tuple is one layout. No format is ever chosen by them."""

    def configure(self, specs: Mapping[str, Any]) -> None:
        """Take the content of the file `tasks.specs`, before the first row. By default, it is refused.

        Raises:
            RowRefused: The format takes no such file, or takes another form of it.
        """
        raise RowRefused("specs", "this format takes none")

    def read(self, values: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return the fields of the task of a row, all of whose columns are used or do not change the task.

        Args:
            values: The columns of the row by name.
            number: The number of the row; the first is 1.

        Raises:
            RowRefused: The row is not a task of this format, or the format does not read a column that
                changes the task, such as `images`, `hint` or `tools`.
        """
        row = Row(values, number)
        fields = self.task(row)
        row.rest()
        return fields

    @abstractmethod
    def task(self, row: Row) -> dict[str, Any]:
        """Return the fields of the task that a row describes. Without an `id`, the row's number is its id.

        Raises:
            RowRefused: The row is not a task of this format.
        """


class RollyardFormat(TaskFormat):
    """The format `rollyard`, whose rows are tasks already."""

    columns = (("id", "prompt"), ("id", "messages"))

    def task(self, row: Row) -> dict[str, Any]:
        """Return the row itself."""
        return dict(row.values)
