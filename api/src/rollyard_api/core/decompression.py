"""Lines out of a stream of bytes, unpacked where it is compressed; bounds hold while it is unpacked."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator
from typing import Final, Protocol

from rollyard_api.core.errors import ControlPlaneError

PIECE_BYTES: Final = 1 << 20
"""Unpacked at once."""
_XZ_MEMORY: Final = 64 << 20
"""Bytes that an xz stream may ask for; the presets up to -6 need less to be unpacked."""


class TooLong(ControlPlaneError):
    """The text is longer than it may be."""

    reason = "TextTooLong"


class LineTooLong(ControlPlaneError):
    """A line is longer than it may be."""

    reason = "LineTooLong"


class Damaged(ControlPlaneError):
    """The compressed data is broken or cut short."""

    reason = "DataDamaged"


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Zlib:
    """zlib's decompressor with the interface of the others: it keeps what it has not unpacked yet."""

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


def _unpacker_of(start: bytes) -> _Unpacker | None:
    """What unpacks data that begins so; no JSON text begins as compressed data does."""
    if start.startswith(b"\x1f\x8b"):
        return _Zlib()
    if start.startswith(b"BZh"):
        return bz2.BZ2Decompressor()
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    return None


_MAGIC: Final = 6
"""Bytes that tell what the data is."""


class Lines:
    """The lines of a text whose bytes come piece by piece; it may be packed by gzip, bzip2 or xz.

    Args:
        max_bytes: of the whole text, unpacked.
        max_line: bytes of one line.
    """

    def __init__(self, max_bytes: int, max_line: int) -> None:
        self._left = max_bytes
        self._max_line = max_line
        self._line = bytearray()
        self._unpacker: _Unpacker | None = None
        self._streams = 0
        # What has come of a stream of which is not known yet how it is packed; None where it is known.
        self._start: bytes | None = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that these bytes complete, without their ends.

        Raises:
            TooLong, LineTooLong, Damaged: nothing more can be fed then.
        """
        for piece in self._unpacked(data, last=False):
            yield from self._cut(piece)

    def end(self) -> Iterator[bytes]:
        """The last line, if the text does not end with a line's end.

        Raises:
            TooLong, LineTooLong, Damaged: as for `feed`; compressed data is cut short.
        """
        for piece in self._unpacked(b"", last=True):
            yield from self._cut(piece)
        if self._start is None and self._unpacker is not None:
            raise Damaged
        if self._line:
            yield bytes(self._line)

    def _cut(self, piece: bytes) -> Iterator[bytes]:
        self._left -= len(piece)
        if self._left < 0:
            raise TooLong
        *whole, rest = piece.split(b"\n")
        for part in whole:
            self._grow(part)
            yield bytes(self._line)
            self._line.clear()
        self._grow(rest)

    def _grow(self, part: bytes) -> None:
        if len(self._line) + len(part) > self._max_line:
            raise LineTooLong
        self._line += part

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
                    # Several streams, one after the other, are one text.
                    self._start, data = b"", self._unpacker.unused_data
                elif not piece:
                    return
                else:
                    data = b""
        except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
            raise Damaged from error

    def _begin(self, data: bytes, last: bool) -> bool:
        """Whether enough of a stream has come to know how it is packed."""
        assert self._start is not None
        self._start += data
        if self._streams:
            self._start = self._start.lstrip(b"\0")  # zeros may pad the end
        if not self._start or (len(self._start) < _MAGIC and not last):
            return False
        self._unpacker = _unpacker_of(self._start)
        if self._streams and self._unpacker is None:
            raise Damaged
        self._streams += 1
        return True
