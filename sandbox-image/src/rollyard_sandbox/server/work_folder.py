"""Operations on the work folder that follow no symbolic link, because a hostile program may have left it.

Every path is relative to the work folder and is walked part by part from its descriptor. Only regular files
are opened for their content, because a FIFO or a device could block the server.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager

from rollyard_sandbox import folders
from rollyard_sandbox.errors import BadRequest, FileError, file_error
from rollyard_sandbox.frames import MAX_DIGESTED, MAX_LISTING, MAX_TREE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final

MAX_DEPTH: Final = 64
_MAX_PATH: Final = 4000  # bytes; with this limit the absolute path stays within PATH_MAX

FILE, FOLDER, LINK, OTHER, UNREADABLE = b"f", b"d", b"l", b"o", b"u"
"""The kinds of records in a listing; `u` is a folder that may not be listed."""

_NO_FOLDER: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def tree(workdir: str, path: bytes) -> bytes:
    """Return the records of all entries at and below `path`.

    An empty path stands for the work folder, which itself has no record. A record is
    `KIND EXECUTABLE SIZE PATH` and a NUL, where EXECUTABLE is 0 or 1 and SIZE is in bytes. The record of a
    symbolic link is followed by its target and another NUL. A folder comes before its contents.

    Raises:
        FileError: The reason is FileNotFound, SymlinkLoop, NotADirectory, …, or TooManyEntries beyond
            MAX_TREE, MAX_LISTING, MAX_DEPTH, or a path of more than 4000 bytes.
    """
    listing = _Listing()
    if path:
        with _entered(workdir, path, _seen) as (parent, last):
            listing.add(parent, last, path, 0)
    else:
        with _refused(path):
            folder = _seen(workdir)
            try:
                listing.fill(folder, b"", 0)
            finally:
                os.close(folder)
    return bytes(listing.records)


class _Listing:
    """The records of a tree."""

    def __init__(self) -> None:
        self.records = bytearray()
        self._count = 0

    def add(self, parent: int, name: bytes, path: bytes, depth: int) -> None:
        """Add the entry `name` of the open folder `parent`, with everything below it."""
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            self._record(FILE, bool(info.st_mode & stat.S_IXUSR), info.st_size, path)
        elif stat.S_ISLNK(info.st_mode):
            self._record(LINK, False, 0, path, os.readlink(name, dir_fd=parent))
        elif stat.S_ISDIR(info.st_mode):
            try:
                folder = os.open(name, folders.FOLDER_FLAGS, dir_fd=parent)
            except PermissionError:
                self._record(UNREADABLE, False, 0, path)
                return
            try:
                self._record(FOLDER, False, 0, path)
                self.fill(folder, path + b"/", depth + 1)
            finally:
                os.close(folder)
        else:
            self._record(OTHER, False, 0, path)

    def fill(self, folder: int, prefix: bytes, depth: int) -> None:
        """Add all entries of an open folder, sorted by name."""
        if depth > MAX_DEPTH:
            raise _too_many(prefix)
        names = []
        with os.scandir(folder) as iterator:
            for entry in iterator:
                names.append(os.fsencode(entry.name))
                if len(names) + self._count > MAX_TREE:
                    raise _too_many(prefix)
        for name in sorted(names):
            try:
                self.add(folder, name, prefix + name, depth)
            except FileNotFoundError:
                continue  # It has been removed meanwhile.
            except PermissionError:
                # The folder that holds it may be listed, but not entered.
                self._record(UNREADABLE, False, 0, prefix + name)

    def _record(self, kind: bytes, executable: bool, size: int, path: bytes, *more: bytes) -> None:
        self._count += 1
        self.records += b"%s %d %d %s\0" % (kind, executable, size, path)
        for text in more:
            self.records += text + b"\0"
        if self._count > MAX_TREE or len(self.records) > MAX_LISTING or len(path) > _MAX_PATH:
            raise _too_many(path)


def read(workdir: str, path: bytes, offset: int, max_bytes: int) -> bytes:
    """Return at most `max_bytes` of a regular file, starting at `offset` (in bytes).

    Raises:
        FileError: The file is missing, is a link or no regular file (reason NotAFile), or may not be read.
    """
    with _entered(workdir, path, _seen) as (parent, last):
        # The kind is checked first, because opening a FIFO or a device may have an effect of its own.
        if not stat.S_ISREG(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
            raise FileError(f"{_shown(path)}: is not a regular file", reason="NotAFile")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(last, flags, dir_fd=parent)
        try:
            os.lseek(file, offset, os.SEEK_SET)
            return folders.read_at_most(file, max_bytes)
        finally:
            os.close(file)


def digests(workdir: str, ranges: list[Any]) -> bytes:
    """Return the SHA-256 of each [path, offset, length], one after the other.

    A range that cannot be read yields 32 zero bytes.

    Raises:
        BadRequest: A range is malformed, or the ranges together are longer than MAX_DIGESTED.
    """
    from hashlib import sha256

    answer = bytearray()
    total = 0
    for entry in ranges:
        if not (
            isinstance(entry, list)
            and len(entry) == 3
            and isinstance(entry[0], str)
            and all(isinstance(number, int) and number >= 0 for number in entry[1:])
        ):
            raise BadRequest("ranges: a list of [path, offset, length] is needed")
        total += entry[2]
        if total > MAX_DIGESTED:
            raise BadRequest(f"ranges: more than {MAX_DIGESTED} bytes")
        try:
            answer += sha256(read(workdir, name(entry[0]), entry[1], entry[2])).digest()
        except FileError:
            answer += bytes(32)
    return bytes(answer)


def put(workdir: str, path: bytes, data: bytes, mode: int) -> None:
    """Make a regular file, with the folders above it, and replace whatever exists at `path`.

    Raises:
        FileError: The disk is full, the file system is read-only, …
    """
    with _entered(workdir, path, _made) as (parent, last):
        _clear(parent, last)
        folders.make_file(last, mode, data, parent)


def make(workdir: str, paths: list[Any]) -> None:
    """Make folders, and replace whatever is not a folder at their paths. An existing folder stays.

    Raises:
        BadRequest: `paths` is not a list of paths.
        FileError: The disk is full, the file system is read-only, …
    """
    for text in paths:
        with _entered(workdir, name(text), _made) as (parent, last):
            os.close(_made(last, parent))


def remove(workdir: str, paths: list[Any]) -> None:
    """Remove files, links, and folders with their contents. Missing paths are skipped.

    Raises:
        BadRequest: `paths` is not a list of paths.
        FileError: The file system is read-only, …
    """
    for text in paths:
        try:
            with _entered(workdir, name(text), folders.opened) as (parent, last):
                _clear(parent, last)
        except FileError as error:
            if error.reason not in ("FileNotFound", "NotADirectory"):  # Otherwise a folder above is missing.
                raise


def name(text: Any) -> bytes:
    """Return a path from a request as bytes.

    Raises:
        BadRequest: It is not a path below the work folder.
    """
    if not isinstance(text, str):
        raise BadRequest("path: a string is needed")
    try:
        path = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise BadRequest(f"path: {error}") from None
    if b"\0" in path or any(part in (b"", b".", b"..") for part in path.split(b"/")):
        raise BadRequest("path: a relative path without NUL, '.', '..' and empty parts is needed")
    return path


@contextmanager
def _refused(path: bytes) -> Iterator[None]:
    """Return a context in which an OSError becomes the FileError of `path`."""
    try:
        yield
    except OSError as error:
        raise file_error(error, _shown(path)) from None


@contextmanager
def _entered(
    workdir: str, path: bytes, enter: Callable[[str | bytes, int | None], int]
) -> Iterator[tuple[int, bytes]]:
    """Return a context with a descriptor of the folder that holds `path`, and the last part of the path.

    Args:
        enter: Opens a folder by its name in an open folder: `_seen`, `folders.opened` or `_made`.

    Raises:
        FileError: A folder cannot be opened, or the context raised an OSError.
    """
    *above, last = path.split(b"/")
    with _refused(path):
        folder = enter(workdir, None)
        try:
            for part in above:
                inner = enter(part, folder)
                os.close(folder)
                folder = inner
            yield folder, last
        finally:
            os.close(folder)


def _seen(name: str | bytes, parent: int | None = None) -> int:
    """Open a folder as it is."""
    return os.open(name, folders.FOLDER_FLAGS, dir_fd=parent)


def _made(name: str | bytes, parent: int | None) -> int:
    """Open a folder to change it, and make it first if there is none."""
    try:
        return folders.opened(name, parent)
    except OSError as error:
        if parent is None or error.errno not in _NO_FOLDER:
            raise
    _clear(parent, name)
    os.mkdir(name, 0o755, dir_fd=parent)
    return folders.opened(name, parent)


def _clear(parent: int, last: str | bytes) -> None:
    try:
        folders.remove(last, parent=parent)
    except FileNotFoundError:
        return


def _too_many(path: bytes) -> FileError:
    return FileError(
        f"{_shown(path)}: more than {MAX_TREE} entries, {MAX_LISTING} bytes of names, "
        f"{MAX_DEPTH} folders in each other or {_MAX_PATH} bytes of a path",
        reason="TooManyEntries",
    )


def _shown(path: bytes) -> str:
    return path[:200].decode("utf-8", "backslashreplace") or "the work folder"
