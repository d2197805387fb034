"""Calls written as Python: `[f(a=1, b="x"), g()]` (Llama 3.2 and 4, ToolACE and others)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import NAME_LIMIT, NotAValue, malformed
from rollyard_pipeline.tool_parsers.literals import literal_at, skip_blank
from rollyard_pipeline.tool_parsers.turn import TurnReader

_MARK: Final = r"<\|python_(?:tag|start)\|>"
_NAME: Final = re.compile(r"[^\W\d][\w.]*+")
_ARGUMENT: Final = re.compile(r"(?P<name>[^\W\d]\w*+)\s*+=(?!=)")
# Prose must not match: the list's first item is called with a name=, a literal or nothing.
_LIST: Final = r"""^[ \t]*(?=\[\s*[^\W\d][\w.]*+\s*+\(\s*+(?:\)|[^\W\d]\w*+\s*+=|["'\d\[{-]))"""
_END: Final = re.compile(r"\s*(?:<\|python_end\|>|<\|eom_id\|>|<\|eot_id\|>)")


class PythonicParser:
    """Finds lists of calls that begin a line, or follow `<|python_start|>`. Nothing is evaluated."""

    def __init__(self) -> None:
        self._reader = TurnReader(rf"(?P<mark>{_MARK})|{_LIST}", _calls)

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        return self._reader.parse(text)


def _calls(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    calls: list[ParsedCall] = []
    try:
        at = _list(text, skip_blank(text, mark.end()), calls)
    except NotAValue as error:
        line = text.find("\n", error.at)
        where = error.at - mark.end()
        # None of the list is run: the model sees one error and can write the list again.
        return [malformed(f"{error} at character {where}")], len(text) if line < 0 else line
    ended = _END.match(text, at)
    return calls, ended.end() if ended is not None else at


def _list(text: str, at: int, calls: list[ParsedCall]) -> int:
    """Read `[call, call, …]`, or one call without brackets, into `calls`, and return the index after it."""
    bracket = text.startswith("[", at)
    at = skip_blank(text, at + bracket)
    while True:
        call, at = _call(text, at)
        calls.append(call)
        at = skip_blank(text, at)
        if not bracket:
            return at
        if text.startswith(",", at):
            at = skip_blank(text, at + 1)
            if not text.startswith("]", at):
                continue
        if not text.startswith("]", at):
            raise NotAValue("expected ',' or ']' after a call", at)
        return at + 1


def _call(text: str, at: int) -> tuple[ParsedCall, int]:
    name = _NAME.match(text, at)
    if name is None or len(name[0]) > NAME_LIMIT:
        raise NotAValue("expected the name of a tool", at)
    at = skip_blank(text, name.end())
    if not text.startswith("(", at):
        raise NotAValue(f"expected '(' after {name[0]}", at)
    arguments: dict[str, Any] = {}
    at = skip_blank(text, at + 1)
    while not text.startswith(")", at):
        argument = _ARGUMENT.match(text, at)
        if argument is None:
            raise NotAValue("expected an argument by name (name=value)", at)
        if argument["name"] in arguments:
            raise NotAValue(f"argument '{argument['name']}' is given twice", at)
        value, at = literal_at(text, argument.end())
        arguments[argument["name"]] = value
        at = skip_blank(text, at)
        if text.startswith(",", at):
            at = skip_blank(text, at + 1)
        elif not text.startswith(")", at):
            raise NotAValue("expected ',' or ')' after an argument", at)
    return ParsedCall(name[0], arguments), at + 1
