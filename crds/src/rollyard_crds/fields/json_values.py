"""JSON values from outside: their number, their depth, and whether UTF-8 can express their texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

MAX_VALUES: Final = 1_000_000
"""The largest number of values in one row, counted by commas and opening brackets. Each takes about a hundred
bytes of memory, however short its text is."""
_VALUE: Final = r'(?:[^",\[{]++|"(?:[^"\\]++|\\.)*+"?)*+[,\[{]'
_VALUES: Final = re.compile(_VALUE, re.S), re.compile(_VALUE.encode(), re.S)
HALF_CHARACTER: Final = (
    "holds half of a character, such as \\ud800 alone, which UTF-8 cannot express: write the whole "
    "character, such as \\ud83d\\ude00, or \\ufffd"
)
"""What is wrong with a text that `lone_surrogate` finds, and what would be right."""


def too_many_values(text: str | bytes | bytearray) -> bool:
    """Return whether a JSON text has more than `MAX_VALUES` values, without building any of them."""
    if len(text) <= MAX_VALUES:
        return False
    # Characters within texts count here as well, so this can only say that there are few enough.
    marks: tuple[Any, ...] = tuple(",[{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, marks)) <= MAX_VALUES:
        return False
    pattern: re.Pattern[Any] = _VALUES[not isinstance(text, str)]
    count, at = 0, 0
    while count <= MAX_VALUES and (value := pattern.match(text, at)) is not None:
        count, at = count + 1, value.end()
    return count > MAX_VALUES


def deeper_than(document: Any, most: int) -> bool:
    """Return whether lists and dicts nest more than `most` deep. No depth exhausts the stack."""
    level: list[Any] = [document]
    for _ in range(most + 1):
        level = [
            value
            for value in level
            if type(value) is dict or type(value) is list  # as JSON gives them
        ]
        if not level:
            return False
        level = list(chain.from_iterable(v.values() if type(v) is dict else v for v in level))
    return True


def lone_surrogate(document: Any) -> tuple[int | str, ...] | None:
    """Return where a document has a text with half a character, or None if it has none.

    JSON can express such a text, as `"\\ud800"`, and UTF-8 cannot. The result is the keys and indices that
    lead to it. No depth exhausts the stack.
    """
    waiting: list[tuple[tuple[int | str, ...], Any]] = [((), document)]
    while waiting:
        path, value = waiting.pop()
        pairs: Iterable[tuple[Any, Any]] = ()
        if type(value) is dict:
            for key in value:
                if type(key) is str and not _whole(key):
                    return (*path, ascii(key)[1:-1])
            pairs = value.items()
        elif type(value) is list:
            pairs = enumerate(value)
        for key, inner in pairs:
            if type(inner) is str:
                if not _whole(inner):
                    return (*path, key)
            elif type(inner) is dict or type(inner) is list:
                waiting.append(((*path, key), inner))
    return None


def _whole(text: str) -> bool:
    try:
        return text.isascii() or text.encode() is not None
    except UnicodeEncodeError:
        return False
