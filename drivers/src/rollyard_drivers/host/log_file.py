"""A log file of bounded size. At the bound, the file is renamed to `NAME.1` and a new one is started."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

from rollyard_drivers.reconcile import log_errors

LIMIT_BYTES: Final = 8 << 20
LINE_LIMIT: Final = 300
_TAIL_BYTES: Final = 32 << 10


class LogFile:
    """A log file that bytes are appended to, and that remembers its last lines.

    At most two files of `limit` bytes each exist.
    """

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self.path = path
        self._limit = limit
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._tail = b""

    def write(self, data: bytes) -> None:
        """Append data to the log. If the disk is full, log lines are lost, but the process continues."""
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
        """Return the last line that is not empty, cut to at most 300 characters."""
        return _last_of(self._tail)

    def telling_line(self) -> str:
        """Return the last line that states an error, or else the last line.

        The line is cut to at most 300 characters.
        """
        return telling(self._tail) or self.last_line()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def last_line(path: Path) -> str:
    """Return the last line of a log file that is not empty, or an empty string if there is none."""
    return _last_of(_tail(path))


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log file, at most `count`. Records in JSON are shown as in a text log."""
    return log_errors.plain_lines(_tail(path).decode(errors="replace"))[-count:]


def telling_line(path: Path) -> str:
    """Return the last line of a log file that states an error, or else the last line.

    The result is empty if the log has no line.
    """
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
    """Return the error that a log ends with, which is the last one that a traceback states.

    The result is empty if there is no such error.
    """
    return log_errors.telling(tail.decode(errors="replace"))[:LINE_LIMIT]


def _last_of(tail: bytes) -> str:
    return log_errors.last_line(tail.decode(errors="replace"))[:LINE_LIMIT]
