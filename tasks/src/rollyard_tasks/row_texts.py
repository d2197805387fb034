"""Cuts the text of a task file into the texts of its rows: lines, items of a JSON list, or rows of a table.

The text comes in pieces. At most one row is in memory, and nothing of a row that is too long is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from rollyard_tasks.errors import TasksError

MAX_ROW_BYTES: Final = 64 << 20
"""The largest size of one row, in bytes."""
MAX_BLANK_LINES: Final = 1_000_000
"""The largest number of blank lines in one file."""
_COMMA, _QUOTE, _BACKSLASH, _OPEN, _CLOSE = b',"\\[]'
_STRING_REST: Final = rb'(?:[^"\\]++|\\.)*+'
_IN_STRING: Final = re.compile(_STRING_REST, re.S)
_IN_ITEM: Final = re.compile(rb'(?:[^"{}\[\]]++|"%b")*+' % _STRING_REST, re.S)
"""What comes before the next bracket, or before a string whose end has not arrived yet."""
_BETWEEN_ITEMS: Final = re.compile(rb'(?:[^",{}\[\]]++|"%b")*+' % _STRING_REST, re.S)


class FileRefused(TasksError, ValueError):
    """A file, a task folder or its archive cannot be read. The message shows none of its content."""

    reason = "InvalidTasks"


@dataclass(frozen=True, slots=True)
class RowText:
    """The text of a row."""

    number: int
    """The number of the row; the first is 1."""
    text: bytearray | None
    """The text, or None if it is longer than `MAX_ROW_BYTES`. Clear it to free its memory."""


class RowTexts(Protocol):
    """The interface of what cuts a text into those of its rows."""

    def feed(self, piece: bytes) -> Iterator[RowText | None]:
        """Yield the rows that a piece completes, and None at the end of the piece.

        Raises:
            FileRefused: Nothing more can be read.
        """
        ...

    def end(self) -> Iterator[RowText | None]:
        """Yield the row that the end of the text completes, if there is one.

        Raises:
            FileRefused: The text must not end here.
        """
        ...


class _Row:
    """The bytes of the row that is being read."""

    def __init__(self) -> None:
        self._text: bytearray | None = bytearray()

    def add(self, part: bytes | bytearray) -> None:
        if self._text is not None and len(self._text) + len(part) <= MAX_ROW_BYTES:
            self._text += part
        else:
            self._text = None

    def take(self) -> bytearray | None:
        """Return the row, and begin the next one."""
        text, self._text = self._text, bytearray()
        return text

    def __bool__(self) -> bool:
        """Return whether anything was added."""
        return self._text is None or bool(self._text)


class LineTexts:
    """The lines of a text that are not blank. They end with LF, CRLF or CR, which belong to their texts."""

    _first = 1
    """The number of the first line."""

    def __init__(self) -> None:
        self._row = _Row()
        self._rows = 0
        self._blank = 0
        self._held = b""

    def feed(self, piece: bytes) -> Iterator[RowText | None]:
        """See `RowTexts.feed`."""
        piece = self._held + piece
        self._held = b"\r" if piece.endswith(b"\r") else b""  # An LF may follow.
        piece = piece.removesuffix(self._held)
        for part in (piece,) if self._is_inside(piece) else piece.splitlines(keepends=True):
            self._row.add(part)
            if self._is_end(part):
                yield from self._completed()
        yield None

    def end(self) -> Iterator[RowText | None]:
        """See `RowTexts.end`."""
        self._row.add(self._held)
        if self._row:
            yield from self._completed()

    def _is_inside(self, piece: bytes) -> bool:
        """Return whether no row ends in this piece, although there may be line ends."""
        return False

    def _is_end(self, part: bytes) -> bool:
        """Return whether a row ends with this part of it."""
        return part.endswith((b"\n", b"\r"))

    def _number(self) -> int:
        return self._first + self._rows + self._blank

    def _completed(self) -> Iterator[RowText]:
        text = self._row.take()
        if text is None or not text.isspace():
            yield RowText(self._number(), text)
            self._rows += 1
            return
        self._blank += 1
        if self._blank > MAX_BLANK_LINES:
            raise FileRefused(f"holds more than {MAX_BLANK_LINES} blank lines")


class TableTexts(LineTexts):
    """The rows of a table in CSV, whose header has the number 0. Line ends within quotes belong to cells.

    Quotes that are not closed end with the text.
    """

    _first = 0

    def __init__(self) -> None:
        super().__init__()
        self._in_quotes = False

    def _is_inside(self, piece: bytes) -> bool:
        return self._in_quotes and b'"' not in piece

    def _is_end(self, part: bytes) -> bool:
        # A quote within quotes is written twice, which changes nothing here.
        self._in_quotes ^= part.count(b'"') % 2 == 1
        return super()._is_end(part) and not self._in_quotes

    def _number(self) -> int:
        return self._first + self._rows


class ListTexts:
    """The items of a JSON list, whose own syntax is not checked."""

    def __init__(self) -> None:
        self._item = _Row()
        self._number = 0
        self._depth = 0
        self._in_string = False
        self._ended = False
        self._held = b""

    def feed(self, piece: bytes) -> Iterator[RowText | None]:
        """See `RowTexts.feed`."""
        piece, at = self._held + piece, 0
        self._held = b""
        if self._depth == 0 and not self._ended:
            at = piece.find(b"[") + 1
            self._depth = min(at, 1)
        begin = at
        while at < len(piece) and self._depth:
            at = self._next(piece, at)
            if at == len(piece):
                break
            letter = piece[at]
            if self._depth == 1 and letter in (_COMMA, _CLOSE):
                self._item.add(piece[begin:at])
                yield from self._completed(last=letter == _CLOSE)
                begin = at + 1
            at += self._passed(letter, piece, at)
        if self._depth:
            end = len(piece) - len(self._held)
            self._item.add(piece[begin:end] if begin or end < len(piece) else piece)
        elif self._ended and piece[begin:].strip():
            raise FileRefused("text follows the end of the list: give one list of all rows")
        yield None

    def end(self) -> Iterator[RowText | None]:
        """See `RowTexts.end`."""
        if not self._ended:
            raise FileRefused("the list does not end: the file was cut, or a bracket or quote is not closed")
        yield from ()

    def _next(self, piece: bytes, at: int) -> int:
        """Return the position of the next byte that matters, or the end of the piece."""
        pattern = _IN_STRING if self._in_string else _BETWEEN_ITEMS if self._depth == 1 else _IN_ITEM
        match = pattern.match(piece, at)
        return at if match is None else match.end()

    def _passed(self, letter: int, piece: bytes, at: int) -> int:
        """Process a byte that matters, and return how many bytes to move on."""
        if letter == _BACKSLASH:
            self._held = piece[at:]  # The escaped character comes with the next piece.
            return len(self._held)
        if letter == _QUOTE:
            self._in_string = not self._in_string
        elif letter in b"{[":
            self._depth += 1
        elif letter == _CLOSE or (letter != _COMMA and self._depth > 1):
            self._depth -= 1
            self._ended = self._depth == 0
        return 1

    def _completed(self, *, last: bool) -> Iterator[RowText]:
        text = self._item.take()
        if last and not self._number and text is not None and (not text or text.isspace()):
            return
        self._number += 1
        yield RowText(self._number, text)
