"""A log file bounded in size: at the bound it becomes `NAME.1` and a new one begins."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from rollyard_drivers.reconcile import log_errors

LIMIT_BYTES = 8 << 20
LINE_LIMIT = 300
_TAIL_BYTES = 32 << 10


class LogFile:
    """Appends bytes; at most two files of `limit` bytes each exist. Remembers the last lines."""

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self.path = path
        self._limit = limit
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._tail = b""

    def write(self, data: bytes) -> None:
        """Appends; a full disk loses log lines, not the process."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        try:
            if self._size + len(data) > self._limit and self._size:
                self._file.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._file = self.path.open("ab", buffering=0)
                self._size = 0
            self._size += self._file.write(data[-self._limit :]) or 0
        except OSError:
            return

    def last_line(self) -> str:
        """The last line that says something, at most 300 characters."""
        return _last_of(self._tail)

    def telling_line(self) -> str:
        """The last line that states an error, else the last line; at most 300 characters."""
        return telling(self._tail) or self.last_line()

    def close(self) -> None:
        self._file.close()


def last_line(path: Path) -> str:
    """The last line of a log file that says something; empty if there is none."""
    return _last_of(_tail(path))


def telling_line(path: Path) -> str:
    """The last line of a log file that states an error, else the last line; empty if there is none."""
    tail = _tail(path)
    return telling(tail) or _last_of(tail)


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def telling(tail: bytes) -> str:
    """The error that a log ends with: the last one that a traceback states; empty if there is none."""
    return log_errors.telling(tail.decode(errors="replace"))[:LINE_LIMIT]


def _last_of(tail: bytes) -> str:
    return log_errors.last_line(tail.decode(errors="replace"))[:LINE_LIMIT]
