"""The files that a Dockerfile may copy: those of one folder, and nothing outside of it.

The folder's author is not trusted. Its files are listed and read without following any symbolic link, so no
name leads out of it, even if the folder changes in between.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

from rollyard_pipeline.sandboxes.dockerfiles.instructions import DockerfileProblem

MAX_FILES: Final = 50_000
MAX_BYTES: Final = 8 << 30
"""The largest size of all files of a folder together, in bytes."""
_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file of the folder."""

    path: str
    """The path below the folder, with slashes."""
    executable: bool = False
    problem: str = ""
    """Why it cannot be copied; "" if it can."""


class BuildContext(Protocol):
    """A folder with a Dockerfile."""

    def files(self) -> Mapping[str, ContextFile]:
        """Return its files by path. Folders are listed only by what is in them.

        Raises:
            DockerfileProblem: The folder cannot be read, or holds too much.
        """

    def read(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file, piece by piece.

        Raises:
            DockerfileProblem: The file cannot be read, or is no longer a regular file.
        """


class HeldContext:
    """Files in memory, as a task carries them.

    Args:
        files: Content, and whether it can be executed, by path. No path is absolute or has the part `..`.
    """

    def __init__(self, files: Mapping[str, tuple[bytes, bool]]) -> None:
        self._files = dict(files)

    def files(self) -> Mapping[str, ContextFile]:
        """Return the files by path."""
        return {path: ContextFile(path, executable) for path, (_, executable) in self._files.items()}

    def read(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file."""
        yield self._files[path][0]


class FolderContext:
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self) -> Mapping[str, ContextFile]:
        """Return the files by path. Links and special files are listed with what is wrong with them."""
        files: dict[str, ContextFile] = {}
        room = MAX_BYTES
        try:
            with self._opened() as top:
                for where, folders, names, descriptor in os.fwalk(dir_fd=top, onerror=_raise):
                    above = "" if where == "." else f"{where.removeprefix('./')}/"
                    for name in [*folders, *names]:
                        info = os.lstat(name, dir_fd=descriptor)
                        if stat.S_ISDIR(info.st_mode):
                            continue
                        path = f"{above}{name}"
                        files[path] = _listed(path, info)
                        room -= info.st_size
                        if len(files) > MAX_FILES or room < 0:
                            raise _problem(
                                f"{path}: with this file, the folder holds more than {MAX_FILES} files "
                                f"or {MAX_BYTES} bytes"
                            )
        except OSError as error:
            raise _problem(f"{error.filename or self._folder}: {error.strerror}") from error
        return files

    def read(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file, piece by piece."""
        try:
            with self._file(path) as file:
                while piece := file.read(_PIECE):
                    yield piece
        except OSError as error:
            raise _problem(f"{path}: {error.strerror}") from error

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _file(self, path: str) -> Iterator[IO[bytes]]:
        *above, name = path.split("/")
        with self._opened() as top:
            descriptors = [top]
            try:
                for part in above:
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    descriptors.append(os.open(part, flags, dir_fd=descriptors[-1]))
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with open(os.open(name, flags, dir_fd=descriptors[-1]), "rb") as file:
                    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                        raise _problem(f"{path}: is not a regular file")
                    yield file
            finally:
                for descriptor in descriptors[1:]:
                    os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error


def _listed(path: str, info: os.stat_result) -> ContextFile:
    problem = ""
    if stat.S_ISLNK(info.st_mode):
        problem = "is a symbolic link, which could lead out of the folder"
    elif not stat.S_ISREG(info.st_mode):
        problem = "is not a regular file"
    elif not path.isprintable():
        path, problem = ascii(path), "has a name that cannot be printed"
    return ContextFile(path, bool(info.st_mode & 0o100), problem)


@dataclass(frozen=True, slots=True)
class Copy:
    """What one COPY brings: files by their path in the image's staging folder."""

    files: Mapping[str, ContextFile]

    def digest(self, context: BuildContext) -> str:
        """Return a digest of the paths, modes and contents."""
        digest = hashlib.sha256()
        for path, file in sorted(self.files.items()):
            inner = hashlib.sha256()
            for piece in context.read(file.path):
                inner.update(piece)
            digest.update(f"{path}\0{file.executable}\0{inner.hexdigest()}\n".encode())
        return digest.hexdigest()

    def write(self, context: BuildContext, folder: Path) -> None:
        """Write the files below a new folder, with the modes 0755 and 0644.

        Raises:
            DockerfileProblem: A file cannot be read.
            OSError: A file cannot be written.
        """
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        for path, file in self.files.items():
            target = folder
            for part in path.split("/")[:-1]:
                target = target / part
                if not target.is_dir():
                    target.mkdir()
                    target.chmod(0o755)
            target = folder / path
            with target.open("xb") as out:
                for piece in context.read(file.path):
                    out.write(piece)
            target.chmod(0o755 if file.executable else 0o644)


def _problem(text: str) -> DockerfileProblem:
    return DockerfileProblem(text, "CopyImpossible")


def copied(files: Mapping[str, ContextFile], source: str) -> tuple[dict[str, ContextFile], bool]:
    """Return what a source of COPY names, by its path below the target, and whether it is a folder.

    If it is a folder, everything below it is copied, without its own name.

    Args:
        files: All files of the context.
        source: A path below the folder, without `..` and without a slash at an end; "" for all.

    Raises:
        DockerfileProblem: There is no such file, or one of them cannot be copied.
    """
    if source in files:
        chosen, folder = {source.rpartition("/")[2]: files[source]}, False
    else:
        top = f"{source}/" if source else ""
        chosen, folder = {p[len(top) :]: file for p, file in files.items() if p.startswith(top)}, True
    if not chosen:
        raise _problem(f"{source or '.'}: no such file beside the Dockerfile, or an empty folder")
    for file in chosen.values():
        if file.problem:
            raise _problem(f"{file.path}: {file.problem}")
    return chosen, folder
