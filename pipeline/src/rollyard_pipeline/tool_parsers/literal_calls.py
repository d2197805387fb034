"""The parsers of formats in which the arguments of a call are literals, as in Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.tool_parsers.calls import NAME_LIMIT, MarkedParser, NotAValue, malformed, recover
from rollyard_pipeline.tool_parsers.literals import MAX_DEPTH, after_item, literal_at, skip_blank


class PythonicParser(MarkedParser):
    """Finds calls that are written as Python: `[f(a=1, b="x"), g()]` (Llama 3.2 and 4, ToolACE and others).

    Their list begins a line, or follows `<|python_start|>`. Nothing is evaluated.
    """

    # Prose must not match: the list's first item is called with a name=, a literal or nothing.
    opening = (
        r"(?P<mark><\|python_(?:tag|start)\|>)"
        r"""|^[ \t]*(?=\[\s*[^\W\d][\w.]*+\s*+\(\s*+(?:\)|[^\W\d]\w*+\s*+=|["'\d\[{-]))"""
    )
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


class GemmaParser(MarkedParser):
    """Finds Gemma 4's calls: `<|tool_call>call:bash{command:<|"|>ls -l<|"|>,limits:{cpu:2}}<tool_call|>`.

    The arguments are an object whose keys have no quotes. Strings stand between two marks `<|"|>` and have no
    escapes. Numbers and constants are written as in JSON or in Python. The text of `<|channel>…<channel|>` is
    a thought.
    """

    opening = r"<\|tool_call>"
    thought = ("<|channel>", "<channel|>")
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
