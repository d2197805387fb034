"""Llama 3's JSON calls: `<|python_tag|>{"name": …, "parameters": {…}}`, several separated by `;`.

The mark is optional (Llama 3.2 omits it; Llama 4 writes `<|python_start|>`). Without it, an object is a
call only if it begins a line and has a name and parameters. Any other object is an answer in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import NotAValue, json_at, malformed, named_call, skip_space
from rollyard_pipeline.tool_parsers.turn import TurnReader

_MARK: Final = r"<\|python_(?:tag|start)\|>"
_OBJECT: Final = r'^[ \t]*(?=\{\s*"(?:name|type|function|parameters|arguments)"\s*:)'
_KEYS: Final = ("parameters", "arguments")
_END: Final = re.compile(r"\s*(?:<\|python_end\|>|<\|eom_id\|>|<\|eot_id\|>)")
_NEXT: Final = re.compile(r"\s*;\s*(?=\{)")


class LlamaJsonParser:
    """Finds the calls of a turn of a Llama 3 model."""

    def __init__(self) -> None:
        self._reader = TurnReader(rf"(?P<mark>{_MARK})|{_OBJECT}", _calls)

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        return self._reader.parse(text)


def _calls(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    calls: list[ParsedCall] = []
    at = mark.end()
    marked = mark["mark"] is not None
    while True:
        call, at = _call(text, at, marked=marked or bool(calls))
        if call is None:
            return calls, at
        calls.append(call)
        following = _NEXT.match(text, at)
        if call.error is not None or following is None:
            break
        at = following.end()
    ended = _END.match(text, at)
    return calls, ended.end() if ended is not None else at


def _call(text: str, at: int, *, marked: bool) -> tuple[ParsedCall | None, int]:
    """Return the call at `at` and where it ends. The call is None if the object is text."""
    start = skip_space(text, at)
    try:
        value, end = json_at(text, start)
    except NotAValue as error:
        line = text.find("\n", error.at)
        return malformed(str(error)), len(text) if line < 0 else line
    if marked:
        return named_call(value, _KEYS), end
    if not isinstance(value, dict) or "name" not in value:
        return None, end
    if not any(key in value for key in _KEYS):
        # An answer in JSON may have a name. An object that has only a name is a call without the rest.
        if set(value) - {"name", "type"}:
            return None, end
        return malformed("'parameters' is missing", str(value["name"])), end
    return named_call(value, _KEYS), end
