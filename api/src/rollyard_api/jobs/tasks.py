"""Task lists in a manifest or a request are checked, and brought into the form in which they are stored."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from rollyard_crds.reading.manifest import describe
from rollyard_crds.reading.task_file import task_json
from rollyard_crds.reading.task_list import MAX_PROBLEMS, TaskListError, parse_lines, select
from rollyard_crds.reading.task_selection import TaskSelection
from rollyard_crds.rolloutjob import TaskSource
from rollyard_crds.task import Task

from rollyard_api.core.codec import pack
from rollyard_api.core.problems import Invalid


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A checked task in the form in which it is stored in the database."""

    id: str
    packed: bytes


def row(task: Task) -> TaskRow:
    """Return a checked task in its stored form: compact JSON, compressed if that saves space.

    Raises:
        TaskListError: The task is too large.
    """
    return TaskRow(task.id, pack(task_json(task)))


def selected(tasks: Sequence[Task], source: TaskSource) -> list[TaskRow]:
    """Return the rows of inline tasks that the options of the job select, in their order.

    Raises:
        Invalid: An id cannot be used in several epochs, or the epochs make too many tasks.
    """
    selection: TaskSelection[Task] = TaskSelection(source)
    try:
        for place, task in enumerate(tasks):
            problem = selection.problem(task.id)
            if problem is not None:
                raise TaskListError([f"spec.tasks.inline[{place}].{problem}"])
            if not selection.repeated(task.model_dump(mode="json")):
                selection.add(task.id, task)
        return [row(task) for task in select(selection)]
    except TaskListError as error:
        raise Invalid.of(*error.problems, reason=error.reason) from error


def read_lines(text: str) -> list[TaskRow]:
    """Return every task of a pushed NDJSON body.

    Raises:
        Invalid: A line is refused. None of the tasks is accepted in this case.
    """
    try:
        return [row(task) for task in parse_lines(io.StringIO(text, newline=None))]
    except TaskListError as error:
        raise Invalid.of(*error.problems, reason=error.reason) from error


def read_list(documents: Any) -> list[TaskRow]:
    """Return every task of a pushed `{"tasks": [...]}`.

    Raises:
        Invalid: This is not a list, the list is empty, or a task is refused. No task is accepted in this
            case.
    """
    if not isinstance(documents, list) or not documents:
        raise Invalid(
            "tasks: must be a list of at least one task", reason="InvalidTasks", errors=["tasks: is empty"]
        )
    problems: list[str] = []
    rows: list[TaskRow] = []
    seen: dict[str, int] = {}
    for place, document in enumerate(documents):
        try:
            task = Task.model_validate(document)
        except ValidationError as error:
            problems += describe(error, f"tasks[{place}]", Task)
            continue
        if task.id in seen:
            problems.append(f"tasks[{place}].id: {task.id!r} stands already at tasks[{seen[task.id]}]")
        seen[task.id] = place
        try:
            rows.append(row(task))
        except TaskListError as error:
            problems += [f"tasks[{place}]: {problem}" for problem in error.problems]
    if problems:
        raise Invalid(problems[0], reason="InvalidTasks", errors=problems[:MAX_PROBLEMS])
    return rows
