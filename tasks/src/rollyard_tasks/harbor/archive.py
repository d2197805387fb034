"""Task folders as archives: a folder on this machine is packed, and an archive is read in memory.

Neither reads or writes a file outside of the folder. Links are refused, and an archive is never unpacked to
disk.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import tarfile
import zlib
from pathlib import Path
from typing import Final

from rollyard_crds.fields.harbor import MAX_BYTES, MAX_FILES, path_problem

from rollyard_tasks.row_texts import FileRefused

_MAX_ARCHIVE: Final = MAX_BYTES + (MAX_FILES + 64) * 2048
"""The largest size of an archive after decompression, in bytes. Each file has a header and padding."""


Contents = dict[str, tuple[bytes, bool]]
"""The files of a folder: content, and whether it can be executed, by path."""


def read_folder(folder: Path) -> Contents:
    """Return the files of a task folder on this machine.

    Raises:
        FileRefused: The folder holds a symbolic link or a special file, cannot be read, or is too large.
    """
    contents: Contents = {}
    room = MAX_BYTES
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise FileRefused(f"{folder.name}: {error.strerror}") from error
    try:
        for where, folders, names, descriptor in os.fwalk(dir_fd=top, onerror=_raise):
            folders.sort()
            above = "" if where == "." else f"{where.removeprefix('./')}/"
            for name in [*folders, *sorted(names)]:
                path = f"{above}{name}"
                info = os.lstat(name, dir_fd=descriptor)
                if stat.S_ISDIR(info.st_mode):
                    continue
                if stat.S_ISLNK(info.st_mode):
                    raise FileRefused(f"{path}: is a symbolic link, which a task folder must not hold")
                data = _read(name, descriptor, path, room)
                room -= len(data)
                _add(contents, path, data, bool(info.st_mode & 0o100))
    except OSError as error:
        raise FileRefused(f"{error.filename or folder.name}: {error.strerror}") from error
    finally:
        os.close(top)
    return contents


def _raise(error: OSError) -> None:
    raise error


def _read(name: str, folder: int, path: str, room: int) -> bytes:
    # The file may have been replaced by a link or a FIFO since it was listed, so the descriptor decides.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise FileRefused(f"{path}: is not a regular file")
        data = b"" if info.st_size > room else file.read(room + 1)
        if info.st_size > room or len(data) > room:
            raise _too_large(path)
        return data


def _add(contents: Contents, path: str, data: bytes, executable: bool) -> None:
    if problem := path_problem(path):
        raise FileRefused(f"{path[:200]!r}: {problem}")
    if path in contents:
        raise FileRefused(f"{path}: stands twice in the archive")
    if len(contents) >= MAX_FILES:
        raise FileRefused(f"holds more than {MAX_FILES} files")
    contents[path] = (data, executable)


def _too_large(path: str) -> FileRefused:
    return FileRefused(
        f"{path}: with this file, the folder holds more than {MAX_BYTES} bytes; large data belongs into the "
        "image that environment.docker_image names"
    )


def pack(contents: Contents) -> str:
    """Return a compressed tar archive of the files, in base64. Equal files give equal texts."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, (data, executable) in sorted(contents.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(data))
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return base64.b64encode(packer.compress(buffer.getvalue()) + packer.flush()).decode()


def unpack(text: str) -> Contents:
    """Return the files in an archive that may be hostile: a tar file in base64, with or without gzip.

    Raises:
        FileRefused: The text is not such an archive, or the archive holds links or special files, leads out
            of the folder, or is too large.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FileRefused("is not base64") from error
    if data.startswith(b"\x1f\x8b"):
        data = _inflated(data)
    if len(data) > _MAX_ARCHIVE:
        raise FileRefused(f"the archive is longer than {_MAX_ARCHIVE} bytes")
    contents: Contents = {}
    room = MAX_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for entry in archive:
                path = entry.name.removeprefix("./")
                if entry.isdir():
                    continue
                if entry.issym() or entry.islnk():
                    raise FileRefused(f"{path[:200]}: is a link, which a task folder must not hold")
                if not entry.isreg() or entry.sparse is not None:
                    raise FileRefused(f"{path[:200]}: is not a regular file")
                if entry.size > room:
                    raise _too_large(path[:200])
                room -= entry.size
                file = archive.extractfile(entry)
                content = file.read() if file is not None else b""
                if len(content) != entry.size:
                    raise FileRefused(f"{path[:200]}: the archive is cut off")
                _add(contents, path, content, bool(entry.mode & 0o100))
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        if isinstance(error, FileRefused):
            raise
        raise FileRefused(f"the archive cannot be read ({type(error).__name__})") from error
    return contents


def _inflated(data: bytes) -> bytes:
    reader = zlib.decompressobj(31)
    try:
        archive = reader.decompress(data, _MAX_ARCHIVE + 1)
    except zlib.error as error:
        raise FileRefused("the compressed archive is damaged") from error
    if len(archive) <= _MAX_ARCHIVE and not reader.eof:
        raise FileRefused("the compressed archive is cut off")
    return archive
