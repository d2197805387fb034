"""Python literals in a text: strings, numbers, constants, lists, tuples and dictionaries of them.

The module does not use `ast`, because the text comes from a model: its nesting determines the stack and
memory that `ast` needs, and `ast` does not report where a literal ends.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Final

from rollyard_pipeline.tool_parsers.calls import NotAValue

MAX_DEPTH: Final = 100
"""The deepest nesting of lists and dictionaries that is read."""

_BLANK: Final = re.compile(r"\s*+")
_STRING: Final = re.compile(
    r'(?P<raw>[rR])?(?:"""(?P<ddd>(?:[^"\\]|\\.|"(?!""))*+)"""'
    r"|'''(?P<sss>(?:[^'\\]|\\.|'(?!''))*+)'''"
    r'|"(?P<d>(?:[^"\\]|\\.)*+)"'
    r"|'(?P<s>(?:[^'\\]|\\.)*+)')",
    re.DOTALL,
)
_NUMBER: Final = re.compile(
    r"(?P<hex>[+-]?0[xX][0-9a-fA-F]++)"
    r"|(?P<float>[+-]?(?:\d++\.\d*+(?:[eE][+-]?\d++)?|\.\d++(?:[eE][+-]?\d++)?|\d++[eE][+-]?\d++))"
    r"|(?P<int>[+-]?\d++(?:_\d++)*+)"
)
_WORD: Final = re.compile(r"[^\W\d]\w*+")
_CONSTANTS: Final[dict[str, bool | None]] = {
    # The second three are JSON's, because models confuse the two.
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_ESCAPE: Final = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|N\{(?P<N>[^}]{1,100})\}|(?P<o>[0-7]{1,3})|(?P<c>.))",
    re.DOTALL,
)
_CHARACTERS: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}


def skip_blank(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is not whitespace."""
    blank = _BLANK.match(text, at)
    return at if blank is None else blank.end()


def literal_at(text: str, at: int, depth: int = 0) -> tuple[Any, int]:
    """Return the literal at `at`, after whitespace, and the index where it ends. Tuples become lists.

    Raises:
        NotAValue: There is no literal, or it is nested deeper than MAX_DEPTH.
    """
    at = skip_blank(text, at)
    if depth > MAX_DEPTH:
        raise NotAValue(f"a value nests deeper than {MAX_DEPTH}", at)
    first = text[at : at + 1]
    if first and first in "[(":
        return _items(text, at, depth)
    if first == "{":
        return _pairs(text, at, depth)
    if (number := _NUMBER.match(text, at)) is not None:
        return _number(number), number.end()
    if _STRING.match(text, at) is not None:
        return _strings(text, at)
    if first and first in "\"'":
        raise NotAValue("a string is not closed", len(text))
    word = _WORD.match(text, at)
    if word is not None and word[0] in _CONSTANTS:
        return _CONSTANTS[word[0]], word.end()
    raise NotAValue("expected a literal value", at)


def _number(match: re.Match[str]) -> int | float:
    try:
        if match["hex"] is not None:
            return int(match["hex"], 16)
        return float(match["float"]) if match["float"] is not None else int(match["int"])
    except ValueError as error:  # The number has more digits than the interpreter converts.
        raise NotAValue("a number is too long", match.end()) from error


def _strings(text: str, at: int) -> tuple[str, int]:
    """Read one string literal, or several adjacent ones, which Python joins."""
    pieces: list[str] = []
    end = at
    while (match := _STRING.match(text, skip_blank(text, end))) is not None:
        body = next(body for body in (match["ddd"], match["sss"], match["d"], match["s"]) if body is not None)
        pieces.append(body if match["raw"] else _ESCAPE.sub(_unescaped, body))
        end = match.end()
    return "".join(pieces), end


def _unescaped(match: re.Match[str]) -> str:
    if (code := match["x"] or match["u"] or match["U"]) is not None:
        number = int(code, 16)
        return chr(number) if number <= 0x10FFFF else match[0]
    if match["o"] is not None:
        return chr(int(match["o"], 8))
    if match["N"] is not None:
        try:
            return unicodedata.lookup(match["N"])
        except KeyError:
            return match[0]
    return _CHARACTERS.get(match["c"], match[0])  # An unknown escape is kept unchanged, as in Python.


def after_item(text: str, at: int, close: str, item: str = "") -> int:
    """Return the index of the next item of a list whose last one ends at `at`, or of the mark `close`.

    Args:
        item: What an item is called in the message.

    Raises:
        NotAValue: There is neither a comma nor the mark.
    """
    at = skip_blank(text, at)
    if text.startswith(",", at):
        return skip_blank(text, at + 1)
    if not text.startswith(close, at):
        raise NotAValue(f"expected ',' or '{close}'{f' after {item}' if item else ''}", at)
    return at


def _items(text: str, at: int, depth: int) -> tuple[Any, int]:
    close = "]" if text[at] == "[" else ")"
    items: list[Any] = []
    end = at
    at = skip_blank(text, at + 1)
    while not text.startswith(close, at):
        item, end = literal_at(text, at, depth + 1)
        items.append(item)
        at = after_item(text, end, close)
    if close == ")" and len(items) == 1 and skip_blank(text, end) == at:
        return items[0], at + 1  # These are parentheses around a value, without a comma.
    return items, at + 1


def _pairs(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    pairs: dict[str, Any] = {}
    at = skip_blank(text, at + 1)
    while not text.startswith("}", at):
        key, end = literal_at(text, at, depth + 1)
        if not isinstance(key, str | int | float | bool):
            raise NotAValue("a key must be a string or a number", at)
        at = skip_blank(text, end)
        if not text.startswith(":", at):
            raise NotAValue("expected ':' after a key", at)
        pairs[key if isinstance(key, str) else str(key)], at = literal_at(text, at + 1, depth + 1)
        at = after_item(text, at, "}")
    return pairs, at + 1
