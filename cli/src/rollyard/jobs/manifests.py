"""Manifests and task lists on this machine, which are read and checked, with their paths made absolute."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, cast
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError
from pydantic_core import from_json
from rollyard_crds import Manifest, ManifestError, RolloutJob, Task, load
from rollyard_crds.fields import signals
from rollyard_crds.fields.harbor import IGNORED_KEYS, UNKNOWN_KEYS
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.reading.manifest import describe
from rollyard_crds.reading.plugin import noun
from rollyard_crds.rolloutjob import MAX_AGENT_FILE, TaskSource
from rollyard_tasks.file_rows import FileRow, header, is_text
from rollyard_tasks.formats.harbor import NO_TASK_FOLDER, folder_rows, pack_folders
from rollyard_tasks.formats.parquet_rows import MAGIC, PIECE_BYTES, converted
from rollyard_tasks.formats.registry import DEFAULT
from rollyard_tasks.harbor.plan import harbor_plan, resource_problems
from rollyard_tasks.row_texts import FileRefused
from rollyard_tasks.task_file import MAX_FILE_BYTES, TaskFile
from rollyard_tasks.task_list import MAX_SPECS_BYTES, TaskLines, TaskListError, parse_specs

from rollyard.errors import InvalidInput, LookupFailed

if TYPE_CHECKING:
    from rollyard_pipeline.registry import Registry

MAX_MANIFEST_BYTES: Final = 16 << 20
MAX_PROBLEMS: Final = 20
SHOWN_TASKS: Final = 2
"""The largest number of mapped tasks that `rollyard validate` shows."""
SHOWN_CHARACTERS: Final = 600
_FILE: Final = "file:"
NEEDS_PLUGIN: Final = "what a file of yours offers needs --plugin FILE"
_RECOGNISED_BYTES: Final = 64 << 10
"""The size of the part of a file by which manifests are distinguished from tasks."""
_YAML: Final = re.compile(rb"""#|---|%YAML|["']?[A-Za-z]+["']?[ \t]*:""")
"""The beginning of a text that is meant to be a manifest, although it has no apiVersion."""
_API_VERSION: Final = re.compile(rb"""(?:^|[{,])[ \t]*["']?apiVersion["']?[ \t]*:""", re.MULTILINE)


_TASK_LIST: Final = re.compile(r"\.(jsonl|csv|parquet)(\.\w+)?$")
_FIELD: Final = re.compile(rb"^\s*[\"{]*\w+[\"]*: ", re.MULTILINE)
"""A field in YAML, or in JSON on lines of its own."""
"""The end of the names of task lists, compressed or not."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings of a check: lines about valid objects, and lines about problems."""

    good: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


TasksCheck = Callable[[RolloutJob | str, Sequence[Task]], CheckReport]


STANDARD_INPUT: Final = Path("-")


def read_manifests(path: Path) -> list[Manifest]:
    """Return every manifest of a file. Task paths, which are relative to the file, are made absolute.

    The path `-` stands for standard input, whose task paths are relative to the working directory.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: A document is refused. The message names the field and the fault.
    """
    name = "standard input" if path == STANDARD_INPUT else str(path)
    try:
        with nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidInput(f"{name}: larger than {MAX_MANIFEST_BYTES >> 20} MiB; is it a manifest?")
        if _is_task_list(path, data):
            raise InvalidInput(
                f"{name}: a list of tasks, and not a manifest; give a manifest whose spec.tasks.url names it"
            )
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise LookupFailed(f"{name}: {error.strerror}") from error
    try:
        manifests = load(text)
    except ManifestError as error:
        raise InvalidInput(f"{name}: {error}") from error
    return [_absolute(manifest, path.parent.resolve()) for manifest in manifests]


def _is_task_list(path: Path, data: bytes) -> bool:
    """Return whether a file that is given as a manifest has the name or the first row of a task list.

    A manifest may have any name, so the name decides only where nothing looks like one.
    """
    if _TASK_LIST.search(path.name) and not _FIELD.search(data):
        return True
    line, _, _ = data.lstrip().partition(b"\n")
    with suppress(ValueError):
        row = from_json(line)
        return isinstance(row, dict) and not row.keys() & {"apiVersion", "kind", "metadata", "spec"}
    return False


