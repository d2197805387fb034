"""Making, measuring and removing folders that a hostile program may have left, without recursion.

Neither the depth of a tree nor a chain of links is a limit of Python's stack here, so no program can end its
exec server, or the worker that cleans up after it, by nesting folders.
"""

from __future__ import annotations

import errno
import os
import stat
from time import monotonic

from rollyard_sandbox.errors import FileError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""The flags with which a folder, but not a link to one, can be opened."""
MAX_LINKS: Final = 40
"""How many symbolic links in a row are followed, as in Linux (path_resolution(7))."""


def make(path: str) -> None:
    """Make a folder with all that are missing above it.

    Raises:
        OSError: One of them cannot be made, or a file is in its place.
    """
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        above = os.path.dirname(path.rstrip("/"))
        if above in ("", path):
            break
        path = above
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):  # Something else may have made the folder meanwhile.
                raise


def followed(path: str) -> str:
    """Return the path at which a chain of symbolic links from `path` ends, whether or not it exists.

    The folders above are left to the kernel, which follows links by itself.

    Raises:
        OSError: There are more than `MAX_LINKS` links.
    """
    for _ in range(MAX_LINKS + 1):
        try:
            target = os.readlink(path)
        except OSError:
            return path  # It is not a link, or the kernel itself will refuse it.
        path = os.path.join(os.path.dirname(path), target)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def remove(path: str | bytes, *, parent: int | None = None, seconds: float = float("inf")) -> None:
    """Remove a file, a symbolic link, or a folder with its contents; no link is followed.

    A folder inside a folder is first moved to the top of the tree. Two descriptors are therefore enough for
    any depth, and no path is longer than a name. What cannot be removed is left out, and the rest is removed.

    Args:
        path: What to remove.
        parent: The descriptor of the open folder to which `path` is relative.
        seconds: The limit in seconds. What has already been removed is gone.

    Raises:
        OSError: The path does not exist, or (the first of several) something cannot be removed.
        FileError: A folder has too much in it to be removed in time (reason TooManyEntries).
    """
    end = monotonic() + seconds
    if not stat.S_ISDIR(os.stat(path, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(path, dir_fd=parent)
        return
    problems: list[OSError] = []
    top = opened(path, parent)
    try:
        waiting = _emptied(top, problems, end)
        while waiting:
            _check_time(end)
            name = waiting.pop()
            try:
                folder = opened(name, top)
                try:
                    for inner in _emptied(folder, problems, end):
                        try:
                            waiting.append(_lifted(inner, folder, top))
                        except OSError as error:
                            problems.append(error)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
            except OSError as error:
                problems.append(error)
    finally:
        os.close(top)
    if problems:
        raise problems[0]
    os.rmdir(path, dir_fd=parent)


def sizes(path: str) -> Iterator[os.stat_result]:
    """Yield the lstat of everything below `path` on its disk, as far as it can be seen."""
    try:
        device = os.lstat(path).st_dev
    except OSError:
        return
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue  # It has been removed meanwhile, or its path is too long.
                    if info.st_dev != device:
                        continue  # Something else is mounted here.
                    yield info
                    if stat.S_ISDIR(info.st_mode):
                        waiting.append(entry.path)
        except OSError:
            continue


def _emptied(folder: int, problems: list[OSError], end: float) -> list[str]:
    """Remove everything but folders from an open folder, and return the names of the folders in it."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            _check_time(end)
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
                continue
            try:
                os.unlink(entry.name, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                problems.append(error)
    return folders


def _check_time(end: float) -> None:
    if monotonic() > end:
        raise FileError("a folder has too much in it to be removed in time", reason="TooManyEntries")


def opened(name: str | bytes, parent: int | None = None) -> int:
    """Return the descriptor of a folder that may be changed, even if its owner has removed its own rights.

    Args:
        name: The folder. A link to one is not followed.
        parent: The descriptor of the open folder to which `name` is relative.

    Raises:
        OSError: It is not a folder, or it belongs to somebody else and may not be listed.
    """
    try:
        folder = os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except PermissionError:
        handle = os.open(name, os.O_PATH | FOLDER_FLAGS, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{handle}", _unlocked(handle))
        finally:
            os.close(handle)
        folder = os.open(name, FOLDER_FLAGS, dir_fd=parent)
    if os.fstat(folder).st_mode & 0o300 != 0o300:
        try:
            os.fchmod(folder, _unlocked(folder))
        except OSError:
            return folder  # Somebody else's folder: what follows is refused where it matters.
    return folder


def _unlocked(folder: int) -> int:
    return stat.S_IMODE(os.fstat(folder).st_mode) | 0o700


def _lifted(name: str, folder: int, top: int) -> str:
    """Move the folder `name` from the open `folder` to `top`, and return its new name."""
    new = os.urandom(16).hex()
    try:
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    except PermissionError:
        os.close(opened(name, folder))  # A folder that may not be changed cannot be moved, either.
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    return new


def read_at_most(file: int, limit: int) -> bytes:
    """Return the next bytes of a file up to its end, at most `limit`.

    Args:
        file: The file's descriptor.
        limit: The number of bytes.

    Raises:
        OSError: It cannot be read, or a pipe has no data now.
    """
    parts = []
    while limit > 0 and (part := os.read(file, min(limit, 1 << 20))):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def make_file(path: str | bytes, mode: int, data: bytes, parent: int | None = None) -> None:
    """Make a file where nothing is, with these permission bits and this content. No link is followed.

    Args:
        path: The path, which is relative to `parent` if that is given.
        mode: The permission bits.
        data: The content.
        parent: The descriptor of a folder.

    Raises:
        OSError: It cannot be made, or something is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o600, dir_fd=parent)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fchmod(file, mode)
    finally:
        os.close(file)
