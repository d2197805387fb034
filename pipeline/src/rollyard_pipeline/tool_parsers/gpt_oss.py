"""The harmony format of gpt-oss: a turn is one or more messages, each with a channel.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{…}<|call|>

A call is a message with a recipient (`to=`), which may precede or follow the channel. The last message's
ending mark is the turn's end-of-turn token and is not in its text.
"""

from __future__ import annotations

import re
from typing import Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import (
    NAME_LIMIT,
    NotAValue,
    call_of,
    json_at,
    malformed,
    skip_space,
)

_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_HEADER_END: Final = re.compile(r"<\|(?:message|start|end|call|return)\|>")
_ENDS: Final = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(?P<name>\w+)")
_RECIPIENT: Final = re.compile(r"(?:^|\s|(?<=\|>))to=(?P<name>[^\s<]+)")
_MARK: Final = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_HEADER_LIMIT: Final = 1024  # characters
_PEOPLE: Final = frozenset({"assistant", "user", "all"})
"""Recipients that are not tools."""


class GptOssParser:
    """Parses a turn message by message. Calls in the text of the channel `analysis` do not count."""

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        if _MARK.search(text) is None:
            return ParsedTurn(text.strip())
        contents: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
        calls: list[ParsedCall] = []
        at = 0
        while at < len(text):
            at = _message(text, at, contents, calls)
        # A template shows the thought before a call, but no thought before an answer.
        channels = ("analysis", "commentary", "final") if calls else ("commentary", "final")
        parts = [part.strip() for channel in channels for part in contents[channel]]
        return ParsedTurn("\n\n".join(part for part in parts if part), tuple(calls))


def _message(text: str, at: int, contents: dict[str, list[str]], calls: list[ParsedCall]) -> int:
    """Read the message at `at` into `said` or `calls`, and return the index after it."""
    if text.startswith(_START, at):
        at += len(_START)
    mark = _HEADER_END.search(text, at)
    header = text[at : mark.start() if mark is not None else len(text)]
    recipient = _RECIPIENT.search(header[:_HEADER_LIMIT])
    if recipient is not None and recipient["name"] in _PEOPLE:
        recipient = None
    if mark is None or mark[0] != _MESSAGE:
        if recipient is not None and "<|channel|>" in header:
            calls.append(malformed(f"{_MESSAGE} is missing before the arguments", _name(recipient)))
        else:
            contents["final"].append(_MARK.sub("", header))
        if mark is None:
            return len(text)
        return mark.start() if mark[0] == _START else mark.end()
    if recipient is not None:
        return _call(text, mark.end(), _name(recipient), calls)
    channel = _CHANNEL.search(header[:_HEADER_LIMIT])
    end = _ENDS.search(text, mark.end())
    content = text[mark.end() : end.start() if end is not None else len(text)]
    name = channel["name"] if channel is not None else "final"
    contents.get(name, contents["final"]).append(content)
    return end.end() if end is not None else len(text)


def _call(text: str, at: int, name: str, calls: list[ParsedCall]) -> int:
    """Read the call of `name` whose arguments begin at `at`, and return the index after its message."""
    if not 1 <= len(name) <= NAME_LIMIT:
        call, after = malformed("'to=' must name a tool: to=functions.NAME"), at
    else:
        try:
            # The JSON itself determines where it ends, because a value may contain a mark as text.
            value, after = json_at(text, at)
            call = call_of(name, value)
        except NotAValue as error:
            call, after = malformed(str(error), name), at
    end = _ENDS.search(text, after)
    stop = end.start() if end is not None else len(text)
    if call.error is None and skip_space(text, after) < stop:
        call = malformed("text after the JSON of the arguments", name)
    calls.append(call)
    return end.end() if end is not None else len(text)


def _name(recipient: re.Match[str]) -> str:
    return recipient["name"].removeprefix("functions.")
