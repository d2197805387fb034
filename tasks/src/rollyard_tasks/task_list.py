"""Reading task lists: rows into checked tasks, errors by the number of the row and the field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import ValidationError
from rollyard_crds.fields.json_values import HALF_CHARACTER, lone_surrogate
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.reading.manifest import describe
from rollyard_crds.rolloutjob import TaskSource
from rollyard_crds.task import Task

from rollyard_tasks.errors import TasksError
from rollyard_tasks.file_rows import FileRow, line_rows
from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.interface import RollyardFormat, RowRefused
from rollyard_tasks.formats.registry import (
    DEFAULT,
    FormatUnknown,
    Layout,
    layouts,
    other_format,
    task_format,
)
from rollyard_tasks.task_selection import TaskSelection

MAX_SPECS_BYTES: Final = 8 << 20
"""The largest size of a file `specs`, in bytes."""
MAX_PROBLEMS: Final = 20
MAX_FAULTS: Final = 1000
"""The largest number of faults of one task that are described one by one."""
MAX_TASKS: Final = 1_000_000
"""The largest number of tasks of one list, over all epochs."""


class TaskListError(TasksError, ValueError):
    """A task list that cannot be accepted; `problems` names line and field of each fault."""

    reason = "InvalidTasks"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class TaskLines:
    """Checks the rows of a task list as they come.

    Args:
        quote: whether faults may show what a row holds. Where they may not, they name the row, fields of
            tasks and columns of installed formats, and nothing else.
        source: the part of the job's spec with the format and the options; without it, the format is
            `rollyard`.
        selection: drops repeated tasks, and knows which ids may be used.
        specs: the content of the file `specs` of the source, which the format needs beside its rows.
        skipped: takes the rows that are left out, where the source says `onBadRow: skip`.

    Raises:
        TaskListError: the format is not installed, or refuses its specs.
    """

    def __init__(
        self,
        *,
        quote: bool = True,
        source: TaskSource | None = None,
        selection: TaskSelection[Any] | None = None,
        specs: Mapping[str, Any] | None = None,
        skipped: SkippedRows | None = None,
    ) -> None:
        self._quote = quote
        self._skips = source is not None and source.on_bad_row == "skip"
        self._skipped = SkippedRows() if skipped is None else skipped
        self._selection = selection
        self._name = source.format if source is not None else None
        self._layouts: list[Layout] | None = None
        try:
            self._format = None if self._name in (None, DEFAULT) else task_format(self._name)
        except FormatUnknown as error:
            raise TaskListError([f"format: {error}"]) from error
        if source is not None and self._format is not None:
            self._format.harbor = source.harbor
        if specs is not None:
            try:
                (self._format or RollyardFormat()).configure(specs)
            except RowRefused as error:
                raise TaskListError([str(error)]) from error
        self._seen: dict[str, int] = {}
        self._problems: list[str] = []

    def add(self, row: FileRow) -> Task | None:
        """Return the task of the next row, or None if it is refused, or repeated and therefore left out.

        Raises:
            TaskListError: as many rows are refused as are listed, unless they are skipped.
        """
        self._skipped.read += 1
        problems, task = ([row.problem], None) if row.problem else self._read(row)
        self.refuse(row, problems)
        return task

    def refuse(self, row: FileRow, problems: list[str], task: Task | None = None) -> None:
        """Note what is wrong with a row, or skip it. `task` is that of the row, if it was returned.

        Raises:
            TaskListError: as many rows are refused as are listed, unless they are skipped.
        """
        if task is not None:
            self._seen.pop(task.id, None)
        if self._skips and problems:
            self._skipped.add(f"{row.unit} {row.number}: {problems[0]}")
            return
        self._problems += [f"{row.unit} {row.number}: {problem}" for problem in problems]
        if len(self._problems) >= MAX_PROBLEMS:
            raise TaskListError(self._problems[:MAX_PROBLEMS])

    def end(self) -> None:
        """Finish after the last row.

        Raises:
            TaskListError: a row was refused, or there was no task.
        """
        if self._problems:
            raise TaskListError(self._problems)
        if self._seen:
            return
        if self._skipped.count:
            raise TaskListError([*self._skipped.reasons, f"no task is left: {self._skipped.summary()}"])
        raise TaskListError(["the task list is empty: give at least one task"])

    def _read(self, row: FileRow) -> tuple[list[str], Task | None]:
        if not isinstance(row.document, dict):
            actual = f", not {type(row.document).__name__}" if self._quote else ""
            return [f"must be a JSON object{actual}"], None
        columns = {name for name, value in row.document.items() if value is not None}
        problems, task = self._task(row)
        hint = self._other_format(columns) if problems else ""
        if hint:
            # What a task lacks does not matter where the row has columns that no task has.
            foreign = self._format is None and columns - Task.model_fields.keys()
            problems = [f"is not a task; {hint}"] if foreign else [f"{problems[0]}; {hint}"]
        return problems, task

    def _other_format(self, columns: Iterable[str]) -> str:
        if self._layouts is None:
            self._layouts = layouts()
        return other_format(columns, self._name, self._layouts)

    def _task(self, row: FileRow) -> tuple[list[str], Task | None]:
        document, row.document = row.document, None
        if self._format is not None:
            location = lone_surrogate(document)
            if location is not None:
                return [f"{location[0]!s}: {HALF_CHARACTER}" if self._quote else HALF_CHARACTER], None
            try:
                document = self._format.read(document, row.number)
            except RowRefused as error:
                return [error.quoting if self._quote else str(error)], None
            except Exception as error:
                # Formats of other packages may fail in their own ways. A row must not fail the whole request.
                return [f"the format cannot read it ({type(error).__name__})"], None
            document.setdefault("id", task_id(row.number))
        if self._selection is not None and self._selection.repeated(document):
            return [], None
        try:
            task = Task.model_validate(document)
        except ValidationError as error:
            if error.error_count() > MAX_FAULTS:
                return [f"has {error.error_count()} faults, such as unknown fields"], None
            if self._skips and self._skipped.full:
                # Nobody reads a further description, and making it takes longer than checking the row.
                return ["is not a task"], None
            return describe(error, model=Task, quote=self._quote, whole="task"), None
        if task.id in self._seen:
            shown = repr(task.id) if self._quote else "it"
            return [f"id: {shown} stands already on {row.unit} {self._seen[task.id]}"], None
        problem = None if self._selection is None else self._selection.problem(task.id)
        if problem is not None:
            return [problem], None
        self._seen[task.id] = row.number
        return [], task


def parse_lines(
    lines: Iterable[str],
    source: TaskSource | None = None,
    *,
    specs: Mapping[str, Any] | None = None,
    skipped: SkippedRows | None = None,
) -> list[Task]:
    """Return the tasks of a JSON-lines text, in the order of their rollouts. Blank lines are skipped.

    Args:
        lines: the text's lines.
        source: the part of a job's spec with the format and the options. Lines after the last task that a
            limit leaves are not read.
        specs: the content of the file `specs` of the source.
        skipped: takes the rows that are left out, where the source says `onBadRow: skip`.

    Raises:
        TaskListError: a line is malformed (up to 20 faults are listed), or there is no task.
    """
    selection: TaskSelection[Task] = TaskSelection(source)
    reader = TaskLines(source=source, selection=selection, specs=specs, skipped=skipped)
    for row in line_rows(lines):
        task = reader.add(row)
        if task is not None:
            selection.add(task.id, task)
        if selection.full:
            break
    reader.end()
    return select(selection)


def parse_specs(text: str | bytes) -> Mapping[str, Any]:
    """Return the content of a file `specs`.

    Raises:
        TaskListError: the file is too long, or is not a JSON object.
    """
    if len(text) > MAX_SPECS_BYTES:
        raise TaskListError([f"specs: longer than {MAX_SPECS_BYTES} bytes"])
    try:
        specs = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskListError(["specs: is not JSON"]) from error
    if not isinstance(specs, dict):
        raise TaskListError(["specs: must be a JSON object"])
    return specs


def select(selection: TaskSelection[Task]) -> list[Task]:
    """Return the selected tasks, each under its id in its epoch.

    Raises:
        TaskListError: there are more than a job may have.
    """
    if len(selection) > MAX_TASKS:
        raise TaskListError([f"its epochs make more than {MAX_TASKS} tasks"])
    return [
        task if epoch == 1 else task.model_copy(update={"id": name})
        for epoch, name, task in selection.chosen()
    ]
