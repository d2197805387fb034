"""The rows of a task file whose bytes come in pieces. The content decides what kind of file it is.

A file has JSON lines, a JSON list of objects, or a table in CSV. It may be compressed, and begin with a byte
order mark.
"""

from __future__ import annotations

import bz2
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pydantic_core import from_json
from rollyard_crds.fields.json_values import MAX_VALUES, too_many_values

from rollyard_tasks.row_texts import (
    MAX_ROW_BYTES,
    FileRefused,
    LineTexts,
    ListTexts,
    RowText,
    RowTexts,
    TableTexts,
)

PIECE_BYTES: Final = 1 << 20
"""The number of bytes that are decompressed at once."""
_XZ_MEMORY: Final = 64 << 20
"""The memory in bytes that an xz stream may ask for. The presets up to -6 need less for decompression."""
MAX_COLUMNS: Final = 1024
"""The largest number of columns of a table in CSV."""
_EXPLAINED_BYTES: Final = 8 << 20
"""The largest JSON text in which the standard library finds the fault, for which it needs more memory."""
_HEADER_BYTES: Final = 64 << 10
"""The largest header of a table in CSV."""
_STARTS: Final = {
    b"\xff\xfe": "is UTF-16 text: write it as UTF-8",
    b"\xfe\xff": "is UTF-16 text: write it as UTF-8",
    b"\x28\xb5\x2f\xfd": "is compressed by Zstandard: use gzip, bzip2 or xz",
    b"PK\x03\x04": "is a ZIP archive: give the file in it, plain or compressed by gzip, bzip2 or xz",
    b"PAR1": "is a Parquet file that was compressed as a whole: give it as it was before",
}
"""What is wrong with a text that begins with these bytes."""
_NO_TABLE: Final = "; a table in CSV begins with a line of two names or more, with commas between them"
_BOM: Final = b"\xef\xbb\xbf"
_CELL: Final = re.compile(rb'(?:"((?:[^"]++|"")*+)"|([^",\r\n]*+))(,|(?:\r\n|\n|\r)?\Z)')
_COLUMN: Final = re.compile(r'[^"{}\[\]:]*')


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Zlib:
    """zlib's decompressor with the interface of the others, which keeps input that is still to be read."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


COMPRESSED: Final[Mapping[bytes, Callable[[], _Unpacker]]] = {
    b"\x1f\x8b": _Zlib,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
}
"""The decompressors by the first bytes of what they read. No text begins with these."""
_MAGIC: Final = max(map(len, COMPRESSED))
_DAMAGED: Final = "the compressed file is damaged"


def _unpacker_of(start: bytes) -> _Unpacker | None:
    """Return a decompressor for data that begins with `start`, or None for data that is not compressed."""
    return next((make() for magic, make in COMPRESSED.items() if start.startswith(magic)), None)


class Decompressor:
    """The text of a file whose bytes come in pieces and may be compressed by gzip, bzip2 or xz.

    Args:
        max_bytes: The largest size of the whole text after decompression, in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._unpacker: _Unpacker | None = None
        self._streams = 0
        # This is the beginning of a stream whose compression is not known yet. It is None once that is known.
        self._start: bytes | None = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the text in these bytes, in pieces of at most PIECE_BYTES if it was compressed.

        Raises:
            FileRefused: The text is too long, or the file is damaged. Nothing more can be fed after that.
        """
        return self._counted(data, last=False)

    def end(self) -> Iterator[bytes]:
        """Yield what is left of the text.

        Raises:
            FileRefused: The text is refused as by `feed`, or the compressed data is cut short.
        """
        yield from self._counted(b"", last=True)
        if self._start is None and self._unpacker is not None:
            raise FileRefused(_DAMAGED)

    def _counted(self, data: bytes, *, last: bool) -> Iterator[bytes]:
        for piece in self._unpacked(data, last=last):
            self._left -= len(piece)
            if self._left < 0:
                raise FileRefused(f"holds more than {self._max_bytes} bytes of text")
            yield piece

    def _unpacked(self, data: bytes, *, last: bool) -> Iterator[bytes]:
        try:
            while True:
                if self._start is not None:
                    if not self._begin(data, last):
                        return
                    data, self._start = self._start, None
                if self._unpacker is None:
                    yield data
                    return
                piece = self._unpacker.decompress(data, PIECE_BYTES)
                yield piece
                if self._unpacker.eof:
                    # Several streams one after the other are one text.
                    self._start, data = b"", self._unpacker.unused_data
                elif not piece:
                    return
                else:
                    data = b""
        except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
            raise FileRefused(_DAMAGED) from error

    def _begin(self, data: bytes, last: bool) -> bool:
        """Return whether enough of a stream has arrived to identify its compression."""
        assert self._start is not None
        self._start += data
        if self._streams:
            self._start = self._start.lstrip(b"\0")  # Zeros may pad the end.
        if not self._start or (len(self._start) < _MAGIC and not last):
            return False
        self._unpacker = _unpacker_of(self._start)
        if self._streams and self._unpacker is None:
            raise FileRefused(_DAMAGED)
        self._streams += 1
        return True


@dataclass(slots=True)
class FileRow:
    """A row of a file."""

    number: int
    """The number of the row; the first is 1."""
    document: Any = None
    """What was read, which may be any JSON value. Its user takes it away, because it may be large."""
    problem: str = ""
    """Why nothing was read, or "" if something was. It shows none of the content."""
    unit: str = "line"
    """What `number` counts."""


def json_value(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not valid JSON, or has more than `MAX_VALUES` values.
    """
    if too_many_values(text):
        raise ValueError(f"holds more than {MAX_VALUES} values")
    try:
        return from_json(text)
    except ValueError as error:
        problem = str(error)
    # The standard library reads halves of characters as well, so that they can be refused by their field.
    if len(text) <= _EXPLAINED_BYTES:
        try:
            return json.loads((text if isinstance(text, str) else text.decode()).rstrip())
        except UnicodeDecodeError as error:
            raise ValueError("not UTF-8 text") from error
        except (ValueError, RecursionError) as error:
            problem = str(error)
    raise ValueError(f"not valid JSON: {problem}")


