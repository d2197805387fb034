"""The history and the tools of a call of Anthropic's Messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from rollyard_pipeline.gateway.calls import MAX_CALL_MESSAGES, MAX_CALL_TOOLS, HistoryCall, HistoryMessage
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.protocols.base import ERROR_FIELD
from rollyard_pipeline.gateway.protocols.fields import (
    MAX_LABEL,
    MAX_SCHEMA_DEPTH,
    OfferedTools,
    flag_of,
    list_of,
    object_of,
    text_of,
    too_deep,
)
from rollyard_pipeline.gateway.protocols.objects import history_call, listed_tools, merged, refused

_TOOL_FIELDS: Final = frozenset(
    {
        "type",
        "name",
        "description",
        "input_schema",
        "cache_control",
        "strict",
        "defer_loading",
        "eager_input_streaming",
        "input_examples",
        "allowed_callers",
    }
)
_SERVER_TOOL: Final = re.compile(
    r"(?:web_search|web_fetch|code_execution|tool_search_tool_bm25|tool_search_tool_regex|advisor|mcp_toolset)"
    r"(?:_[0-9]{8})?"
)
_KNOWN_TOOL: Final = re.compile(
    r"(?:bash|text_editor|computer|memory|browser_toolset|computer_toolset)_[0-9]{8}"
)
_TEXT_FIELDS: Final = frozenset({"type", "text", "cache_control", "citations"})
_USE_FIELDS: Final = frozenset(
    {"type", "id", "name", "input", "cache_control", "caller", "toolset_name", ERROR_FIELD}
)
_RESULT_FIELDS: Final = frozenset(
    {"type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"}
)
_BILLING: Final = "x-anthropic-billing-header:"
"""How a block of the system prompt begins which Claude Code writes for the service and not for the model.

It holds a number that changes from call to call.
"""


def read_tools(value: object) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    """Return the tools that the harness itself runs, and the types of those that are left out.

    Those run on the provider's servers, so that the model cannot call them.
    """
    tools = OfferedTools()
    left_out: set[str] = set()
    for number, one in enumerate(listed_tools(value)):
        field = f"tools.{number}"
        tool = object_of(one, field)
        kind = tool.get("type")
        if kind is not None and kind != "custom":
            text = text_of(kind, f"{field}.type")
            if _SERVER_TOOL.fullmatch(text):
                left_out.add(text)
                continue
            if _KNOWN_TOOL.fullmatch(text):
                why = f"only Anthropic's models know the tool '{text}'; give one with an 'input_schema'"
                raise refused(f"{field}.type", why)
            raise refused(f"{field}.type", "Input should be 'custom' or a tool of the provider's servers")
        only(tool, _TOOL_FIELDS, field)
        callers = tool.get("allowed_callers")
        if callers and "direct" not in list_of(callers, f"{field}.allowed_callers", MAX_CALL_TOOLS):
            left_out.add(text_of(tool.get("name"), f"{field}.name", MAX_LABEL))
            continue
        schema = object_of(tool.get("input_schema"), f"{field}.input_schema")
        if schema.get("type") != "object":
            raise refused(f"{field}.input_schema.type", "Input should be 'object'")
        if too_deep(schema):
            raise refused(f"{field}.input_schema", f"more than {MAX_SCHEMA_DEPTH} levels are nested")
        tools.add(tool.get("name"), tool.get("description"), schema, field)
    return tuple(tools.schemas), sorted(left_out)


def read_messages(system: object, messages: object) -> tuple[HistoryMessage, ...]:
    """Return the history. Assistant's messages that follow each other are one, as for the real service."""
    history: list[HistoryMessage] = []
    texts = [] if system is None else _texts(system, "system")
    waiting = [text for text in texts if not text.startswith(_BILLING)]
    names: dict[str, str] = {}
    rows = list_of(messages, "messages", MAX_CALL_MESSAGES)
    if not rows:
        raise refused("messages", "at least one message is required")
    for number, one in enumerate(rows):
        field = f"messages.{number}"
        message = object_of(one, field)
        role, content = message.get("role"), message.get("content")
        if content is None:
            raise refused(f"{field}.content", "Field required")
        if role == "system":
            only(message, frozenset({"role", "content", "clear_at", "output_config"}), field)
            if message.get("clear_at") not in (None, "never"):
                raise refused(f"{field}.clear_at", "a message is never cleared here; use 'never'")
            waiting.append("\n".join(_texts(content, f"{field}.content")))
            continue
        only(message, frozenset({"role", "content"}), field)
        _add_system(waiting, history)
        waiting = []
        if role == "assistant":
            history.append(_assistant(content, f"{field}.content", names))
        elif role == "user":
            _add_user(content, f"{field}.content", names, history)
        else:
            raise refused(f"{field}.role", "Input should be 'user', 'assistant' or 'system'")
    _add_system(waiting, history)
    return tuple(merged(history, "\n"))


