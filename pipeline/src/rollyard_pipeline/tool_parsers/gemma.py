"""Gemma 4's calls: `<|tool_call>call:bash{command:<|"|>ls -l<|"|>,limits:{cpu:2}}<tool_call|>`.

The arguments are an object whose keys have no quotes. Strings stand between two marks `<|"|>` and have no
escapes. Numbers and constants are written as in JSON or in Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import NAME_LIMIT, NotAValue, malformed, recover
from rollyard_pipeline.tool_parsers.literals import MAX_DEPTH, literal_at, skip_blank
from rollyard_pipeline.tool_parsers.turn import TurnReader

_OPEN: Final = "<|tool_call>"
_CLOSE: Final = "<tool_call|>"
_QUOTE: Final = '<|"|>'
_HEAD: Final = re.compile(rf"\s*+call:(?P<name>[^\s{{}}<>]{{1,{NAME_LIMIT}}}+)\s*+(?=\{{)")
_KEY: Final = re.compile(r"(?P<key>[^:,{}\[\]<>\n]{1,256}+):")
_RESUME: Final = re.compile(rf"{re.escape(_CLOSE)}|(?={re.escape(_OPEN)})")


class GemmaParser:
    """Finds the calls of a turn. The text of `<|channel>…<channel|>` is a thought."""

    def __init__(self) -> None:
        self._reader = TurnReader(re.escape(_OPEN), _call, ("<|channel>", "<channel|>"))

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        return self._reader.parse(text)


def _call(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    head = _HEAD.match(text, mark.end())
    if head is None:
        return [malformed("expected call:NAME{KEY:VALUE,…}")], recover(_RESUME, text, mark.end())
    try:
        arguments, at = _value(text, head.end(), 0)
        end = skip_blank(text, at)
        if not text.startswith(_CLOSE, end):
            raise NotAValue(f"{_CLOSE} is missing after the arguments", at)
    except NotAValue as error:
        why = f"{error} at character {error.at - mark.end()}"
        return [malformed(why, head["name"])], recover(_RESUME, text, error.at)
    return [ParsedCall(head["name"], arguments)], end + len(_CLOSE)


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value at `at`, after whitespace, and the index where it ends.

    Raises:
        NotAValue: There is no value, or it is nested deeper than MAX_DEPTH.
    """
    at = skip_blank(text, at)
    if depth > MAX_DEPTH:
        raise NotAValue(f"a value nests deeper than {MAX_DEPTH}", at)
    if text.startswith(_QUOTE, at):
        return _string(text, at)
    if text.startswith("[", at):
        items: list[Any] = []
        at = skip_blank(text, at + 1)
        while not text.startswith("]", at):
            item, at = _value(text, at, depth + 1)
            items.append(item)
            at = _after_item(text, at, "]")
        return items, at + 1
    if text.startswith("{", at):
        return _object(text, at, depth)
    if text[at : at + 1] in ("(", '"', "'"):
        raise NotAValue(f"expected a value, with {_QUOTE} around a string", at)
    return literal_at(text, at)


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    pairs: dict[str, Any] = {}
    at = skip_blank(text, at + 1)
    while not text.startswith("}", at):
        match = _KEY.match(text, at)
        if match is None:
            raise NotAValue("expected KEY:VALUE", at)
        key = match["key"].strip()
        if key in pairs:
            raise NotAValue(f"key '{key}' is given twice", at)
        pairs[key], at = _value(text, match.end(), depth + 1)
        at = _after_item(text, at, "}")
    return pairs, at + 1


def _after_item(text: str, at: int, close: str) -> int:
    """Return the index of the next item or of the mark `close`."""
    at = skip_blank(text, at)
    if text.startswith(",", at):
        return skip_blank(text, at + 1)
    if not text.startswith(close, at):
        raise NotAValue(f"expected ',' or '{close}'", at)
    return at


def _string(text: str, at: int) -> tuple[str, int]:
    start = at + len(_QUOTE)
    end = text.find(_QUOTE, start)
    if end < 0:
        raise NotAValue(f"a string has no closing {_QUOTE}", len(text))
    return text[start:end], end + len(_QUOTE)
