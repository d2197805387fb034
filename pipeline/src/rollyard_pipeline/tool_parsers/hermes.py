"""The Hermes format of Qwen and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import NotAValue, json_at, malformed, named_call, skip_space
from rollyard_pipeline.tool_parsers.turn import TurnReader

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


class HermesParser:
    """Finds every call of a turn. Calls inside `<think>` are thoughts, not calls."""

    def __init__(self) -> None:
        self._reader = TurnReader(_OPEN, _call)

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        return self._reader.parse(text)


def _call(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    # A value may contain the closing mark as text, so the JSON itself determines where it ends.
    try:
        value, end = json_at(text, mark.end())
    except NotAValue as error:
        closed = text.find(_CLOSE, mark.end())
        if closed < 0:
            return [malformed(f"{_CLOSE} is missing")], len(text)
        return [malformed(str(error))], closed + len(_CLOSE)
    after = skip_space(text, end)
    if text.startswith(_CLOSE, after):
        return [named_call(value)], after + len(_CLOSE)
    closed = text.find(_CLOSE, after)
    if closed < 0:
        return [malformed(f"{_CLOSE} is missing")], len(text)
    return [malformed(f"text between the JSON and {_CLOSE}")], closed + len(_CLOSE)
