"""The trajectory store: immutable objects of NDJSON under a URL. Everything here blocks: see `bulkhead`."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.asyn import sync
from fsspec.core import url_to_fs

from rollyard_api.core.problems import StorageFull, Unavailable
from rollyard_api.storage.database import is_storage_full

LEFT_SECONDS = 600.0
"""Age of a scratch file that nobody writes to any more."""
RETRY_AFTER = {"Retry-After": "2"}


class TrajectoryStore(Protocol):
    """Objects written whole; writing one again with the same content changes nothing."""

    def open(self) -> None:
        """Make the root where that is needed; raises OSError when it cannot be made."""

    def write(self, path: str, data: bytes) -> None:
        """Durably write an object, or raise StorageFull or Unavailable and leave nothing half-done."""

    def read(self, path: str, start: int, length: int) -> bytes:
        """A range of an object; raises Unavailable when it cannot be read."""


class LocalStore:
    """A folder: written beside, synced, renamed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def write(self, path: str, data: bytes) -> None:
        target = self.root / path
        # An earlier write of the same object may hang still: each has a scratch file of its own.
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
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
        except OSError as error:
            raise _refusal(error, str(target)) from error

    def read(self, path: str, start: int, length: int) -> bytes:
        try:
            with (self.root / path).open("rb") as file:
                file.seek(start)
                data = file.read(length)
        except OSError as error:
            raise _unreadable(error) from error
        return _whole(data, path, length)


def _remove_left(target: Path) -> None:
    """Remove what killed processes left of this object; another replica may be writing it at this moment."""
    for left in target.parent.glob(f".{target.name}.*part"):
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < time.time() - LEFT_SECONDS:
                left.unlink()


class RemoteStore:
    """Any file system that fsspec knows; its objects must appear whole or not at all (S3 and its like).

    Args:
        fs: the file system.
        root: the folder in it under which everything lies.
        seconds: after which a call of a file system that is asynchronous inside (S3, GCS, HTTP) is given up;
            a call of another one hangs as long as the file system lets it.
    """

    def __init__(self, fs: Any, root: str, seconds: float) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self._seconds = seconds

    def open(self) -> None:
        """Nothing: the folder is made with the first object."""

    def write(self, path: str, data: bytes) -> None:
        try:
            self._call("makedirs", f"{self.root}/{path}".rpartition("/")[0], exist_ok=True)
            self._call("pipe_file", f"{self.root}/{path}", data)
        except OSError as error:
            raise _refusal(error, path) from error

    def read(self, path: str, start: int, length: int) -> bytes:
        try:
            data = bytes(self._call("cat_file", f"{self.root}/{path}", start=start, end=start + length))
        except OSError as error:
            raise _unreadable(error) from error
        return _whole(data, path, length)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        inner = getattr(self.fs, f"_{method}", None)
        try:
            if not getattr(self.fs, "async_impl", False) or inner is None:
                return getattr(self.fs, method)(*arguments, **options)
            return sync(self.fs.loop, inner, *arguments, timeout=self._seconds, **options)
        except OSError:
            raise
        except Exception as error:
            # Libraries of object stores have exceptions of their own, which are no OSErrors.
            raise OSError(f"{type(error).__name__}: {error}") from error


def _whole(data: bytes, path: str, length: int) -> bytes:
    if len(data) != length:
        raise Unavailable(f"the trajectory store's {path} is shorter than it was written: it was changed")
    return data


def _unreadable(error: OSError) -> Unavailable:
    return Unavailable(f"the trajectory store cannot be read: {_said(error)}", headers=RETRY_AFTER)


def _refusal(error: OSError, path: str) -> Exception:
    if is_storage_full(error):
        return StorageFull("no space left for trajectories; they wait in the database until there is room")
    return Unavailable(f"the trajectory store refused {path}: {_said(error)}", headers=RETRY_AFTER)


def _said(error: OSError) -> str:
    return str(error) or type(error).__name__


def open_store(url: str, seconds: float) -> TrajectoryStore:
    """A store by its URL; a plain path or `file://` is a local folder.

    Args:
        seconds: how long a call of a remote store may take.
    """
    fs, root = url_to_fs(url)
    if isinstance(fs, fsspec.get_filesystem_class("file")):
        return LocalStore(Path(root))
    return RemoteStore(fs, root, seconds)