def _absolute(manifest: Manifest, folder: Path) -> Manifest:
    """Return the manifest with its task path as a URL, and the texts of files that it names.

    A path is relative to the manifest.
    """
    if isinstance(manifest, RolloutJob):
        tasks = manifest.spec.tasks
        if tasks.url is not None and "://" not in tasks.url:
            tasks.url = (folder / tasks.url).resolve().as_uri()
        if tasks.specs is not None and "://" not in tasks.specs and not tasks.specs.startswith("blob:"):
            tasks.specs = (folder / tasks.specs).resolve().as_uri()
        if manifest.spec.agent.files is not None:
            texts = manifest.spec.agent.files.items()
            manifest.spec.agent.files = {name: _text(name, text, folder) for name, text in texts}
    return manifest


def _text(name: str, text: str, folder: Path) -> str:
    """Return a text of `agent.files`, or that of the file beside the manifest which `file:PATH` names.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: It is too large, or no UTF-8 text.
    """
    if not text.startswith(_FILE):
        return text
    path = folder / text.removeprefix(_FILE).strip()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            content = file.read(MAX_AGENT_FILE + 1)
    except OSError as error:
        raise LookupFailed(f"spec.agent.files.{name}: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"spec.agent.files.{name}: {path}: not UTF-8 text ({error})") from error
    if len(content) > MAX_AGENT_FILE:
        raise InvalidInput(f"spec.agent.files.{name}: {path}: more than {MAX_AGENT_FILE} characters")
    return content


def local_path(url: str) -> Path | None:
    """Return the path of a `file:` URL, or None for any other URL."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def read_tasks(
    path: Path, source: TaskSource | None = None, skipped: SkippedRows | None = None
) -> Sequence[Task]:
    """Return the tasks of a file, as the control plane reads it. Each access reads a task again.

    For the format `harbor`, they may be in a folder of task folders.

    Args:
        path: The file.
        source: The part of a job's spec with the format and the options.
        skipped: Takes the rows that are left out, where the source says `onBadRow: skip`.

    Raises:
        LookupFailed: There is no such file.
        TaskListError: A row is malformed. The message names its number and field.
    """
    pack = partial(zlib.compress, level=1)
    tasks = partial(TaskFile, source, pack, zlib.decompress, specs=_specs(source), skipped=skipped)
    try:
        if path.is_dir():
            return _read(tasks(), folder_rows_of(path))
        _check_regular(path)
        with path.open("rb") as binary:
            if binary.read(len(MAGIC)) != MAGIC:
                binary.seek(0)
                return _read(tasks(), iter(partial(binary.read, PIECE_BYTES), b""))
            if os.fstat(binary.fileno()).st_size > MAX_FILE_BYTES:
                raise FileRefused(f"holds more than {MAX_FILE_BYTES} bytes")
            os.lseek(binary.fileno(), 0, os.SEEK_SET)
            with closing(converted(binary)) as pieces:
                return _read(tasks(unit="row"), pieces)
    except FileRefused as error:
        raise TaskListError([str(error)]) from error
    except OSError as error:
        raise LookupFailed(f"{path}: {error.strerror or error}") from error


def _read(tasks: TaskFile, parts: Iterable[bytes | FileRow]) -> Sequence[Task]:
    for part in parts:
        if isinstance(part, FileRow):
            tasks.add(part)
        else:
            for _ in tasks.feed(part):
                pass
        if tasks.full:
            break
    else:
        for _ in tasks.end():
            pass
    return tasks.tasks(lambda _name, data: Task.model_validate_json(zlib.decompress(data)))


def _specs(source: TaskSource | None) -> Mapping[str, Any] | None:
    path = local_path(source.specs) if source is not None and source.specs is not None else None
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            return parse_specs(file.read(MAX_SPECS_BYTES + 1))
    except OSError as error:
        raise LookupFailed(f"spec.tasks.specs: {path}: {error.strerror or error}") from error


def folder_rows_of(path: Path) -> Iterator[FileRow]:
    """Yield a row for each task folder below `path`, for the format `harbor`.

    A folder that cannot be read gives a row as well, which the format refuses.

    Raises:
        TaskListError: There is no task folder, or a folder above them cannot be read.
    """
    number = 0
    try:
        for number, row in enumerate(folder_rows(path), 1):
            yield FileRow(number, row, unit="folder")
    except FileRefused as error:
        raise TaskListError([str(error)]) from error
    if not number:
        raise TaskListError([NO_TASK_FOLDER])


def folder_warnings(path: Path, source: TaskSource) -> list[str]:
    """Return which keys of the task folders below a folder have no effect. One folder is held at a time."""
    reader = TaskLines(source=source)
    noted: list[Task] = []
    try:
        for row in folder_rows_of(path):
            task = reader.add(row)
            if task is None:
                continue
            keys = {key: task.metadata[key] for key in (UNKNOWN_KEYS, IGNORED_KEYS) if key in task.metadata}
            if keys:
                noted.append(Task(id=task.id, prompt="-", metadata=keys))
    except TaskListError:
        # The control plane will say why it refuses them.
        return []
    return signals.task_warnings(noted)


@contextmanager
def packed(path: Path) -> Iterator[Path]:
    """Provide a compressed file with the rows of the task folders below `path`, which is removed afterwards.

    Folders with the same files give the same file.

    Raises:
        TaskListError: There is no task folder, or a folder above them cannot be read.
    """
    with tempfile.NamedTemporaryFile(suffix=".jsonl.gz") as archive:
        try:
            pack_folders(path, archive)
        except FileRefused as error:
            raise TaskListError([str(error)]) from error
        archive.flush()
        yield Path(archive.name)


def text_file(path: Path, encoding: str = "utf-8") -> AbstractContextManager[TextIO]:
    """Open a text file for reading. It is decompressed if its name ends in `.gz`."""
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding=encoding))
    return path.open(encoding=encoding)


def extensions_with(plugins: Sequence[Path]) -> Registry:
    """Return what finds the extensions that are installed here, and those of these plugins.

    Raises:
        InvalidInput: A plugin cannot be used.
    """
    from rollyard_pipeline.errors import PermanentFailure
    from rollyard_pipeline.registry import plugin_registry

    try:
        return plugin_registry(plugins)
    except PermanentFailure as error:
        raise InvalidInput(str(error)) from error


def extension_problems(job: RolloutJob, extensions: Registry) -> list[str]:
    """Return a problem for each handler, agent, tool and parser that is not installed here."""
    problems = []
    for field, group, name in job.spec.extensions():
        installed = extensions.names(f"rollyard.{group}")
        if name not in installed:
            kind = noun(group).replace(" ", "-")
            names = ", ".join(installed) or "none"
            of_file = "" if extensions.has_plugins else f"; {NEEDS_PLUGIN}"
            problems.append(f"{field}: no {kind} {name!r} is installed; installed: {names}{of_file}")
    return problems


def _loaded(extensions: Registry, group: str, name: str) -> Any:
    """Return an extension.

    Raises:
        InvalidInput: Its module cannot be imported. The message says where.
    """
    try:
        return extensions.load(f"rollyard.{group}", name)
    except Exception as error:  # Whatever a package or a plugin raises.
        kind = noun(group)
        raise InvalidInput(f"the {kind} {name!r} cannot be loaded: {_raised(error)}") from error


def _raised(error: Exception) -> str:
    """Return what the code of an extension raised, and at which line."""
    cause = error.__cause__ or error
    *_, place = traceback.extract_tb(cause.__traceback__)
    return f"{type(cause).__name__}: {cause} ({Path(place.filename).name}, line {place.lineno})"


def handler_problems(
    handler: str, tasks: Sequence[Task], extensions: Registry, job: RolloutJob | None = None
) -> list[str]:
    """Return the problems that the handler itself finds in the tasks, each with the id of its task.

    With `job`, these include hosts that tests need in Eval and that the job does not give them.
    """
    names = extensions.names("rollyard.handlers")
    if handler not in names:
        of_file = "" if extensions.has_plugins else f"; {NEEDS_PLUGIN}"
        return [f"no handler {handler!r} is installed; installed: {', '.join(names)}{of_file}"]
    loaded = _loaded(extensions, "handlers", handler)
    instance = loaded() if isinstance(loaded, type) else loaded
    check = getattr(instance, "check", None)
    if check is None:
        return []

    def problems_of(task: Task) -> list[str]:
        try:
            named = [f"task {task.id!r}: {problem}" for problem in check(task)]
        except Exception as error:  # Whatever a package or a plugin raises.
            return [f"task {task.id!r}: the handler's check raised {_raised(error)}"]
        return named if named or job is None else _eval_problems(job, instance, task)

    return _of_each(tasks, problems_of)


def _of_each(tasks: Iterable[Task], check: Callable[[Task], list[str]]) -> list[str]:
    """Return the problems that a check finds in tasks, until there are as many as are shown."""
    problems: list[str] = []
    for task in tasks:
        problems += check(task)
        if len(problems) >= MAX_PROBLEMS:
            return [*problems[:MAX_PROBLEMS], "… (more)"]
    return problems


def _eval_problems(job: RolloutJob, handler: Any, task: Task) -> list[str]:
    from rollyard_pipeline.errors import TaskInvalid
    from rollyard_pipeline.stages.contexts import eval_network

    try:
        eval_network(job.spec, handler.for_task(task), task)
    except TaskInvalid as error:
        return [str(error)]
    return []


def host_problems(job: RolloutJob, tasks: Sequence[Task]) -> list[str]:
    """Return a problem for each task that names a host which the job does not."""

    def problems_of(task: Task) -> list[str]:
        try:
            job.spec.sandbox.narrowed(task.sandbox.allowed_hosts)
        except ValueError as error:
            return [f"task {task.id!r}: {error}"]
        return []

    return _of_each(tasks, problems_of)


def size_problems(job: RolloutJob, tasks: Sequence[Task]) -> list[str]:
    """Return a problem for each valid task folder that asks for more than the job's sandboxes have."""
    if job.spec.handler not in ("harbor", "mixed"):
        return []

    def problems_of(task: Task) -> list[str]:
        if task.harbor is None:
            return []
        problems = resource_problems(harbor_plan(task.harbor), job.spec.sandbox.resources)
        return [f"task {task.id!r}: {problem}" for problem in problems]

    return _of_each(tasks, problems_of)


def reward_problems(job: RolloutJob, extensions: Registry) -> list[str]:
    """Return the problems with the names of a job's reward components.

    Its handler and its reward function must be installed here.
    """
    reward = job.spec.reward
    if reward is None:
        return []
    from rollyard_pipeline.rewards.components import component_problems

    handler = _loaded(extensions, "handlers", job.spec.handler)
    of_function: tuple[str, ...] = ()
    if reward.function is not None:
        function = _loaded(extensions, "reward_functions", reward.function.name)
        of_function = getattr(function, "components", ())
    return component_problems(reward, getattr(handler, "components", ()), of_function)


def check_job(job: RolloutJob, extensions: Registry, further: TasksCheck | None = None) -> CheckReport:
    """Check one job and its tasks, as far as that is possible on this machine."""
    where = f"RolloutJob {job.metadata.name!r}"
    problems = [f"{where}: {problem}" for problem in extension_problems(job, extensions)]
    if not problems:
        problems += [f"{where}: {problem}" for problem in reward_problems(job, extensions)]
    source = job.spec.tasks
    path = local_path(source.url) if source.url is not None else None
    tasks: Sequence[Task] = ()
    skipped = SkippedRows()
    if source.inline is not None:
        tasks = source.inline
    elif path is not None:
        try:
            tasks = read_tasks(path, source, skipped)
        except TaskListError as error:
            return CheckReport(problems=(*problems, *(f"{path}: {problem}" for problem in error.problems)))
        except LookupFailed as error:
            return CheckReport(problems=(*problems, f"{where}: spec.tasks.url: {error}"))
    if tasks and not problems:
        problems += [f"{where}: {problem}" for problem in host_problems(job, tasks)]
        of_handler = handler_problems(job.spec.handler, tasks, extensions, job)
        problems += [f"{where}: {problem}" for problem in of_handler]
    if tasks and not problems:
        problems += [f"{where}: {problem}" for problem in size_problems(job, tasks)]
    problems += [f"{where}: {problem}" for problem in signals.problems(job.spec, _groups(source, tasks))]
    if problems:
        return CheckReport(problems=tuple(problems))
    if source.config_map_ref is not None:
        counted = f"tasks in the ConfigMap {source.config_map_ref.name!r}"
    else:
        counted = f"{len(tasks)} tasks" if tasks else f"tasks at {source.url}" if source.url else "a stream"
    played = further(job, tasks) if further is not None else CheckReport()
    if played.problems:
        return CheckReport(problems=tuple(f"{where}: {problem}" for problem in played.problems))
    mapped = shown_tasks(tasks) if source.format not in (None, DEFAULT) else ()
    valid = f"{where} is valid ({counted}, {job.spec.samples_per_task} samples each)"
    warnings = tuple(f"warning: {line}" for line in signals.warnings_of(job.spec, tasks))
    return CheckReport(good=(valid, *skipped.lines(), *warnings, *mapped, *played.good))


def _groups(source: TaskSource, tasks: Sequence[Task]) -> int | None:
    """Return how many groups the tasks make, or None if the tasks were not read."""
    if not tasks or source.inline is None:
        return len(tasks) or None
    return min(len(tasks), source.limit or len(tasks)) * (source.epochs or 1)


def shown_tasks(tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return a line for each of the first tasks that a format has made from rows: its JSON, shortened."""
    lines = []
    for task in tasks[:SHOWN_TASKS]:
        text = task.model_dump_json(exclude_none=True, exclude_defaults=True)
        lines.append(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…")
    return tuple(lines)


def _check_regular(path: Path) -> None:
    """Check that a path is not a pipe or device, which would have to be read twice and may never end.

    Raises:
        LookupFailed: It is one.
    """
    if path.exists() and not path.is_file():
        raise LookupFailed(f"{path}: must be a file, and is a pipe or a device: write its content to a file")


def has_manifests(path: Path) -> bool:
    """Return whether a file has manifests, and not tasks.

    Raises:
        LookupFailed: There is no such file, or it is a pipe or a device.
    """
    _check_regular(path)
    try:
        with path.open("rb") as file:
            start = file.read(_RECOGNISED_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError as error:
        raise LookupFailed(f"{path}: {error.strerror}") from error
    if not start:
        return False
    line, _, _ = start.partition(b"\n")
    if line.startswith(b"{"):
        # The row of a task list may hold the word as well, but is then a whole object.
        with suppress(ValueError):
            return "apiVersion" in from_json(line)
        return _API_VERSION.search(start) is not None
    if line.startswith(b"[") or not is_text(start):
        return False
    return _API_VERSION.search(start) is not None or (_YAML.match(line) is not None and not header(line))


def check_file(
    path: Path,
    handler: str | None = None,
    task_format: str | None = None,
    further: TasksCheck | None = None,
    plugins: Sequence[Path] = (),
) -> CheckReport:
    """Check a manifest file or a task list, depending on the file's content.

    Args:
        path: The file, or a folder of task folders.
        handler: The name of the handler that checks the tasks of a task list.
        task_format: The format of a task list; the default is `rollyard`, and `harbor` for a folder.
        further: A check of valid tasks, which gets their job, or the name of the handler.
        plugins: Files with further handlers, tools and the like.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: A plugin cannot be used, or what it offers cannot be loaded.
    """
    from rollyard_pipeline.errors import PermanentFailure

    try:
        return _checked(path, handler, task_format, further, extensions_with(plugins))
    except PermanentFailure as error:
        raise InvalidInput(str(error)) from error


def _checked(
    path: Path,
    handler: str | None,
    task_format: str | None,
    further: TasksCheck | None,
    extensions: Registry,
) -> CheckReport:
    if path.is_dir():
        handler, task_format = handler or "harbor", task_format or "harbor"
    if path.is_dir() or not has_manifests(path):
        try:
            tasks = read_tasks(path, TaskSource(url=path.name, format=task_format))
        except ValidationError as error:
            return CheckReport(problems=tuple(describe(error)))
        except TaskListError as error:
            return CheckReport(problems=tuple(error.problems))
        problems = handler_problems(handler, tasks, extensions) if handler else []
        if problems:
            return CheckReport(problems=tuple(problems))
        played = further(handler or "", tasks) if further is not None else CheckReport()
        if played.problems:
            return played
        mapped = shown_tasks(tasks) if task_format not in (None, DEFAULT) else ()
        warnings = tuple(f"warning: {line}" for line in signals.task_warnings(tasks))
        return CheckReport(good=(f"{len(tasks)} tasks are valid", *warnings, *mapped, *played.good))
    try:
        manifests = read_manifests(path)
    except InvalidInput as error:
        return CheckReport(problems=(str(error).removeprefix(f"{path}: "),))
    good: tuple[str, ...] = ()
    problems_found: tuple[str, ...] = ()
    for manifest in manifests:
        if isinstance(manifest, RolloutJob):
            report = check_job(manifest, extensions, further)
            good, problems_found = good + report.good, problems_found + report.problems
        else:
            good += (f"BackendPool {manifest.metadata.name!r} is valid",)
    return CheckReport(good, problems_found)
