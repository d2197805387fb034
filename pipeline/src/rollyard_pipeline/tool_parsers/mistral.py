"""Mistral's calls: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or a newer form.

Since the tokenizers of version 11 it is `[TOOL_CALLS]name[ARGS]{…}`, once for each call (`[CALL_ID]…` may
precede `[ARGS]`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import (
    NAME_LIMIT,
    NotAValue,
    call_of,
    json_at,
    malformed,
    named_call,
    skip_space,
)
from rollyard_pipeline.tool_parsers.turn import TurnReader

_OPEN: Final = "[TOOL_CALLS]"
_HEAD: Final = re.compile(
    rf"\s*+(?P<name>[\w.:/-]{{1,{NAME_LIMIT}}}+)\s*+"
    r"(?:\[CALL_ID\]\s*+\w{0,64}+\s*+)?(?:\[ARGS\]|(?=\{))"
)


class MistralParser:
    """Finds the calls of a turn. The text of `[THINK]…[/THINK]` is a thought."""

    def __init__(self) -> None:
        self._reader = TurnReader(re.escape(_OPEN), _calls, ("[THINK]", "[/THINK]"))

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        return self._reader.parse(text)


def _calls(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    start = skip_space(text, mark.end())
    head = None if text[start : start + 1] in ("[", "{") else _HEAD.match(text, start)
    try:
        if head is not None:
            arguments, end = json_at(text, head.end())
            return [call_of(head["name"], arguments)], end
        if text[start : start + 1] not in ("[", "{"):
            raise NotAValue("expected a JSON list of calls, or name[ARGS]{…}", start)
        value, end = json_at(text, start)
    except NotAValue as error:
        following = text.find(_OPEN, max(error.at, mark.end()))
        call = malformed(str(error), head["name"] if head is not None else "")
        return [call], len(text) if following < 0 else following
    items = value if isinstance(value, list) else [value]
    if not items:
        return [malformed("the list of calls is empty")], end
    return [named_call(item) for item in items], end
