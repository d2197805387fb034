"""DeepSeek's calls, one or more between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

R1 and V3 write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a JSON code block and
`<｜tool▁call▁end｜>`; V3.1 writes `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import NAME_LIMIT, NotAValue, call_of, json_at, malformed, recover
from rollyard_pipeline.tool_parsers.turn import THINK, TurnReader

_BEGIN: Final = "<｜tool▁call▁begin｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_END: Final = "<｜tool▁call▁end｜>"
_HEAD: Final = re.compile(
    rf"\s*+(?P<first>[^<\n]{{0,{NAME_LIMIT}}}+){_SEPARATOR}"
    rf"(?:\s*+(?P<second>[^\s`{{<][^\n`{{<]{{0,{NAME_LIMIT}}}+))?\s*+(?P<fence>```(?:json)?)?"
)
_TAIL: Final = re.compile(rf"\s*+(?P<fence>```)?\s*+{_END}")
_RESUME: Final = re.compile(f"{_END}|(?={_BEGIN})")
_FRAME: Final = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>|<｜end▁of▁sentence｜>")


class DeepSeekParser:
    """Finds the calls of a turn. Text before `</think>` is a thought."""

    def __init__(self) -> None:
        self._reader = TurnReader(f"{_BEGIN}|{_FRAME.pattern}", _calls)

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        parsed = self._reader.parse(text)
        if not parsed.calls:
            return parsed
        thought, mark, answer = parsed.text.rpartition(THINK[1])
        return ParsedTurn((thought + mark + _FRAME.sub("", answer)).strip(), parsed.calls)


def _calls(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    if mark[0] != _BEGIN:
        return [], mark.end()
    head = _HEAD.match(text, mark.end())
    if head is None:
        return [malformed(f"expected the tool's name and {_SEPARATOR}")], recover(_RESUME, text, mark.end())
    # V3.1 has the name before the separator. The others have 'function' there and the name after it.
    name = (head["second"] or head["first"]).strip()
    try:
        value, end = json_at(text, head.end())
    except NotAValue as error:
        return [malformed(str(error), name)], recover(_RESUME, text, mark.end())
    tail = _TAIL.match(text, end)
    if tail is None:
        return [malformed(f"{_END} is missing after the JSON", name)], recover(_RESUME, text, end)
    if (tail["fence"] is None) != (head["fence"] is None):
        return [malformed("the JSON's code block is not opened or not closed", name)], tail.end()
    return [call_of(name, value)], tail.end()
