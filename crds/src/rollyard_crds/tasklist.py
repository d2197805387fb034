"""Reading task lists: JSON lines into checked tasks, errors by line number and field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from rollyard_crds.manifest import describe
from rollyard_crds.task import Task

MAX_LINE_BYTES = 8 << 20
MAX_PROBLEMS = 20


class TaskListError(ValueError):
    """A task list that cannot be accepted; `problems` names line and field of each fault."""

    reason = "InvalidTasks"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _parse_line(number: int, line: str, seen: dict[str, int]) -> Task:
    if len(line) > MAX_LINE_BYTES:
        raise TaskListError([f"line {number}: longer than {MAX_LINE_BYTES} bytes"])
    try:
        document = json.loads(line)
    except ValueError as error:
        raise TaskListError([f"line {number}: not valid JSON: {error}"]) from error
    if not isinstance(document, dict):
        raise TaskListError([f"line {number}: must be a JSON object, not {type(document).__name__}"])
    try:
        task = Task.model_validate(document)
    except ValidationError as error:
        raise TaskListError(
            [f"line {number}: {problem}" for problem in describe(error, model=Task)]
        ) from error
    if task.id in seen:
        raise TaskListError([f"line {number}: id: {task.id!r} stands already on line {seen[task.id]}"])
    seen[task.id] = number
    return task


def parse_lines(lines: Iterable[str]) -> list[Task]:
    """All tasks of a JSON-lines text; blank lines are skipped.

    Raises:
        TaskListError: a line is malformed (up to 20 faults are listed), or there is no task.
    """
    problems: list[str] = []
    seen: dict[str, int] = {}
    tasks: list[Task] = []
    for number, line in _numbered(lines):
        try:
            tasks.append(_parse_line(number, line, seen))
        except TaskListError as error:
            problems.extend(error.problems)
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise TaskListError(problems[:MAX_PROBLEMS])
    if not tasks:
        raise TaskListError(["the task list is empty: give at least one task"])
    return tasks


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line
