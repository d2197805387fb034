"""A job as it is submitted: its manifest, and the files of this machine that are uploaded for it first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias
from urllib.parse import unquote, urlsplit

from rollyard_client.call import encode
from rollyard_client.errors import Invalid
from rollyard_client.requests.jobs import placed

if TYPE_CHECKING:
    from rollyard_crds.rolloutjob import RolloutJob
    from rollyard_crds.task import Task

MAX_MANIFEST_BYTES: Final = 16 << 20
INLINE_TASKS: Final = 256
"""The most tasks of a list that become a part of the manifest."""
INLINE_BYTES: Final = 128 << 10
"""The most bytes that they have together, as JSON."""
_FILES: Final = ("url", "specs")
"""The fields of `spec.tasks` that name files."""
_NEED_A_FILE: Final = ("onBadRow", "specs")
"""The fields of `spec.tasks` that go with `url` alone."""

GivenJob: TypeAlias = "RolloutJob | Mapping[str, Any] | str | os.PathLike[str]"
GivenTasks: TypeAlias = "str | os.PathLike[str] | Iterable[Task | Mapping[str, Any]]"


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file that is uploaded."""

    path: Path
    shown: str
    """What messages call it."""


@dataclass(slots=True)
class PreparedJob:
    """A job that is about to be submitted. `with` removes the files that were made for it.

    Attributes:
        document: The manifest in JSON form. `spec.tasks` lacks the URLs of what is uploaded.
        files: The files to upload, by the field of `spec.tasks` that names them.
    """

    document: dict[str, Any]
    files: dict[str, LocalFile] = field(default_factory=dict)
    _urls: dict[str, str] = field(default_factory=dict)
    """What messages call each upload, by its URL."""
    _made: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files that were made."""
        if self._made is not None:
            self._made.cleanup()

    @property
    def namespace(self) -> str | None:
        """The namespace of the job, or None if its metadata is not an object, which the server refuses."""
        meta = self.document.get("metadata")
        return meta.get("namespace") if isinstance(meta, Mapping) else None

    @property
    def source(self) -> dict[str, Any]:
        """`spec.tasks`, which may be changed."""
        spec = self.document.get("spec")
        if not isinstance(spec, Mapping):
            raise Invalid(f"spec: must be an object (got {spec!r})")
        source = spec.get("tasks")
        if source is not None and not isinstance(source, Mapping):
            raise Invalid(f"spec.tasks: must be an object (got {source!r})")
        own = dict(source or {})
        self.document["spec"] = {**spec, "tasks": own}
        return own

    def uploaded(self, name: str, url: str) -> None:
        """Put the URL of an upload into the field of this name."""
        self.source[name] = url
        self._urls[url] = self.files[name].shown

    def explained(self, error: Invalid) -> Invalid:
        """Return a refusal in which uploads have the names of their files."""
        lines = [str(error), *error.errors]
        for url, shown in self._urls.items():
            lines = [line.replace(url, shown) for line in lines]
        return Invalid(lines[0], reason=error.reason, status=error.status, errors=lines[1:])

    def temporary(self, name: str) -> Path:
        """Return the path of a new file, which is removed in the end."""
        if self._made is None:
            self._made = TemporaryDirectory(prefix="rollyard-")
        return Path(self._made.name) / name

    def take(self, tasks: GivenTasks) -> None:
        """Take tasks that are given beside the manifest.

        Raises:
            Invalid: The manifest names other tasks, or the tasks are not of a kind that can be sent.
            OSError: A file or folder cannot be read.
        """
        source = self.source
        path = _path_of(tasks)
        named = [name for name in ("url", "inline", "configMapRef", "stream") if source.get(name)]
        if named == ["stream"]:
            raise Invalid("spec.tasks.stream: a stream takes its tasks by push_tasks: leave 'tasks' out")
        same = _local(source.get("url"))
        if named and (path is None or same is None or path.resolve() != same.resolve()):
            raise Invalid(f"spec.tasks.{named[0]}: names other tasks: leave this field out, or 'tasks'")
        if path is not None:
            self.add("url", path, str(tasks))
        elif isinstance(tasks, str):
            source["url"] = tasks
        else:
            self._take_list(tasks)

    def _take_list(self, tasks: Any) -> None:
        if isinstance(tasks, Mapping) or not isinstance(tasks, Iterable):
            kind = type(tasks).__name__
            raise Invalid(f"tasks: must be a list of tasks, or the path of a file (got {kind})")
        documents, lines = [], []
        for number, task in enumerate(tasks):
            document, line = _row(task, number)
            documents.append(document)
            lines.append(line)
        if not lines:
            raise Invalid("tasks: the list is empty")
        source = self.source
        is_own_format = source.get("format") in (None, "rollyard")
        is_small = len(lines) <= INLINE_TASKS and sum(map(len, lines)) <= INLINE_BYTES
        if is_small and is_own_format and not any(name in source for name in _NEED_A_FILE):
            source["inline"] = documents
            return
        path = self.temporary("tasks.jsonl")
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        self.files["url"] = LocalFile(path, "tasks")

    def add(self, name: str, path: Path, shown: str) -> None:
        """Let a file be uploaded for a field, or the task folders below a folder as one file.

        Raises:
            Invalid: It is a folder, and the job's format reads none.
            OSError: It cannot be read.
        """
        if path.is_dir():
            if name != "url" or self.source.get("format") != "harbor":
                raise Invalid(f"spec.tasks.{name}: {shown} is a folder, which only the format 'harbor' reads")
            path = self._packed(path, shown)
        self.files[name] = LocalFile(path, shown)

    def _packed(self, folder: Path, shown: str) -> Path:
        from rollyard_tasks.formats.harbor import pack_folders
        from rollyard_tasks.row_texts import FileRefused

        path = self.temporary("tasks.jsonl.gz")
        try:
            with path.open("wb") as file:
                pack_folders(folder, file)
        except FileRefused as error:
            raise Invalid(f"spec.tasks.url: {shown}: {error}", reason="InvalidTasks") from error
        return path


def prepared(job: GivenJob, tasks: GivenTasks | None, namespace: str) -> PreparedJob:
    """Return a job as it is submitted, in `namespace` if its manifest names none.

    Args:
        job: A model, the JSON form of one, or the path of a file with one. What the file names as its tasks
            is uploaded if it is on this machine.
        tasks: The path of a file or folder, or the tasks themselves.
        namespace: The client's namespace.

    Raises:
        Invalid: The file is not a manifest, or the tasks cannot be sent.
        OSError: A file or folder cannot be read.
    """
    own_files: tuple[str, ...] = ()
    if isinstance(job, str | os.PathLike):
        submission, own_files = _of_file(Path(job), namespace), _FILES
    else:
        submission = PreparedJob(dict(placed(job, namespace)))
    try:
        if tasks is not None:
            submission.take(tasks)
        for name in own_files:
            path = None if name in submission.files else _local(submission.source.get(name))
            if path is not None and path.exists():
                submission.add(name, path, str(path))
    except BaseException:
        submission.close()
        raise
    return submission


def _of_file(path: Path, namespace: str) -> PreparedJob:
    """Return the job of a file. Its paths, which are relative to the file, are made absolute."""
    from rollyard_crds.reading.yaml_text import YamlError, load_all

    with path.open("rb") as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise Invalid(f"{path}: larger than {MAX_MANIFEST_BYTES >> 20} MiB; is it a manifest?")
    try:
        documents = [document for document in load_all(text) if document is not None]
    except YamlError as error:
        raise Invalid(f"{path}: not valid YAML: {error}", reason="InvalidManifest") from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise Invalid(
            f"{path}: must hold one RolloutJob (got {len(documents)} documents)", reason="InvalidManifest"
        )
    document = documents[0]
    if document.get("kind") != "RolloutJob":
        problem = f"{path}: kind: must be RolloutJob (got {document.get('kind')!r})"
        raise Invalid(problem, reason="InvalidManifest")
    submission = PreparedJob(dict(placed(document, namespace)))
    source = submission.source
    for name in _FILES:
        named = _path_of(source.get(name))
        if named is not None:
            source[name] = (path.parent / named).resolve().as_uri()
    return submission


def _path_of(tasks: Any) -> Path | None:
    """Return the path that a text is, or None if it is the URL of something elsewhere, or no text."""
    if isinstance(tasks, os.PathLike):
        return Path(tasks)
    if not isinstance(tasks, str) or tasks.startswith("blob:"):
        return None
    return _local(tasks) if "://" in tasks else Path(tasks)


def _local(url: object) -> Path | None:
    """Return the path of a `file:` URL, or None for anything else."""
    parts = urlsplit(url) if isinstance(url, str) else None
    return Path(unquote(parts.path)) if parts is not None and parts.scheme == "file" else None


def _row(task: Any, number: int) -> tuple[Mapping[str, Any], bytes]:
    """Return a task as JSON, decoded and encoded."""
    document = task if isinstance(task, Mapping) else None
    if document is None:
        dump = getattr(task, "model_dump", None)
        if dump is None:
            raise Invalid(f"tasks[{number}]: must be a Task or a mapping (got {type(task).__name__})")
        document = dump(mode="json", exclude_none=True)
    try:
        return document, encode(document)
    except TypeError as error:
        raise Invalid(f"tasks[{number}]: cannot be sent as JSON: {error}") from error
