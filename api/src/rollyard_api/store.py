"""The trajectory store: immutable objects of NDJSON under a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.core import url_to_fs

from rollyard_api.database import is_storage_full
from rollyard_api.problems import StorageFull, Unavailable


class TrajectoryStore(Protocol):
    """Objects written whole; writing one again with the same content changes nothing."""

    def write(self, path: str, data: bytes) -> None:
        """Durably write an object, or raise StorageFull or Unavailable and leave nothing half-done."""

    def read(self, path: str, start: int, length: int) -> bytes:
        """A range of an object; raises Unavailable when it cannot be read."""


class LocalStore:
    """A folder: written beside, synced, renamed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, data: bytes) -> None:
        target = self.root / path
        scratch = target.with_name(f".{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with scratch.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                scratch.replace(target)
            finally:
                scratch.unlink(missing_ok=True)
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise _refusal(error, str(target)) from error

    def read(self, path: str, start: int, length: int) -> bytes:
        try:
            with (self.root / path).open("rb") as file:
                file.seek(start)
                data = file.read(length)
        except OSError as error:
            raise Unavailable(f"the trajectory store cannot be read: {error}") from error
        return _whole(data, path, length)


class RemoteStore:
    """Any file system that fsspec knows; its objects must appear whole or not at all (S3 and its like)."""

    def __init__(self, fs: Any, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")

    def write(self, path: str, data: bytes) -> None:
        try:
            self.fs.makedirs(f"{self.root}/{path}".rpartition("/")[0], exist_ok=True)
            self.fs.pipe_file(f"{self.root}/{path}", data)
        except OSError as error:
            raise _refusal(error, path) from error

    def read(self, path: str, start: int, length: int) -> bytes:
        try:
            data = bytes(self.fs.cat_file(f"{self.root}/{path}", start=start, end=start + length))
        except OSError as error:
            raise Unavailable(f"the trajectory store cannot be read: {error}") from error
        return _whole(data, path, length)


def _whole(data: bytes, path: str, length: int) -> bytes:
    if len(data) != length:
        raise Unavailable(f"the trajectory store's {path} is shorter than it was written: it was changed")
    return data


def _refusal(error: OSError, path: str) -> Exception:
    if is_storage_full(error):
        return StorageFull("no space left for trajectories; they wait in the database until there is room")
    return Unavailable(f"the trajectory store refused {path}: {error}")


def open_store(url: str) -> TrajectoryStore:
    """A store by its URL; a plain path or `file://` is a local folder, made if missing."""
    fs, root = url_to_fs(url)
    if isinstance(fs, fsspec.get_filesystem_class("file")):
        folder = Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        return LocalStore(folder)
    return RemoteStore(fs, root)
