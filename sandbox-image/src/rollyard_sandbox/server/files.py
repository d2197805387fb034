"""File operations. Paths are not restricted, because the sandbox is the boundary.

The exception is what belongs to the server: a path in /proc, or one that a link leads there, would show the
memory and the descriptors of the server, which opens it, instead of the caller's.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from rollyard_sandbox import folders
from rollyard_sandbox.errors import FileError, file_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

MAX_ENTRIES: Final = 100_000  # The limit of one directory.
MAX_NAMES: Final = 4 << 20  # The characters of all names in it. In the answer, each can take six bytes.
_REMOVAL_SECONDS: Final = 20.0  # The client waits for 30 seconds, and nothing else is answered meanwhile.


def read(path: str, offset: int, max_bytes: int) -> tuple[bytes, int, int]:
    """Return at most `max_bytes` of a file from `offset`, the file's size in bytes, and its permission bits.

    Files without a size and named pipes are read as far as possible without waiting.

    Raises:
        FileError: The file does not exist, is a directory, may not be read, …
    """
    try:
        fd = _opened(path, os.O_NONBLOCK)
        try:
            info = os.fstat(fd)
            if stat.S_ISDIR(info.st_mode):
                raise FileError(f"{path}: is a directory", reason="IsADirectory")
            if offset:
                os.lseek(fd, offset, os.SEEK_SET)
            data = folders.read_at_most(fd, max_bytes)
        finally:
            os.close(fd)
    except BlockingIOError:
        raise FileError(f"{path}: has no data now", reason="WouldBlock") from None
    except OSError as error:
        raise file_error(error, path) from None
    return data, max(info.st_size, offset + len(data)), stat.S_IMODE(info.st_mode)


def write(path: str, data: bytes, mode: int) -> None:
    """Replace or create a file atomically: a reader sees the old content or the new, never a part.

    Missing parent directories are made. A symbolic link is followed, and its target is replaced.

    Raises:
        FileError: The path is a directory, the disk is full, the file may not be written, …
    """
    try:
        target = folders.followed(path)
        if os.path.isdir(target):
            raise FileError(f"{path}: is a directory", reason="IsADirectory")
        parent = os.path.dirname(target)
        folders.make(parent)
        temporary = os.path.join(parent, f".{os.urandom(8).hex()}.part")
        try:
            folders.make_file(temporary, mode, data)
            os.rename(temporary, target)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except FileExistsError:
        raise FileError(f"{path}: a parent is not a directory", reason="NotADirectory") from None
    except OSError as error:
        raise file_error(error, path) from None


def entries(path: str) -> list[list[Any]]:
    """Return [name, kind, size, mode] for each entry of a directory, sorted by name.

    The kind is "file", "directory", "symlink" or "other", and the size is in bytes.

    Raises:
        FileError: The path does not exist, is not a directory, or has more than MAX_ENTRIES entries or
            MAX_NAMES characters in their names.
    """
    rows: list[list[Any]] = []
    remaining = MAX_NAMES
    try:
        folder = _opened(path, os.O_DIRECTORY)
        try:
            with os.scandir(folder) as iterator:
                for entry in iterator:
                    remaining -= len(entry.name)
                    if len(rows) >= MAX_ENTRIES or remaining < 0:
                        words = f"{path}: more than {MAX_ENTRIES} entries, or {MAX_NAMES} characters in names"
                        raise FileError(words, reason="TooManyEntries")
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # It has been removed meanwhile.
                    rows.append([entry.name, _kind(info.st_mode), info.st_size, stat.S_IMODE(info.st_mode)])
        finally:
            os.close(folder)
    except OSError as error:
        raise file_error(error, path) from None
    rows.sort(key=lambda row: row[0])
    return rows


def remove(path: str) -> None:
    """Remove a file, a symbolic link, or a directory with its contents.

    Raises:
        FileError: The path does not exist, may not be removed, or has too much in it.
    """
    try:
        folders.remove(path, seconds=_REMOVAL_SECONDS)
    except OSError as error:
        raise file_error(error, path) from None


def _opened(path: str, flags: int) -> int:
    """Open a file or a folder to read it.

    Raises:
        OSError: It cannot be opened.
        FileError: It is a part of /proc, or has no place in the file system, as a descriptor of the server.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        # The kernel's own name of what was opened, whatever links led to it.
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name == "/proc" or name.startswith(("/proc/", "/memfd:")) or not name.startswith("/"):
            words = "in /proc, which shows the exec server to itself; read it with a command"
            raise FileError(f"{path}: is {words}", reason="NotAFile")
    except (OSError, FileError):
        os.close(fd)
        raise
    return fd


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"
