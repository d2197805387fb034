"""A text that was pickled, compressed and written in base64 is read without unpickling anything."""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from typing import Final

from rollyard_tasks.errors import TasksError

MAX_BYTES: Final = 48 << 20
"""The largest size after decompression, in bytes."""
_TEXTS: Final = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_HARMLESS: Final = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


class PickleRefused(TasksError, ValueError):
    """The data is no pickle of one text."""

    reason = "InvalidTasks"


def pickled_text(data: str) -> str:
    """Return the text in a base64 text of compressed pickle.

    The pickle's instructions are listed and never carried out. Only those of a single text are permitted.

    Raises:
        PickleRefused: The data holds anything else, or is too long.
    """
    try:
        packed = base64.b64decode(data, validate=True)
        del data  # Each of the forms may be large.
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(packed, MAX_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise PickleRefused("is no compressed data in base64") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise PickleRefused(f"is damaged, or longer than {MAX_BYTES} bytes")
    del packed
    texts: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(raw):
            if operation.name in _TEXTS:
                texts.append(str(argument))
            elif operation.name not in _HARMLESS:
                raise PickleRefused("holds something other than a text, and is not loaded")
    except PickleRefused:
        raise
    except Exception as error:
        raise PickleRefused("is no pickle") from error
    if len(texts) != 1:
        raise PickleRefused("holds something other than a text, and is not loaded")
    return texts[0]
