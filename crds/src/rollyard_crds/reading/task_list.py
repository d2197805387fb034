"""Reading task lists: JSON lines into checked tasks, errors by line number and field."""

from __future__ import annotations

import json
from collections.abc import Iterable

from pydantic import ValidationError

from rollyard_crds.reading.manifest import describe
from rollyard_crds.task import Task

MAX_LINE_BYTES = 8 << 20
MAX_PROBLEMS = 20


class TaskListError(ValueError):
    """A task list that cannot be accepted; `problems` names line and field of each fault."""

    reason = "InvalidTasks"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class TaskLines:
    """Checks the lines of a task list as they come.

    Args:
        quote: whether faults may show what a line holds. Where they may not, they name the line, the
            fields that every task has, and nothing else.
    """

    def __init__(self, *, quote: bool = True) -> None:
        self._quote = quote
        self._seen: dict[str, int] = {}
        self._problems: list[str] = []
        self._number = 0

    def add(self, line: str) -> Task | None:
        """Return the task of the next line, or None for a blank line and for one that is refused.

        Raises:
            TaskListError: as many lines are refused as are listed.
        """
        self._number += 1
        if not line.strip():
            return None
        problems, task = self._read(line)
        self._problems += [f"line {self._number}: {problem}" for problem in problems]
        if len(self._problems) >= MAX_PROBLEMS:
            raise TaskListError(self._problems[:MAX_PROBLEMS])
        return task

    def refuse(self, problem: str) -> TaskListError:
        """Return the error to raise where no line after the next can be read. Earlier faults come first."""
        self._problems.append(f"line {self._number + 1}: {problem}")
        return TaskListError(self._problems[:MAX_PROBLEMS])

    def end(self) -> None:
        """Finish after the last line.

        Raises:
            TaskListError: a line was refused, or there was no task.
        """
        if self._problems:
            raise TaskListError(self._problems)
        if not self._seen:
            raise TaskListError(["the task list is empty: give at least one task"])

    def _read(self, line: str) -> tuple[list[str], Task | None]:
        if len(line) > MAX_LINE_BYTES:
            return [f"longer than {MAX_LINE_BYTES} bytes"], None
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            return [f"not valid JSON: {error}"], None
        if not isinstance(document, dict):
            what = f", not {type(document).__name__}" if self._quote else ""
            return [f"must be a JSON object{what}"], None
        try:
            task = Task.model_validate(document)
        except ValidationError as error:
            return describe(error, model=Task, quote=self._quote), None
        if task.id in self._seen:
            return [
                f"id: {repr(task.id) if self._quote else 'it'} stands already on line {self._seen[task.id]}"
            ], None
        self._seen[task.id] = self._number
        return [], task


def parse_lines(lines: Iterable[str]) -> list[Task]:
    """Return all tasks of a JSON-lines text. Blank lines are skipped.

    Raises:
        TaskListError: a line is malformed (up to 20 faults are listed), or there is no task.
    """
    reader = TaskLines()
    tasks = [task for line in lines if (task := reader.add(line)) is not None]
    reader.end()
    return tasks
