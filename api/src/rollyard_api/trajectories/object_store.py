"""The trajectory store: immutable objects under a URL. All calls block: see `bulkhead`."""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import fsspec
from fsspec.asyn import sync
from fsspec.core import url_to_fs

from rollyard_api.core.problems import RETRY_AFTER, StorageFull, Unavailable
from rollyard_api.storage.database import is_storage_full

LEFT_SECONDS: Final = 600.0
"""The age in seconds from which a scratch file counts as abandoned."""


class ObjectMissing(Unavailable):
    """Raised if the store has no such object. For callers it is an object that cannot be read."""

    reason = "Unavailable"


class TrajectoryStore(ABC):
    """Objects that are written as a whole. Writing one again with the same content changes nothing."""

    @abstractmethod
    def open(self) -> None:
        """Create the root if necessary; raises OSError if it cannot be created."""

    def write(self, path: str, data: bytes) -> None:
        """Durably write an object, or raise StorageFull or Unavailable and leave nothing half-written."""
        try:
            self._write(path, data)
        except OSError as error:
            if is_storage_full(error):
                raise StorageFull(
                    "no space left for trajectories; they wait in the database until there is room"
                ) from error
            raise Unavailable(
                f"the trajectory store refused {path}: {_said(error)}", headers=RETRY_AFTER
            ) from error

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return `length` bytes of an object from `start` on.

        Raises:
            ObjectMissing: There is no such object.
            Unavailable: It cannot be read, or it is shorter.
        """
        try:
            data = self._read(path, start, length)
        except OSError as error:
            kind = ObjectMissing if isinstance(error, FileNotFoundError) else Unavailable
            raise kind(f"the trajectory store cannot be read: {_said(error)}", headers=RETRY_AFTER) from error
        if len(data) != length:
            raise Unavailable(f"the trajectory store's {path} is shorter than it was written: it was changed")
        return data

    @abstractmethod
    def _write(self, path: str, data: bytes) -> None:
        """Write an object, or raise OSError."""

    @abstractmethod
    def _read(self, path: str, start: int, length: int) -> bytes:
        """Return what there is of a range of an object, or raise OSError."""


class LocalStore(TrajectoryStore):
    """A local folder, whose objects are written to a scratch file, synced and renamed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> None:
        """Make the folder."""
        self.root.mkdir(parents=True, exist_ok=True)

    def _write(self, path: str, data: bytes) -> None:
        """Write a file in one step, so that readers never see a part of it."""
        target = self.root / path
        # An earlier write of the same object may still hang, so each has a scratch file of its own.
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(target)
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

    def _read(self, path: str, start: int, length: int) -> bytes:
        with (self.root / path).open("rb") as file:
            file.seek(start)
            return file.read(length)


def _remove_left(target: Path) -> None:
    """Remove old scratch files of killed processes; newer ones may be in use by another replica."""
    for left in target.parent.glob(f".{target.name}.*part"):
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < time.time() - LEFT_SECONDS:
                left.unlink()


class RemoteStore(TrajectoryStore):
    """Any file system that fsspec knows, if its objects appear as a whole or not at all (S3 and the like).

    Args:
        fs: The file system.
        root: The folder in it under which all objects lie.
        seconds: The time limit for a call if the file system is asynchronous inside (S3, GCS, HTTP). A call
            of any other file system hangs as long as the file system lets it.
    """

    def __init__(self, fs: Any, root: str, seconds: float) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self._seconds = seconds

    def open(self) -> None:
        """Do nothing, because the folder is created with the first object."""

    def _write(self, path: str, data: bytes) -> None:
        self._call("makedirs", f"{self.root}/{path}".rpartition("/")[0], exist_ok=True)
        self._call("pipe_file", f"{self.root}/{path}", data)

    def _read(self, path: str, start: int, length: int) -> bytes:
        return bytes(self._call("cat_file", f"{self.root}/{path}", start=start, end=start + length))

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        inner = getattr(self.fs, f"_{method}", None)
        try:
            if not getattr(self.fs, "async_impl", False) or inner is None:
                return getattr(self.fs, method)(*arguments, **options)
            return sync(self.fs.loop, inner, *arguments, timeout=self._seconds, **options)
        except OSError:
            raise
        except Exception as error:
            # Libraries of object stores have exceptions of their own, which are not OSErrors.
            raise OSError(f"{type(error).__name__}: {error}") from error


def _said(error: OSError) -> str:
    return str(error) or type(error).__name__


def open_store(url: str, seconds: float) -> TrajectoryStore:
    """Return the store at a URL; a plain path or `file://` is a local folder.

    Args:
        seconds: How long a call of a remote store may take, in seconds.
    """
    fs, root = url_to_fs(url)
    if isinstance(fs, fsspec.get_filesystem_class("file")):
        return LocalStore(Path(root))
    return RemoteStore(fs, root, seconds)
