"""Kimi K2's calls, in one section of a turn:

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls -l"}<|tool_call_end|>
    <|tool_calls_section_end|>

The name of the tool stands in the call's id, between `functions.` and the number of the call.
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
    recover,
    skip_space,
)
from rollyard_pipeline.tool_parsers.turn import THINK, TurnReader

_SECTION: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
_BEGIN: Final = "<|tool_call_begin|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_END: Final = "<|tool_call_end|>"
_NEXT: Final = re.compile("|".join(re.escape(mark) for mark in (_BEGIN, _SECTION_END)))
_HEAD: Final = re.compile(rf"\s*+(?P<id>[^\s<]{{1,{NAME_LIMIT + 32}}}+)\s*+{re.escape(_ARGUMENTS)}")
_ID: Final = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d++)?")
_RESUME: Final = re.compile(f"{re.escape(_END)}|(?={re.escape(_BEGIN)}|{re.escape(_SECTION_END)})")
_EMPTY: Final = re.compile(rf"{re.escape(_SECTION)}\s*+{re.escape(_SECTION_END)}")


class KimiParser:
    """Finds the calls of a turn. Text in their section outside of calls is dropped."""

    def __init__(self) -> None:
        self._reader = TurnReader(re.escape(_SECTION), _calls)

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        parsed = self._reader.parse(text)
        thought, mark, answer = parsed.text.rpartition(THINK[1])
        return ParsedTurn((thought + mark + _EMPTY.sub("", answer)).strip(), parsed.calls)


def _calls(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    calls: list[ParsedCall] = []
    at = mark.end()
    while (following := _NEXT.search(text, at)) is not None:
        if following[0] == _SECTION_END:
            return calls, following.end()
        call, at = _call(text, following.end())
        calls.append(call)
    return calls or [malformed(f"expected {_BEGIN} after {_SECTION}")], len(text)


def _call(text: str, at: int) -> tuple[ParsedCall, int]:
    """Return the call whose id begins at `at`, and the index after it."""
    head = _HEAD.match(text, at)
    if head is None:
        return malformed(f"expected functions.NAME:NUMBER and {_ARGUMENTS}"), recover(_RESUME, text, at)
    match = _ID.fullmatch(head["id"])
    name = match["name"] if match is not None else ""
    try:
        # A value may contain the closing mark as text, so the JSON itself determines where it ends.
        value, end = json_at(text, head.end())
    except NotAValue as error:
        return malformed(str(error), name), recover(_RESUME, text, head.end())
    after = skip_space(text, end)
    if not text.startswith(_END, after):
        return malformed(f"{_END} is missing after the JSON", name), recover(_RESUME, text, end)
    return call_of(name, value), after + len(_END)