def json_row(number: int, text: str | bytes | bytearray, unit: str = "line") -> FileRow:
    """Return the row of a JSON text."""
    try:
        return FileRow(number, json_value(text), unit=unit)
    except ValueError as error:
        return FileRow(number, problem=str(error), unit=unit)


def line_rows(lines: Iterable[str]) -> Iterator[FileRow]:
    """Yield the rows of JSON lines. Blank lines are skipped."""
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_ROW_BYTES:
            yield _too_long(number, "line")
        elif line.strip():
            yield json_row(number, line)


class FileRows:
    """The rows of a file.

    Args:
        max_bytes: The largest size of the file after decompression, in bytes.
        unit: What the numbers of rows count; the default depends on the file.
    """

    def __init__(self, max_bytes: int, unit: str = "") -> None:
        self._decompressor = Decompressor(max_bytes)
        self._unit = unit
        # The beginning of the text, until its kind is known.
        self._start = b""
        self._texts: RowTexts | None = None
        self._parse: Callable[[RowText], FileRow | None] = self._of_json

    def feed(self, data: bytes) -> Iterator[FileRow | None]:
        """Yield the rows that these bytes complete, and None from time to time.

        Raises:
            FileRefused: Nothing more can be read.
        """
        for piece in self._decompressor.feed(data):
            yield from self._rows(piece, last=False)

    def end(self) -> Iterator[FileRow | None]:
        """Yield the rows that the end of the file completes, and None from time to time.

        Raises:
            FileRefused: The file is damaged, or was cut off.
        """
        for piece in self._decompressor.end():
            yield from self._rows(piece, last=False)
        yield from self._rows(b"", last=True)
        if self._texts is not None:
            yield from self._parsed(self._texts.end())

    def _rows(self, piece: bytes, *, last: bool) -> Iterator[FileRow | None]:
        if self._texts is None:
            self._start += piece
            self._texts = self._kind(last)
            if self._texts is None:
                yield None
                return
            piece, self._start = self._start.removeprefix(_BOM), b""
        yield from self._parsed(self._texts.feed(piece))

    def _kind(self, last: bool) -> RowTexts | None:
        """Return what cuts this kind of file into rows, or None if too little has arrived to know."""
        for start, problem in _STARTS.items():
            if self._start.startswith(start):
                raise FileRefused(problem)
        text = self._start.removeprefix(_BOM).lstrip()
        known = last or len(self._start) > _HEADER_BYTES
        if not known and (len(self._start) < len(_BOM) or not text):
            return None
        if text.startswith(b"["):
            self._unit = self._unit or "item"
            return ListTexts()
        if text.startswith(b"{"):
            rest = text[1:].lstrip(b" \t")
            if not rest and not known:
                return None
            if rest.startswith((b"\n", b"\r")):
                raise FileRefused("an object has several lines: write each on one line, or all in one list")
        else:
            ends = [at for at in map(text.find, (b"\n", b"\r")) if at >= 0]
            if not ends and not known:
                return None
            names = header(text[: min(ends, default=len(text))]) if ends or last else []
            if names:
                self._unit = self._unit or "row"
                self._parse = _Table(names, self._unit).row
                return TableTexts()
        self._unit = self._unit or "line"
        return LineTexts()

    def _parsed(self, texts: Iterator[RowText | None]) -> Iterator[FileRow | None]:
        for text in texts:
            if text is None:
                yield None
            elif text.text is None:
                yield _too_long(text.number, self._unit)
            else:
                row = self._parse(text)
                text.text.clear()
                yield row
                del row  # This row may be large, and the next one as well.

    def _of_json(self, text: RowText) -> FileRow:
        assert text.text is not None
        row = json_row(text.number, text.text, self._unit)
        if row.problem and text.number == 1 and not text.text[:64].lstrip().startswith((b"{", b"[")):
            row.problem += _NO_TABLE
        return row


