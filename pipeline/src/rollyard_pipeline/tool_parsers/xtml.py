"""The format of Kimi K3, in which a turn consists of elements:

    <|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>
    <|open|>call tool="bash" index="1"<|sep|>
    <|open|>argument key="command" type="string"<|sep|>ls -l<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>

A value of the type `string` is plain text, all of whose whitespace is data. Other values are JSON. Neither is
escaped. A value therefore ends at the first closing mark that is followed by another argument or by the end
of the call, and it cannot contain a whole opening mark of an argument: the closing mark before that one is
missing, or the call is a draft in a thought.
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

_THINK: Final = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
_FRAME: Final = re.compile(r"<\|(?:open|close)\|>(?:response|tools|message)(?: [^<\n]{0,256}+)?<\|sep\|>")
_ATTRIBUTES: Final = r'(?P<attributes>(?:\s++\w{1,32}+="[^"]{0,512}+")*+)\s*+<\|sep\|>'
_ATTRIBUTE: Final = re.compile(r'(?P<key>\w++)="(?P<value>[^"]*+)"')
_OPEN: Final = r"<\|open\|>call(?=\s)"
_HEAD: Final = re.compile(_ATTRIBUTES)
_ARGUMENT: Final = re.compile(rf"<\|open\|>argument{_ATTRIBUTES}")
_VALUE_END: Final = re.compile(
    r"<\|close\|>argument<\|sep\|>(?=\s*+(?:<\|open\|>argument\s|<\|close\|>call<\|sep\|>))"
)
_CALL_END: Final = re.compile(r"\s*+<\|close\|>call<\|sep\|>")
_RESUME: Final = re.compile(r"<\|close\|>call<\|sep\|>|(?=<\|open\|>call\s)")


class XtmlParser:
    """Finds the calls of a turn. The text is what its elements contain outside of calls."""

    def __init__(self) -> None:
        self._reader = TurnReader(_OPEN, _call, _THINK)

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        parsed = self._reader.parse(text)
        thought, mark, answer = parsed.text.rpartition(_THINK[1])
        return ParsedTurn((thought + mark + _FRAME.sub("", answer)).strip(), parsed.calls)


def _call(text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
    head = _HEAD.match(text, mark.end())
    name = _attributes(head).get("tool", "") if head is not None else ""
    if head is None or not 1 <= len(name) <= NAME_LIMIT:
        return [malformed('expected <|open|>call tool="NAME" index="NUMBER"<|sep|>')], recover(
            _RESUME, text, mark.end()
        )
    arguments: dict[str, Any] = {}
    at = head.end()
    while (argument := _ARGUMENT.match(text, skip_space(text, at))) is not None:
        attributes = _attributes(argument)
        key = attributes.get("key", "")
        end = _VALUE_END.search(text, argument.end())
        if end is None:
            return [malformed(f"<|close|>argument<|sep|> of '{key}' is missing", name)], len(text)
        if _ARGUMENT.search(text, argument.end(), end.start()) is not None:
            return [malformed(f"<|close|>argument<|sep|> of '{key}' is missing", name)], end.end()
        if not key or key in arguments:
            problem = f"argument '{key}' is given twice" if key else 'an argument has no key="NAME"'
            return [malformed(problem, name)], recover(_RESUME, text, end.end())
        value = text[argument.end() : end.start()]
        try:
            arguments[key] = value if attributes.get("type") == "string" else json_value(value)
        except NotAValue as error:
            return [malformed(f"argument '{key}': {error}", name)], recover(_RESUME, text, end.end())
        at = end.end()
    closed = _CALL_END.match(text, at)
    if closed is None:
        problem = 'expected <|open|>argument key="NAME" type="TYPE"<|sep|> or <|close|>call<|sep|>'
        return [malformed(problem, name)], recover(_RESUME, text, at)
    return [ParsedCall(name, arguments)], closed.end()


def _attributes(tag: re.Match[str]) -> dict[str, str]:
    """Return the attributes of an opening tag, with `&quot;` and `&amp;` replaced."""
    return {
        attribute["key"]: attribute["value"].replace("&quot;", '"').replace("&amp;", "&")
        for attribute in _ATTRIBUTE.finditer(tag["attributes"])
    }
