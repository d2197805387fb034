"""Task lists in a manifest or a request, checked and brought into the form in which they are stored."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from rollyard_crds.reading.manifest import describe
from rollyard_crds.rolloutjob import TaskSource
from rollyard_crds.task import Task
from rollyard_tasks.row_texts import FileRefused
from rollyard_tasks.task_file import task_json
from rollyard_tasks.task_list import MAX_PROBLEMS, TaskListError, parse_lines, select
from rollyard_tasks.task_selection import TaskSelection

from rollyard_api.core.codec import pack
from rollyard_api.core.problems import Invalid


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A checked task in the form in which it is stored in the database."""

    id: str
    packed: bytes


@contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Answer a refusal of a task list or its file within the block; `prefix` precedes each problem.

    Raises:
        Invalid: The task list or its file is refused.
    """
    try:
        yield
    except (TaskListError, FileRefused) as error:
        problems = error.problems if isinstance(error, TaskListError) else [str(error)]
        raise Invalid.of(*(prefix + problem for problem in problems), reason=error.reason) from error


def row(task: Task) -> TaskRow:
    """Return a checked task in its stored form: compact JSON, compressed if that saves space.

    Raises:
        TaskListError: The task is too large.
    """
    return TaskRow(task.id, pack(task_json(task)))


def rows(tasks: Sequence[Task], field: str, source: TaskSource | None = None) -> list[TaskRow]:
    """Return the rows of the tasks of a field, or of those that the options of a job select, in their order.

    Raises:
        Invalid: Two tasks have the same id, one is too large or its id cannot be used in several epochs, or
            the epochs make too many tasks.
    """
    selection: TaskSelection[Task] = TaskSelection(source)
    places: dict[str, int] = {}
    problems: list[str] = []
    for index, task in enumerate(tasks):
        problem = selection.problem(task.id)
        if task.id in places:
            problem = f"id: {task.id!r} stands already at {field}[{places[task.id]}]"
        if problem is not None:
            problems.append(f"{field}[{index}].{problem}")
        places[task.id] = index
        if source is None or not selection.repeated(task.model_dump(mode="json")):
            selection.add(task.id, task)
    if problems:
        raise Invalid.of(*problems[:MAX_PROBLEMS], reason=TaskListError.reason)
    with refusing():
        selected = select(selection)
    stored = []
    for task in selected:
        with refusing(f"{field}: {task.id!r}: "):
            stored.append(row(task))
    return stored


def read_lines(text: str) -> list[TaskRow]:
    """Return every task of a pushed NDJSON body.

    Raises:
        Invalid: A line is refused. None of the tasks is accepted in this case.
    """
    with refusing():
        return [row(task) for task in parse_lines(io.StringIO(text, newline=None))]


def read_list(documents: Any) -> list[TaskRow]:
    """Return every task of a pushed `{"tasks": [...]}`.

    Raises:
        Invalid: This is not a list, the list is empty, or a task is refused. No task is accepted in this
            case.
    """
    if not isinstance(documents, list) or not documents:
        raise Invalid.of("tasks: must be a list of at least one task", reason=TaskListError.reason)
    tasks: list[Task] = []
    problems: list[str] = []
    for index, document in enumerate(documents):
        try:
            tasks.append(Task.model_validate(document))
        except ValidationError as error:
            problems += describe(error, f"tasks[{index}]", Task)
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise Invalid.of(*problems[:MAX_PROBLEMS], reason=TaskListError.reason)
    return rows(tasks, "tasks")
