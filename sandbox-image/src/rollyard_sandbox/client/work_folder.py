"""The client's view of a work folder. No symbolic link is followed, as a hostile program may have left it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollyard_sandbox.client.wire import Wire
from rollyard_sandbox.errors import ProtocolError
from rollyard_sandbox.frames import MAX_LISTING, MAX_TREE

DIGEST_SIZE: Final = 32
_KINDS: Final = {b"f": "file", b"d": "folder", b"l": "link", b"o": "other", b"u": "unreadable"}


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One entry of a tree.

    Attributes:
        kind: One of "file", "folder", "link", "other" (a FIFO, a socket, a device), and "unreadable" (a
            folder).
        executable: Whether the owner may execute a file.
        size: The size of a file in bytes.
        target: The target of a link.
    """

    kind: str
    executable: bool = False
    size: int = 0
    target: bytes = b""


class WorkFolder:
    """A folder, below which files are read and written. Paths are bytes, and relative to it.

    Args:
        folder: The absolute path of the folder; the default is the work folder. No part of the path may be a
            symbolic link.
    """

    def __init__(self, wire: Wire, folder: str | None = None) -> None:
        self._wire = wire
        self._above = b"" if folder is None else folder.strip("/").encode("utf-8", "surrogateescape")
        self._where: dict[str, Any] = {} if folder is None else {"anywhere": True}

    async def tree(self, path: bytes = b"") -> dict[bytes, TreeEntry]:
        """Return all entries at and below `path`, by path. A folder comes before its contents.

        Raises:
            FileError: The reason is FileNotFound, SymlinkLoop, NotADirectory, PermissionDenied,
                TooManyEntries, ….
            ProtocolError: The answer is not a listing of what is below `path`.
        """
        top = self._full(path)
        _, body = await self._request("tree", {"path": _text(top)})
        entries = parse_tree(body, top)
        if not self._above:
            return entries
        start = len(self._above) + 1
        return {path[start:]: entry for path, entry in entries.items() if len(path) > start}

    async def read(self, path: bytes, *, offset: int = 0, max_bytes: int) -> bytes:
        """Return at most `max_bytes` of a regular file, starting at `offset` (in bytes).

        Raises:
            FileError: The file is missing, is a link or no regular file (reason NotAFile), or may not be
                read.
        """
        _, data = await self._request(
            "read", {"path": self._sent(path), "offset": offset, "max_bytes": max_bytes}
        )
        if len(data) > max_bytes:
            raise ProtocolError(f"{len(data)} bytes came where {max_bytes} were asked for")
        return data

    async def digests(self, ranges: Sequence[tuple[bytes, int, int]]) -> list[bytes]:
        """Return the SHA-256 of each (path, offset, length), or 32 zero bytes if it cannot be read."""
        rows = [[self._sent(path), offset, length] for path, offset, length in ranges]
        _, body = await self._request("digests", {}, rows)
        if len(body) != DIGEST_SIZE * len(rows):
            raise ProtocolError("the number of digests is not that of the ranges")
        return [body[at : at + DIGEST_SIZE] for at in range(0, len(body), DIGEST_SIZE)]

    async def put(self, path: bytes, data: bytes, *, mode: int) -> None:
        """Make a regular file, with the folders above it, and replace whatever exists at `path`.

        Raises:
            FileError: The reason is DiskFull, ReadOnly, PermissionDenied, ….
            CommandTooLarge: `data` has more than 64 MiB.
        """
        header = {"op": "beneath", "action": "put", "path": self._sent(path), "mode": mode, **self._where}
        await self._wire.request(header, data)

    async def make(self, folders: Sequence[bytes]) -> None:
        """Make folders, and replace whatever is not a folder at their paths. Existing folders stay.

        Raises:
            FileError: The reason is DiskFull, ReadOnly, PermissionDenied, ….
        """
        if folders:
            await self._request("make", {}, [self._sent(path) for path in folders])

    async def remove(self, paths: Sequence[bytes]) -> None:
        """Remove files, links, and folders with their contents. Missing paths are skipped.

        Raises:
            FileError: The reason is ReadOnly, PermissionDenied, ….
        """
        if paths:
            await self._request("remove", {}, [self._sent(path) for path in paths])

    async def _request(
        self, action: str, header: dict[str, Any], rows: list[Any] | None = None
    ) -> tuple[dict[str, Any], bytes]:
        body = b"" if rows is None else json.dumps(rows).encode()
        return await self._wire.request({"op": "beneath", "action": action, **header, **self._where}, body)

    def _full(self, path: bytes) -> bytes:
        return b"/".join(part for part in (self._above, path) if part)

    def _sent(self, path: bytes) -> str:
        return _text(self._full(path))


def parse_tree(body: bytes, top: bytes = b"") -> dict[bytes, TreeEntry]:
    """Return the entries of a listing, which may come from a server that can no longer be trusted.

    Raises:
        ProtocolError: The listing is too long, or a record is malformed or leads out of `top`.
    """
    if len(body) > MAX_LISTING + 16_384 or body.count(b"\0") > 2 * MAX_TREE + 2:
        raise ProtocolError("the listing is longer than a listing may be")
    entries: dict[bytes, TreeEntry] = {}
    records = iter(body.split(b"\0")[:-1])
    for record in records:
        match record.split(b" ", 3):
            case [kind, (b"0" | b"1") as executable, size, path] if (
                kind in _KINDS and size.isdigit() and len(size) < 20 and _is_below(path, top)
            ):
                target = next(records, b"") if kind == b"l" else b""
                entries[path] = TreeEntry(_KINDS[kind], executable == b"1", int(size), target)
            case _:
                raise ProtocolError(f"{record[:200]!r} is not a record of a listing")
    return entries


def _is_below(path: bytes, top: bytes) -> bool:
    if any(part in (b"", b".", b"..") for part in path.split(b"/")):
        return False
    return not top or path == top or path.startswith(top + b"/")


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
