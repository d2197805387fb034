"""DeepSeek's calls since V3.2, in elements whose names begin with `｜DSML｜`:

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="bash">
    <｜DSML｜parameter name="command" string="true">ls -l</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

V3.2 calls the outer element `function_calls`. V4.1 calls it `calls` and writes a space after `｜DSML｜`. With
`string="true"`, a value is plain text, all of whose whitespace is data. Else it is JSON. Neither is escaped.
A value therefore ends at the first closing tag that is followed by another parameter or by the end of the
call, and it cannot contain a whole opening tag of a parameter: the closing tag before that one is missing, or
the call is a draft in a thought.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import (
    NAME_LIMIT,
    NotAValue,
    json_value,
    malformed,
    recover,
    skip_space,
)
from rollyard_pipeline.tool_parsers.turn import TurnReader

_TAG: Final = "<｜DSML｜ ?"
_END_TAG: Final = "</｜DSML｜ ?"
_BLOCK: Final = "(?:function_|tool_)?calls>"
_BLOCK_END: Final = re.compile(rf"\s*+{_END_TAG}{_BLOCK}")
_INVOKE: Final = re.compile(
    rf'\s*+{_TAG}invoke name="(?P<name>[^"<>\n]{{1,{NAME_LIMIT}}}+)"\s*+(?:>|(?P<empty>/>))'
)
_PARAMETER: Final = re.compile(
    rf'{_TAG}parameter name="(?P<key>[^"\n]{{1,256}}+)" string="(?:(?P<string>true)|false)">'
)
_VALUE_END: Final = re.compile(rf"{_END_TAG}parameter>(?=\s*+(?:{_TAG}parameter name=|{_END_TAG}invoke>))")
_CALL_END: Final = re.compile(rf"\s*+{_END_TAG}invoke>")
_NEXT_BLOCK: Final = re.compile(f"{_END_TAG}{_BLOCK}|(?={_TAG}{_BLOCK})")
_RESUME: Final = re.compile(rf"{_END_TAG}invoke>|(?={_TAG}invoke |{_END_TAG}{_BLOCK})")


class DsmlParser:
    """Finds the calls of a turn of DeepSeek V3.2 or later. Text before `</think>` is a thought."""

    def __init__(self) -> None:
        self._reader = TurnReader(f"{_TAG}{_BLOCK}", _calls)

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        return self._reader.parse(text)


def _calls(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    calls: list[ParsedCall] = []
    at = mark.end()
    while (invoke := _INVOKE.match(text, at)) is not None:
        call, at = _call(text, invoke)
        calls.append(call)
    ended = _BLOCK_END.match(text, at)
    if ended is not None:
        return calls, ended.end()
    if not calls or skip_space(text, at) < len(text):
        calls.append(malformed('expected <｜DSML｜invoke name="NAME"> or the end of the calls'))
        at = recover(_NEXT_BLOCK, text, at)
    return calls, at


def _call(text: str, invoke: re.Match[str]) -> tuple[ParsedCall, int]:
    """Return the call that begins with the tag `invoke`, and the index after it."""
    name, at = invoke["name"], invoke.end()
    arguments: dict[str, Any] = {}
    if invoke["empty"] is not None:
        return ParsedCall(name), at
    while (parameter := _PARAMETER.match(text, skip_space(text, at))) is not None:
        key = parameter["key"]
        end = _VALUE_END.search(text, parameter.end())
        if end is None:
            return malformed(f"the closing tag of parameter '{key}' is missing", name), len(text)
        if _PARAMETER.search(text, parameter.end(), end.start()) is not None:
            problem = f"the closing tag of parameter '{key}' is missing"
            return malformed(problem, name), recover(_RESUME, text, end.end())
        if key in arguments:
            return malformed(f"parameter '{key}' is given twice", name), recover(_RESUME, text, end.end())
        value = text[parameter.end() : end.start()]
        try:
            arguments[key] = value if parameter["string"] else json_value(value)
        except NotAValue as error:
            return malformed(f"parameter '{key}': {error}", name), recover(_RESUME, text, end.end())
        at = end.end()
    closed = _CALL_END.match(text, at)
    if closed is None:
        problem = 'expected <｜DSML｜parameter name="NAME" string="true|false"> or </｜DSML｜invoke>'
        return malformed(problem, name), recover(_RESUME, text, at)
    return ParsedCall(name, arguments), closed.end()
