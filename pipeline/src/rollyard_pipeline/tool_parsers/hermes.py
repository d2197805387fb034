"""The Hermes format of Qwen and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
from typing import Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_THINK_END: Final = "</think>"
_NAME_LIMIT: Final = 128


class HermesParser:
    """Finds every call of a turn; calls inside `<think>` are thoughts, not calls."""

    def parse(self, text: str) -> ParsedTurn:
        thought, mark, said = text.rpartition(_THINK_END)
        outside = [thought + mark]
        calls: list[ParsedCall] = []
        rest = said
        while True:
            before, opened, rest = rest.partition(_OPEN)
            outside.append(before)
            if not opened:
                break
            # A value may hold the closing mark as text, so the JSON itself says where it ends.
            call, rest = _call(rest)
            calls.append(call)
        return ParsedTurn("".join(outside).strip(), tuple(calls))


def _call(rest: str) -> tuple[ParsedCall, str]:
    """The call at the start of `rest` (behind its opening mark), and what follows its closing mark."""
    start = len(rest) - len(rest.lstrip())
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(rest, start)
    except (ValueError, RecursionError) as error:
        _, closed, after = rest.partition(_CLOSE)
        if not closed:
            return ParsedCall("", error=f"malformed tool call: {_CLOSE} is missing"), ""
        reason = (
            f"{error.msg} at character {error.pos - start}"
            if isinstance(error, json.JSONDecodeError)
            else "too deep"
        )
        return ParsedCall("", error=f"malformed tool call: not JSON: {reason}"), after
    after = rest[end:].lstrip()
    if not after.startswith(_CLOSE):
        _, closed, after = after.partition(_CLOSE)
        problem = f"text between the JSON and {_CLOSE}" if closed else f"{_CLOSE} is missing"
        return ParsedCall("", error=f"malformed tool call: {problem}"), after
    return _checked(value), after[len(_CLOSE) :]


def _checked(value: object) -> ParsedCall:
    if not isinstance(value, dict):
        return ParsedCall("", error="malformed tool call: expected a JSON object with 'name' and 'arguments'")
    name = value.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LIMIT:
        return ParsedCall("", error="malformed tool call: 'name' must be the name of a tool")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models quote the object once more
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ParsedCall(name, error="malformed tool call: 'arguments' must be a JSON object")
    return ParsedCall(name, arguments)
