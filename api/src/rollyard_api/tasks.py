"""Reading task lists at submit time: from a URL, or pushed to a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
from pydantic import ValidationError
from rollyard_crds.manifest import describe
from rollyard_crds.task import Task
from rollyard_crds.tasklist import MAX_LINE_BYTES, MAX_PROBLEMS, TaskListError, parse_lines

from rollyard_api.codec import pack
from rollyard_api.problems import Invalid


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task, checked, as it goes into the database."""

    id: str
    packed: bytes


def row(task: Task) -> TaskRow:
    """A checked task in stored form: compact JSON, compressed when that pays."""
    return TaskRow(task.id, pack(task.model_dump_json(exclude_none=True, exclude_defaults=True).encode()))


def _lines(url: str) -> Iterator[str]:
    with fsspec.open(url, "rt", compression="infer", encoding="utf-8") as file:
        while line := file.readline(MAX_LINE_BYTES + 2):
            yield line


def read_url(url: str) -> list[TaskRow]:
    """Every task of a JSON-lines file behind a URL, `.gz` too. Blocking: call it in a thread.

    Raises:
        Invalid: the file cannot be read, or a line is refused; the whole list is refused then.
    """
    try:
        return [row(task) for task in parse_lines(_lines(url))]
    except TaskListError as error:
        problems = [f"spec.tasks.url: {url}: {problem}" for problem in error.problems]
        raise Invalid(problems[0], reason=error.reason, errors=problems) from error
    except (OSError, ValueError, ImportError, EOFError) as error:
        text = f"spec.tasks.url: {url} cannot be read: {error}"
        raise Invalid(text, reason="InvalidTasks", errors=[text]) from error


def read_lines(text: str) -> list[TaskRow]:
    """Every task of a pushed NDJSON body.

    Raises:
        Invalid: a line is refused; nothing is taken then.
    """
    try:
        return [row(task) for task in parse_lines(text.splitlines())]
    except TaskListError as error:
        raise Invalid(error.problems[0], reason=error.reason, errors=error.problems) from error


def read_list(documents: Any) -> list[TaskRow]:
    """Every task of a pushed `{"tasks": [...]}`.

    Raises:
        Invalid: not a list, empty, or a task is refused; nothing is taken then.
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
        rows.append(row(task))
    if problems:
        raise Invalid(problems[0], reason="InvalidTasks", errors=problems[:MAX_PROBLEMS])
    return rows