def _too_long(number: int, unit: str) -> FileRow:
    return FileRow(number, problem=f"longer than {MAX_ROW_BYTES} bytes", unit=unit)


def is_text(start: bytes) -> bool:
    """Return whether a file that begins like this is text, and neither compressed nor in UTF-16."""
    return not start.startswith((*COMPRESSED, *_STARTS))


def header(line: bytes) -> list[str]:
    """Return the names of the columns if the first line of a text is the header of a table, else [].

    A text that was meant to be JSON lines, and begins with a broken one, has no header: names have no
    brackets, colons or quotes. The first column may have no name, like the index of pandas.
    """
    try:
        names = [(cell or b"").decode().strip() for cell in _cells(line) or ()]
    except UnicodeDecodeError:
        return []
    if len(names) < 2 or not all(names[1:]):
        return []
    return names if all(map(_COLUMN.fullmatch, names)) else []


class _Table:
    """A table in CSV: its cells are texts, and empty ones are absent."""

    def __init__(self, names: list[str], unit: str) -> None:
        if len(names) > MAX_COLUMNS:
            raise FileRefused(f"the header names {len(names)} columns, and {MAX_COLUMNS} are allowed")
        if len(set(names)) < len(names):
            raise FileRefused("the header names a column twice")
        self._names = names
        self._unit = unit

    def row(self, text: RowText) -> FileRow | None:
        """Return a row, or None for the header."""
        assert text.text is not None
        if text.number == 0:
            return None
        values = _cells(text.text)
        if values is None:
            problem = "a quote is not closed, or stands in a cell that is not in quotes as a whole"
        elif len(values) != len(self._names):
            problem = f"has {len(values)} cells, and the header names {len(self._names)} columns"
        else:
            pairs = zip(self._names, values, strict=True)
            try:
                cells = {name: cell.decode() for name, cell in pairs if name and cell}
                return FileRow(text.number, cells, unit=self._unit)
            except UnicodeDecodeError:
                problem = "not UTF-8 text"
        return FileRow(text.number, problem=problem, unit=self._unit)


def _cells(text: bytes | bytearray) -> list[bytes] | None:
    """Return the cells of a row in CSV, or None if its quotes are wrong."""
    cells: list[bytes] = []
    at = 0
    while (cell := _CELL.match(text, at)) is not None and len(cells) <= 2 * MAX_COLUMNS:
        quoted, plain, separator = cell.groups()
        cells.append(plain if quoted is None else quoted.replace(b'""', b'"') if b'""' in quoted else quoted)
        if separator != b",":
            return cells
        at = cell.end()
    return None if len(cells) <= 2 * MAX_COLUMNS else cells
