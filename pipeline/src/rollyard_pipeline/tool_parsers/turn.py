"""A single pass over a turn's text, which finds thoughts, calls and the text around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn

ReadCalls: TypeAlias = Callable[[str, re.Match[str]], tuple[Sequence[ParsedCall], int]]
"""A function of the text and the match of a call's opening mark that returns the calls and an end index.

The index lies after the mark. If there are no calls, the mark was text after all.
"""

THINK: Final = ("<think>", "</think>")


class TurnReader:
    """Parses turns in which calls stand between marks, in time linear in the text.

    A thought is the text between the thinking marks, or the text before a closing mark without an opening one
    (some templates open the thought in the prompt). Calls in thoughts do not count. A closing mark within a
    well-formed call is a part of its arguments.

    Args:
        opening: Matches where a call begins.
        read: Reads the calls there.
        thought: The opening and the closing mark of thoughts.
    """

    def __init__(self, opening: str, read: ReadCalls, thought: tuple[str, str] = THINK) -> None:
        self._open, self._close = thought
        marks = "|".join(re.escape(mark) for mark in thought)
        self._marks = re.compile(f"(?P<thought>{marks})|(?:{opening})", re.MULTILINE)
        self._read = read

    def parse(self, text: str) -> ParsedTurn:
        """Return the turn's text outside its calls, thoughts included, and its calls."""
        outside: list[str] = []
        calls: list[ParsedCall] = []
        at = thoughts_end = 0
        while (mark := self._marks.search(text, at)) is not None:
            if mark["thought"] == self._open:
                end = text.find(self._close, mark.end())
                if end < 0:
                    break
                end += len(self._close)
                outside.append(text[at:end])
            elif mark["thought"] == self._close:
                calls.clear()
                end = mark.end()
                thoughts_end = end
                outside.clear()
            else:
                parsed, end = self._read(text, mark)
                thought = -1
                if any(call.error for call in parsed):
                    # The last mark is used, so no part of the text is read more than twice.
                    thought = text.rfind(self._close, mark.end(), end)
                if thought >= 0:  # The model mentioned a call in a thought, and the thought ended there.
                    calls.clear()
                    end = thought + len(self._close)
                    thoughts_end = end
                    outside.clear()
                elif parsed:
                    calls += parsed
                    outside.append(text[at : mark.start()])
                else:
                    outside.append(text[at:end])
            at = end
        outside.append(text[at:])
        return ParsedTurn((text[:thoughts_end] + "".join(outside)).strip(), tuple(calls))