def _add_system(texts: list[str], history: list[HistoryMessage]) -> None:
    """Add the system's texts as a message at the beginning, or, if others have come, to the user's text.

    Most chat templates refuse, move or drop a later system message. In the text of a user it has the form in
    which Claude Code writes it for models that know no such messages.
    """
    if not texts:
        return
    if not history:
        history.append(HistoryMessage("system", "\n".join(texts)))
        return
    before = [history.pop().text] if history[-1].role == "user" else []
    reminders = [f"<system-reminder>\n{text}\n</system-reminder>" for text in texts]
    history.append(HistoryMessage("user", "\n".join(before + reminders)))


def _assistant(content: object, field: str, names: dict[str, str]) -> HistoryMessage:
    """Return an assistant's message, and add the names of its calls by their ids."""
    if isinstance(content, str):
        return HistoryMessage("assistant", content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[HistoryCall] = []
    for number, one in enumerate(list_of(content, field, MAX_CALL_MESSAGES)):
        block = object_of(one, f"{field}.{number}")
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, f"{field}.{number}"))
        elif kind == "thinking":
            only(block, frozenset({"type", "thinking", "signature"}), f"{field}.{number}")
            thoughts.append(text_of(block.get("thinking"), f"{field}.{number}.thinking"))
        elif kind == "tool_use":
            calls.append(_called(block, f"{field}.{number}", names))
        elif kind != "redacted_thinking":
            raise _unreadable(kind, f"{field}.{number}", "text, thinking and tool_use")
    return HistoryMessage("assistant", "\n".join(texts), "\n".join(thoughts), tuple(calls))


def _called(block: Mapping[str, Any], field: str, names: dict[str, str]) -> HistoryCall:
    only(block, _USE_FIELDS, field)
    call_id, name = text_of(block.get("id"), f"{field}.id"), text_of(block.get("name"), f"{field}.name")
    if not 0 < len(call_id) <= MAX_LABEL:
        raise refused(f"{field}.id", f"String should have 1 to {MAX_LABEL} characters")
    if call_id in names:
        raise refused(f"{field}.id", "`tool_use` ids must be unique")
    names[call_id] = name
    return history_call(call_id, name, object_of(block.get("input"), f"{field}.input"))


def _add_user(content: object, field: str, names: Mapping[str, str], history: list[HistoryMessage]) -> None:
    """Add a user's message: the results of tools first, then the text, if there is any or nothing else."""
    if isinstance(content, str):
        history.append(HistoryMessage("user", content))
        return
    texts: list[str] = []
    results = 0
    for number, one in enumerate(list_of(content, field, MAX_CALL_MESSAGES)):
        block = object_of(one, f"{field}.{number}")
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, f"{field}.{number}"))
        elif kind == "tool_result":
            history.append(_result(block, f"{field}.{number}", names))
            results += 1
        else:
            raise _unreadable(kind, f"{field}.{number}", "text and tool_result")
    if texts or not results:
        history.append(HistoryMessage("user", "\n".join(texts)))


def _result(block: Mapping[str, Any], field: str, names: Mapping[str, str]) -> HistoryMessage:
    only(block, _RESULT_FIELDS, field)
    call_id = text_of(block.get("tool_use_id"), f"{field}.tool_use_id")
    if call_id not in names:
        why = "unexpected `tool_use_id` found in `tool_result` blocks; each `tool_result` block must have a"
        raise refused(f"{field}.tool_use_id", f"{why} corresponding `tool_use` block in a previous message")
    content, failed = block.get("content"), block.get("is_error")
    return HistoryMessage(
        "tool",
        "" if content is None else "\n".join(_texts(content, f"{field}.content", references=True)),
        call_id=call_id,
        name=names[call_id],
        failed=failed is not None and flag_of(failed, f"{field}.is_error"),
    )


def _texts(content: object, field: str, *, references: bool = False) -> list[str]:
    """Return the texts of a string or of a list of text blocks.

    Args:
        references: Whether a block may be a `tool_reference`, which becomes the tool's name.
    """
    if isinstance(content, str):
        return [content]
    texts = []
    for number, one in enumerate(list_of(content, field, MAX_CALL_MESSAGES)):
        block = object_of(one, f"{field}.{number}")
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, f"{field}.{number}"))
        elif references and kind == "tool_reference":
            texts.append(text_of(block.get("tool_name"), f"{field}.{number}.tool_name"))
        else:
            raise _unreadable(kind, f"{field}.{number}", "text")
    return texts


def _text(block: Mapping[str, Any], field: str) -> str:
    if len(block) > 2:
        only(block, _TEXT_FIELDS, field)
    return text_of(block.get("text"), f"{field}.text")


def _unreadable(kind: object, field: str, right: str) -> CallError:
    shown = str(kind)[:64]
    if kind in ("image", "document"):
        return refused(field, f"the model reads no {shown}s; leave the block out, or write its text")
    return refused(f"{field}.type", f"a block '{shown}' cannot be read here; blocks may be {right}")


def only(fields: Mapping[str, Any], allowed: frozenset[str], field: str) -> None:
    """Refuse the fields that the real service does not know."""
    for name in fields.keys() - allowed:
        raise refused(f"{field}.{name[:MAX_LABEL]}", "Extra inputs are not permitted")
