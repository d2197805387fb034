"""A stream of bytes is decompressed if need be, within bounds from the beginning."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from rollyard_tasks.row_texts import FileRefused

PIECE_BYTES: Final = 1 << 20
"""The number of bytes that are decompressed at once."""
_XZ_MEMORY: Final = 64 << 20
"""The memory in bytes that an xz stream may ask for. The presets up to -6 need less for decompression."""


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
            FileRefused: The text is too long, or the file is damaged. Nothing more can be fed after this.
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
                    # Several streams in sequence are one text.
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
