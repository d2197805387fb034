"""The tasks of a file, which the control plane and the command line read in the same way.

One row is in memory at a time. The tasks are kept in a temporary file, in the form in which they are stored.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, overload

from pydantic_core import to_json
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.rolloutjob import TaskSource
from rollyard_crds.task import Task

from rollyard_tasks.file_rows import FileRow, FileRows
from rollyard_tasks.row_texts import FileRefused
from rollyard_tasks.task_list import MAX_TASKS, TaskLines, TaskListError
from rollyard_tasks.task_selection import TaskSelection

TaskT = TypeVar("TaskT")
MAX_FILE_BYTES: Final = 256 << 20
"""The default largest size of a task file after decompression, in bytes."""
MAX_TASK_BYTES: Final = 64 << 20
"""The largest size of a task as JSON, in bytes."""
MAX_METADATA_BYTES: Final = 8 << 20
"""The largest size of a task's metadata as JSON, in bytes. Each of its trajectories holds it."""
_IN_MEMORY: Final = 16 << 20
"""The number of bytes up to which the kept tasks of a file are in memory."""


def task_json(task: Task) -> bytes:
    """Return a task as compact JSON.

    Raises:
        TaskListError: The task is too large.
    """
    data: bytes = task.__pydantic_serializer__.to_json(task, exclude_none=True, exclude_defaults=True)
    if len(data) > MAX_TASK_BYTES:
        raise TaskListError([f"the task has {len(data)} bytes as JSON, and may have {MAX_TASK_BYTES}"])
    if len(data) > MAX_METADATA_BYTES and len(to_json(task.metadata)) > MAX_METADATA_BYTES:
        raise TaskListError([f"metadata: has more than {MAX_METADATA_BYTES} bytes as JSON"])
    return data


class _Span(NamedTuple):
    """Where a task is in the temporary file, in bytes."""

    begin: int
    size: int


class _Spool:
    """A temporary file, which is in memory as long as it is small."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 (closed by the finalizer)
        weakref.finalize(self, self._file.close)

    def add(self, data: bytes) -> _Span:
        span = _Span(self._file.seek(0, os.SEEK_END), len(data))
        self._file.write(data)
        return span

    def read(self, span: _Span) -> bytes:
        self._file.seek(span.begin)
        return self._file.read(span.size)


class KeptTasks(Sequence[TaskT]):
    """The selected tasks of a file, in the order of their rollouts. Each access reads a task again.

    Args:
        spool: The file with the tasks.
        chosen: The id of each task in its epoch, and its place.
        made: Returns a task, from its id and the form in which it is stored.
    """

    def __init__(
        self, spool: _Spool, chosen: list[tuple[str, _Span]], make: Callable[[str, bytes], TaskT]
    ) -> None:
        self._spool = spool
        self._chosen = chosen
        self._make = make

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> TaskT: ...
    @overload
    def __getitem__(self, index: slice) -> KeptTasks[TaskT]: ...
    def __getitem__(self, index: int | slice) -> TaskT | KeptTasks[TaskT]:
        """Return a task, or some of the tasks."""
        if isinstance(index, slice):
            return KeptTasks(self._spool, self._chosen[index], self._make)
        name, span = self._chosen[index]
        return self._make(name, self._spool.read(span))


class TaskFile:
    """The tasks of a file whose bytes come in pieces.

    Args:
        source: The part of the job's spec with the format and the options.
        pack: Returns the form in which the JSON of a task is stored.
        unpack: Returns the JSON of a task in this form.
        quote: Whether faults may show what a row holds; see `TaskLines`.
        max_bytes: The largest size of the file after decompression, in bytes.
        specs: The content of the file `specs` of the source.
        skipped: Takes the rows that are left out, where the source says `onBadRow: skip`.
        unit: What the numbers of rows count; the default is what the file has.

    Raises:
        TaskListError: The format is not installed, or refuses its specs.
    """

    def __init__(
        self,
        source: TaskSource | None,
        pack: Callable[[bytes], bytes],
        unpack: Callable[[bytes], bytes],
        *,
        quote: bool = True,
        max_bytes: int = MAX_FILE_BYTES,
        specs: Mapping[str, Any] | None = None,
        skipped: SkippedRows | None = None,
        unit: str = "",
    ) -> None:
        self._pack = pack
        self._unpack = unpack
        self._rows = FileRows(max_bytes, unit)
        self._selection: TaskSelection[_Span] = TaskSelection(source)
        self._skipped = SkippedRows() if skipped is None else skipped
        self._checked = TaskLines(
            quote=quote, source=source, selection=self._selection, specs=specs, skipped=self._skipped
        )
        self._count = 0
        self._spool = _Spool()

    @property
    def full(self) -> bool:
        """Whether the rest of the file need not be read."""
        return self._selection.full

    def feed(self, data: bytes) -> Iterator[None]:
        """Check a part of the file, step by step: each row is a step, and so is a part without a row.

        Raises:
            TaskListError: The file is refused, or as many rows as are listed.
        """
        return self._steps(self._rows.feed(data))

    def end(self) -> Iterator[None]:
        """Check what the end of the file completes, step by step.

        Raises:
            TaskListError: As for `feed`; or a row was refused, or there is no task.
        """
        yield from self._steps(self._rows.end())

    def add(self, row: FileRow) -> None:
        """Check a row that is read in another way, and keep its task.

        Raises:
            TaskListError: As many rows are refused as are listed.
        """
        task = self._checked.add(row)
        if task is not None:
            self._keep(row, task)
        if self._count + self._skipped.count > MAX_TASKS:
            raise TaskListError([f"holds more than {MAX_TASKS} rows"])

    def _keep(self, row: FileRow, task: Task) -> None:
        try:
            data = task_json(task)
        except TaskListError as error:
            self._checked.refuse(row, error.problems, task)
            return
        name = task.id
        del task  # It may be large, and what follows needs memory as well.
        self._selection.add(name, self._spool.add(self._pack(data)))
        self._count += 1

    def tasks(self, make: Callable[[str, bytes], TaskT], deadline: float = math.inf) -> KeptTasks[TaskT]:
        """Return the selected tasks in their order, once everything has been checked.

        Args:
            make: Returns a task, from its id in its epoch and the form in which it is stored.
            deadline: The time on the clock `time.monotonic` until which tasks get the ids of their epochs.

        Raises:
            TaskListError: A row was refused, there is no task, or the epochs make too many.
            TimeoutError: The deadline has passed.
        """
        self._checked.end()
        if len(self._selection) > MAX_TASKS:
            raise TaskListError([f"its epochs make more than {MAX_TASKS} tasks"])
        chosen = []
        for epoch, name, span in self._selection.chosen():
            if epoch > 1:
                data = _renamed(self._unpack(self._spool.read(span)), name)
                span = self._spool.add(self._pack(data))
            chosen.append((name, span))
            if time.monotonic() > deadline:
                raise TimeoutError
        return KeptTasks(self._spool, chosen, make)

    def _steps(self, rows: Iterator[FileRow | None]) -> Iterator[None]:
        try:
            for row in rows:
                if row is not None:
                    self.add(row)
                yield
                if self.full:
                    return
                del row  # This row may be large, and the next one as well.
        except FileRefused as error:
            raise TaskListError([str(error)]) from error


def _renamed(data: bytes, name: str) -> bytes:
    """Return the JSON of a task with another id, which is its first field and never has an escape."""
    begin = b'{"id":"'
    return begin + name.encode() + data[data.index(b'"', len(begin)) :]
