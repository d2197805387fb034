"""What Anthropic's and Google's histories share: arguments that are JSON objects, and split replies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final

import orjson

from rollyard_pipeline.gateway.calls import MAX_CALL_TOOLS, HistoryCall, HistoryMessage, ReplyCall
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.protocols.fields import list_of, too_deep

UNPARSED: Final = "__unparsedToolInput"
"""The one field of the arguments of a call whose text is no JSON object: `{"raw": text, "len": bytes}`.

Claude Code makes this object of such a text, and shows the model an error for it.
"""
MAX_ASKED: Final = 16_384
"""The largest number of bytes of the JSON of one parameter of sampling. The record of each turn has it."""
MAX_TOOLS: Final = 1 << 20
"""The largest number of bytes of the JSON of all tools of a call, each of whose schemas is walked."""


def refused(field: str, why: str) -> CallError:
    """Return the error for a field of a request."""
    return CallError("invalid", f"{field}: {why}", param=field)


def json_bytes(value: object) -> bytes:
    """Return the JSON of a value, also if it holds a number or a text that orjson refuses.

    Raises:
        CallError: It is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        try:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        except RecursionError:
            raise CallError("invalid", "objects and arrays are nested too deeply") from None


def listed_tools(value: object) -> list[Any]:
    """Return the list of a call's tools.

    Raises:
        CallError: It is no list, or too long.
    """
    if value is None:
        return []
    tools = list_of(value, "tools", MAX_CALL_TOOLS)
    if len(json_bytes(tools)) > MAX_TOOLS:
        raise refused("tools", f"at most {MAX_TOOLS} bytes are accepted")
    return tools


def history_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> HistoryCall:
    """Return a call of the history. An object that stands for a text becomes that text again."""
    if len(arguments) == 1:
        match arguments.get(UNPARSED):
            case {"raw": str(raw)}:
                return HistoryCall(call_id, name, raw)
    return HistoryCall(call_id, name, json_bytes(arguments).decode())


def merged(history: Iterable[HistoryMessage], between: str) -> Iterator[HistoryMessage]:
    """Yield the messages of a history, in which the assistant's that follow each other are one message.

    Args:
        between: What stands between their texts.
    """
    for assistant, group in groupby(history, key=lambda message: message.role == "assistant"):
        messages = list(group)
        if assistant and len(messages) > 1:
            text = between.join(message.text for message in messages if message.text)
            thought = between.join(message.thought for message in messages if message.thought)
            calls = tuple(call for message in messages for call in message.calls)
            yield HistoryMessage("assistant", text, thought, calls)
        else:
            yield from messages


def call_object(call: ReplyCall) -> dict[str, Any]:
    """Return the arguments of a reply's call as an object.

    Those that are nested too deeply for encoders of JSON are sent as text, as those that are no JSON are.
    """
    if not call.error:
        try:
            value = orjson.loads(call.arguments)
        except orjson.JSONDecodeError:
            value = None
        if isinstance(value, dict) and not too_deep(value):
            return value
    raw = call.arguments
    return {UNPARSED: {"raw": raw, "len": len(raw.encode(errors="replace"))}}


def bounded(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of sampling.

    Raises:
        CallError: One is too long for the record of each turn.
    """
    for name, value in asked.items():
        if isinstance(value, dict | list | str) and len(json_bytes(value)) > MAX_ASKED:
            raise refused(name, f"at most {MAX_ASKED} bytes are accepted")
    return asked
