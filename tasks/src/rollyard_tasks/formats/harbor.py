"""The format `harbor`: task folders with task.toml, instruction.md, tests and a solution.

A row is `path`, which names the task, and `task_binary`, the folder as a tar archive. `rollyard submit` and
`rollyard validate` make such rows from a folder of task folders. Data sets on Hugging Face have the same
rows. The row of a folder that cannot be packed says why, as `refused`, instead of the archive.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from pydantic import ValidationError
from rollyard_crds.fields.harbor import HarborFolder
from rollyard_crds.reading.manifest import describe

from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat
from rollyard_tasks.harbor.archive import pack, read_folder, unpack
from rollyard_tasks.harbor.plan import harbor_plan, solution_calls
from rollyard_tasks.harbor.table import HarborRefused
from rollyard_tasks.row_texts import FileRefused

MAX_TASK_FOLDERS: Final = 100_000
NO_TASK_FOLDER: Final = "there is no task folder: no folder below has a task.toml"


class HarborFormat(TaskFormat):
    """Reads task folders; the handler is `harbor`."""

    columns = (("path", "task_binary"),)

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row, with the reference solution for the agent `oracle`."""
        path = row.text("path")
        if refused := row.text("refused", ""):
            raise _refused(path, shown(refused))
        try:
            folder = HarborFolder.of(_contents(_archive(row)), self.harbor)
            plan = harbor_plan(folder)
        except (FileRefused, HarborRefused) as error:
            raise _refused(path, str(error)) from error
        except ValidationError as error:
            raise _refused(path, describe(error, model=HarborFolder)[0]) from error
        fields: dict[str, Any] = {
            "id": task_id(*path.strip("/").split("/")),
            "prompt": plan.steps[0].instruction,
            "harbor": folder.model_dump(mode="json", exclude_defaults=True),
            "sandbox": plan.sandbox().model_dump(mode="json", exclude_none=True, exclude_defaults=True),
            "metadata": dict(plan.metadata),
        }
        solution = solution_calls(plan, plan.steps[0])
        if solution:
            fields["solution"] = solution
        return fields


def _archive(row: Row) -> str:
    """Return the archive in base64: a text, or what a binary column of Parquet becomes."""
    binary = isinstance(row.values.get("task_binary"), dict)
    return row.row("task_binary").text("base64") if binary else row.text("task_binary")


def _contents(text: str) -> dict[str, tuple[bytes, bool]]:
    """Return the files of an archive. A top folder that holds all of them is left out of their paths."""
    contents = unpack(text)
    tops = {path.partition("/")[0] for path in contents}
    if len(tops) == 1 and "task.toml" not in contents:
        top = next(iter(tops))
        return {path[len(top) + 1 :]: content for path, content in contents.items() if path != top}
    return contents


def _refused(path: str, problem: str) -> RowRefused:
    words = "holds no task folder that can be run here"
    return RowRefused("task_binary", words, quoting=f"{shown(path)}: {problem}")


def shown(text: str) -> str:
    """Return the path of a task folder, or what is wrong with it, for a message."""
    return text if text.isprintable() and len(text) <= 800 else ascii(text[:800])


def folder_rows(top: Path) -> Iterator[dict[str, str]]:
    """Yield a row for each task folder below `top`, or the row of `top` if it is a task folder itself.

    Task folders are those with a `task.toml`, at any depth. Symbolic links are not followed. A task folder
    that cannot be read, or that holds a link or too much, yields a row that says so.

    Raises:
        FileRefused: There are too many folders, or one above them cannot be read.
    """
    for count, folder in enumerate(_task_folders(top)):
        if count >= MAX_TASK_FOLDERS:
            raise FileRefused(f"{top}: holds more than {MAX_TASK_FOLDERS} task folders")
        name = folder.name if folder == top else folder.relative_to(top).as_posix()
        try:
            row = {"path": name, "task_binary": pack(read_folder(folder))}
        except FileRefused as error:
            row = {"path": name, "refused": str(error)}
        yield row


def pack_folders(top: Path, file: IO[bytes]) -> None:
    """Write the rows of the task folders below `top` as a compressed task file.

    Folders with the same files give the same bytes.

    Raises:
        FileRefused: There is no task folder, there are too many, or one above them cannot be read.
    """
    empty = True
    with gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed:
        for row in folder_rows(top):
            packed.write(f"{json.dumps(row)}\n".encode())
            empty = False
    if empty:
        raise FileRefused(NO_TASK_FOLDER)


def _task_folders(folder: Path) -> Iterator[Path]:
    if (folder / "task.toml").is_file():
        yield folder
        return
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError as error:
        raise FileRefused(f"{folder}: {error.strerror}") from error
    for path in below:
        if not path.name.startswith("."):
            yield from _task_folders(path)
