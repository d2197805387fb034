"""The parsers of formats in which the arguments of a call are Python literals, and the reader of these.

A literal is a string, a number, a constant, or a list, a tuple or a dictionary of literals. It is not read by
`ast`, because the text comes from a model: its nesting determines the stack and memory that `ast` needs, and
`ast` does not report where a literal ends.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Final

from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.tool_parsers.calls import NAME_LIMIT, MarkedParser, NotAValue, malformed, recover
from rollyard_pipeline.tool_parsers.instructions import PYTHONIC, Tools, described, json_text

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


def _written(value: Any) -> str:
    """Return the literal of a value, which `literal_at` reads. A string is written as in JSON."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(key)}: {_written(entry)}' for key, entry in value.items())}}}"
    return json_text(value) if isinstance(value, str) else repr(value)


class PythonicParser(MarkedParser):
    """Finds calls that are written as Python: `[f(a=1, b="x"), g()]` (Llama 3.2 and 4, ToolACE and others).

    Their list begins a line, or follows `<|python_start|>`. Nothing is evaluated.
    """

    # Prose must not match: the list's first item is called with a name=, a literal or nothing.
    opening = (
        r"(?P<mark><\|python_(?:tag|start)\|>)"
        r"""|^[ \t]*(?=\[\s*[^\W\d][\w.]*+\s*+\(\s*+(?:\)|[^\W\d]\w*+\s*+=|["'\d\[{-]))"""
    )
    begins = ("<|python_", "[")
    _NAME: Final = re.compile(r"[^\W\d][\w.]*+")
    _ARGUMENT: Final = re.compile(r"(?P<name>[^\W\d]\w*+)\s*+=(?!=)")
    _END: Final = re.compile(r"\s*(?:<\|python_end\|>|<\|eom_id\|>|<\|eot_id\|>)")

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the calls of the list that begins with `mark`, and the index after it."""
        calls: list[ParsedCall] = []
        try:
            at = self._list(text, skip_blank(text, mark.end()), calls)
        except NotAValue as error:
            line = text.find("\n", error.at)
            where = error.at - mark.end()
            # None of the list is run: the model sees one error and can write the list again.
            return [malformed(f"{error} at character {where}")], len(text) if line < 0 else line
        ended = self._END.match(text, at)
        return calls, ended.end() if ended is not None else at

    def _list(self, text: str, at: int, calls: list[ParsedCall]) -> int:
        """Read `[call, call, …]`, or one call without brackets, into `calls`, and return the index after."""
        bracket = text.startswith("[", at)
        at = skip_blank(text, at + bracket)
        while not calls or not text.startswith("]", at):
            call, at = self._call(text, at)
            calls.append(call)
            if not bracket:
                return skip_blank(text, at)
            at = after_item(text, at, "]", "a call")
        return at + 1

    def _call(self, text: str, at: int) -> tuple[ParsedCall, int]:
        name = self._NAME.match(text, at)
        if name is None or len(name[0]) > NAME_LIMIT:
            raise NotAValue("expected the name of a tool", at)
        at = skip_blank(text, name.end())
        if not text.startswith("(", at):
            raise NotAValue(f"expected '(' after {name[0]}", at)
        arguments: dict[str, Any] = {}
        at = skip_blank(text, at + 1)
        while not text.startswith(")", at):
            argument = self._ARGUMENT.match(text, at)
            if argument is None:
                raise NotAValue("expected an argument by name (name=value)", at)
            if argument["name"] in arguments:
                raise NotAValue(f"argument '{argument['name']}' is given twice", at)
            arguments[argument["name"]], at = literal_at(text, argument.end())
            at = after_item(text, at, ")", "an argument")
        return ParsedCall(name[0], arguments), at + 1

    def instructions(self, tools: Tools) -> str:
        """Return what the system message says of the tools and the format, in Llama's words."""
        return described(PYTHONIC, tools, "\n\n")

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls of one turn as the model would write them."""
        each = (
            f"{call.name}({', '.join(f'{key}={_written(value)}' for key, value in call.arguments.items())})"
            for call in calls
        )
        return f"[{', '.join(each)}]"


class GemmaParser(MarkedParser):
    """Finds Gemma 4's calls: `<|tool_call>call:bash{command:<|"|>ls -l<|"|>,limits:{cpu:2}}<tool_call|>`.

    The arguments are an object whose keys have no quotes. Strings stand between two marks `<|"|>` and have no
    escapes. Numbers and constants are written as in JSON or in Python. The text of `<|channel>…<channel|>` is
    a thought.
    """

    opening = r"<\|tool_call>"
    thought = ("<|channel>", "<channel|>")
    begins = ("<|tool_call>",)
    _CLOSE: Final = "<tool_call|>"
    _QUOTE: Final = '<|"|>'
    _HEAD: Final = re.compile(rf"\s*+call:(?P<name>[^\s{{}}<>]{{1,{NAME_LIMIT}}}+)\s*+(?=\{{)")
    _KEY: Final = re.compile(r"(?P<key>[^:,{}\[\]<>\n]{1,256}+):")
    _RESUME: Final = re.compile(rf"{re.escape(_CLOSE)}|(?={opening})")

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the call that begins with `mark`, and the index after it."""
        head = self._HEAD.match(text, mark.end())
        if head is None:
            problem = "expected call:NAME{KEY:VALUE,…}"
            return [malformed(problem)], recover(self._RESUME, text, mark.end())
        try:
            arguments, at = self._value(text, head.end(), 0)
            end = skip_blank(text, at)
            if not text.startswith(self._CLOSE, end):
                raise NotAValue(f"{self._CLOSE} is missing after the arguments", at)
        except NotAValue as error:
            why = f"{error} at character {error.at - mark.end()}"
            return [malformed(why, head["name"])], recover(self._RESUME, text, error.at)
        return [ParsedCall(head["name"], arguments)], end + len(self._CLOSE)

    def _value(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        """Return the value at `at`, after whitespace, and the index where it ends.

        Raises:
            NotAValue: There is no value, or it is nested deeper than MAX_DEPTH.
        """
        at = skip_blank(text, at)
        if depth > MAX_DEPTH:
            raise NotAValue(f"a value nests deeper than {MAX_DEPTH}", at)
        if text.startswith(self._QUOTE, at):
            start = at + len(self._QUOTE)
            end = text.find(self._QUOTE, start)
            if end < 0:
                raise NotAValue(f"a string has no closing {self._QUOTE}", len(text))
            return text[start:end], end + len(self._QUOTE)
        if text.startswith("[", at):
            items: list[Any] = []
            at = skip_blank(text, at + 1)
            while not text.startswith("]", at):
                item, at = self._value(text, at, depth + 1)
                items.append(item)
                at = after_item(text, at, "]")
            return items, at + 1
        if text.startswith("{", at):
            return self._object(text, at, depth)
        if text[at : at + 1] in ("(", '"', "'"):
            raise NotAValue(f"expected a value, with {self._QUOTE} around a string", at)
        return literal_at(text, at)

    def _object(self, text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
        pairs: dict[str, Any] = {}
        at = skip_blank(text, at + 1)
        while not text.startswith("}", at):
            match = self._KEY.match(text, at)
            if match is None:
                raise NotAValue("expected KEY:VALUE", at)
            key = match["key"].strip()
            if key in pairs:
                raise NotAValue(f"key '{key}' is given twice", at)
            pairs[key], at = self._value(text, match.end(), depth + 1)
            at = after_item(text, at, "}")
        return pairs, at + 1
