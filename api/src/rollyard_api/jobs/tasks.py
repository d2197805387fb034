"""Task lists are checked at submit time, whether they come from a file or are pushed to a stream."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.reading.manifest import describe
from rollyard_crds.reading.task_file import KeptTasks, TaskFile, task_json
from rollyard_crds.reading.task_list import MAX_PROBLEMS, TaskListError, parse_lines, select
from rollyard_crds.reading.task_selection import TaskSelection
from rollyard_crds.rolloutjob import TaskSource
from rollyard_crds.task import Task

from rollyard_api.core.codec import pack, unpack
from rollyard_api.core.problems import Invalid
from rollyard_api.jobs.task_sources import FIELD, shown

STEP_SECONDS: Final = 0.1


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


class Collector:
    """A collector of the tasks of a file, which comes in pieces.

    Args:
        url: The URL as the job names it, for messages.
        quote: Whether messages may quote the content of the file.
        max_bytes: The largest size of the file after decompression, in bytes.
        deadline: The time on the clock `time.monotonic` at which reading stops.
        source: The part of the job's spec with the format and the options.
        specs: The content of the file `specs` of the source.
        skipped: Takes the rows that are left out, where the source says `onBadRow: skip`.
        unit: What the numbers of rows count in messages; the default is what the file has.

    Raises:
        Invalid: The format is not installed, or refuses its specs.
    """

    def __init__(
        self,
        url: str,
        *,
        quote: bool,
        max_bytes: int,
        deadline: float,
        source: TaskSource | None = None,
        specs: Mapping[str, Any] | None = None,
        skipped: SkippedRows | None = None,
        unit: str = "",
    ) -> None:
        self._url = shown(url)
        self._deadline = deadline
        try:
            self._file = TaskFile(
                source,
                pack,
                unpack,
                quote=quote,
                max_bytes=max_bytes,
                specs=specs,
                skipped=skipped,
                unit=unit,
            )
        except TaskListError as error:
            raise self.refused(error) from error
        self._waiting: Iterator[None] = iter(())

    def feed(self, data: bytes) -> None:
        """Take a part of the file, which `step` checks. The parts before it must have been checked."""
        self._waiting = self._file.feed(data)

    def finish(self) -> None:
        """Mark the end of the file; `step` checks what it completes."""
        self._waiting = self._file.end()

    def step(self) -> bool:
        """Check what was fed, for at most STEP_SECONDS, and return whether all of it has been checked.

        A small piece of a compressed file may expand to a large text. Callers of this method therefore share
        the threads in short steps.

        Raises:
            Invalid: A row is refused, or the file is too long or damaged.
            TimeoutError: The deadline has passed.
        """
        turn = time.monotonic() + STEP_SECONDS
        try:
            for _ in self._waiting:
                now = time.monotonic()
                if now > self._deadline:
                    raise TimeoutError
                if now > turn:
                    return False
        except TaskListError as error:
            raise self.refused(error) from error
        return True

    @property
    def full(self) -> bool:
        """Whether the rest of the file need not be read."""
        return self._file.full

    def rows(self) -> KeptTasks[TaskRow]:
        """Return the tasks in their order once everything has been checked.

        Raises:
            Invalid: A row was refused, or there is no task. The whole list is refused in this case.
            TimeoutError: The deadline has passed.
        """
        try:
            return self._file.tasks(TaskRow, self._deadline)
        except TaskListError as error:
            raise self.refused(error) from error

    def refused(self, error: TaskListError) -> Invalid:
        """Return the answer to a file that is refused."""
        problems = [f"{FIELD}: {self._url}: {problem}" for problem in error.problems]
        return Invalid.of(*problems, reason=error.reason)


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
