"""What a call of OpenAI's Responses brings with it: the items of its input, and its tools."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollyard_pipeline.gateway.calls import (
    MAX_CALL_MESSAGES,
    MAX_CALL_TOOLS,
    HistoryCall,
    HistoryMessage,
    Role,
)
from rollyard_pipeline.gateway.protocols.base import ERROR_FIELD
from rollyard_pipeline.gateway.protocols.fields import (
    MAX_LABEL,
    OfferedTools,
    invalid,
    list_of,
    object_of,
    only,
    text_of,
)
from rollyard_pipeline.gateway.protocols.openai import HOSTED_TOOLS

_FUNCTION: Final = frozenset(
    (
        "allowed_callers",
        "async",
        "defer_loading",
        "description",
        "name",
        "output_schema",
        "parameters",
        "strict",
        "type",
    )
)
_NAMESPACE: Final = frozenset(("type", "name", "description", "tools"))
_EVERY: Final = frozenset(("type", "id", "status", "internal_chat_message_metadata_passthrough"))
"""The fields of every item. The last one is Codex's."""
_MESSAGE: Final = _EVERY | {"role", "content", "phase", "end_turn"}
_CALL: Final = _EVERY | {"call_id", "name", "arguments", "namespace", "caller", "async", ERROR_FIELD}
_OUTPUT: Final = _EVERY | {"call_id", "output", "name", "namespace", "caller"}
_REASONING: Final = _EVERY | {"summary", "content", "encrypted_content"}
_ADDITIONAL: Final = _EVERY | {"role", "tools"}
_PART: Final = frozenset(
    ("type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint", "cache_control")
)
_TEXT_PARTS: Final = frozenset(("input_text", "output_text", "text", "summary_text", "reasoning_text"))
_ROLES: Final[Mapping[object, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_NO_TEXT: Final = {
    "input_image": "images",
    "computer_screenshot": "images",
    "input_audio": "audio",
    "input_file": "files",
}


def seal(thought: str) -> str:
    """Return a thought as the `encrypted_content` of a reasoning item.

    Harnesses that keep no state at the provider repeat this field, and may drop the text. It is not
    encrypted, because the harness may read it.
    """
    return base64.b64encode(thought.encode()).decode()


def _unseal(sealed: str, param: str) -> str:
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        message = (
            f"Invalid '{param}': the encrypted content could not be verified. It is not of this rollout."
        )
        raise invalid(message, param) from None


class ResponsesTools:
    """The tools of one call of Responses.

    The functions of a namespace are offered by their own names, or as `namespace__name` where another tool
    has that name. Their calls are written with the namespace again. Tools of the types in `HOSTED_TOOLS` are
    left out.
    """

    def __init__(self) -> None:
        self.offered = OfferedTools()
        self.left_out: list[str] = []
        self.namespaces: dict[str, tuple[str, str]] = {}
        """The namespace and the function's name in it, by the name that the model sees."""
        self._names: dict[tuple[str, str], str] = {}

    def add(self, value: object, param: str) -> None:
        """Add the tools of a request, or of an item.

        Raises:
            CallError: One is wrong.
        """
        tools = [] if value is None else list_of(value, param, MAX_CALL_TOOLS)
        plain = [
            tool.get("name") for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"
        ]
        for at, tool in enumerate(tools):
            path = f"{param}[{at}]"
            if object_of(tool, path).get("type") == "namespace":
                only(tool, path, _NAMESPACE)
                namespace = text_of(tool.get("name"), f"{path}.name", MAX_LABEL)
                for number, inner in enumerate(list_of(tool.get("tools"), f"{path}.tools", MAX_CALL_TOOLS)):
                    within = f"{path}.tools[{number}]"
                    name = text_of(object_of(inner, within).get("name"), f"{within}.name", MAX_LABEL)
                    shown = f"{namespace}__{name}" if name in plain or name in self.offered else name
                    if self._function(inner, shown, within):
                        self.namespaces[shown] = namespace, name
                        self._names[namespace, name] = shown
            else:
                self._function(tool, tool.get("name"), path)

    def shown(self, namespace: object, name: str) -> str:
        """Return the name by which the model sees a function that an item calls."""
        return self._names.get((namespace, name), name) if isinstance(namespace, str) else name

    def _function(self, tool: Mapping[str, Any], name: object, param: str) -> bool:
        kind = tool.get("type")
        if kind != "function":
            if not isinstance(kind, str) or kind not in HOSTED_TOOLS:
                raise invalid(f"Invalid value for '{param}.type': expected 'function'.", f"{param}.type")
            if kind not in self.left_out:
                self.left_out.append(kind)
            return False
        only(tool, param, _FUNCTION)
        self.offered.add(name, tool.get("description"), tool.get("parameters"), param)
        return True


class ResponsesInput:
    """The history of one call of Responses, built item by item.

    The items of one reply become one assistant's message. A reply is a thought, a text and calls in this
    order, each of which may be missing, so that an item that breaks the order begins another message.
    """

    def __init__(self, tools: ResponsesTools) -> None:
        self.messages: list[HistoryMessage] = []
        self._tools = tools
        self._thought = self._text = ""
        self._calls: list[HistoryCall] = []
        self._step = 0
        """1 after a thought, 2 after a text, 3 after a call, and 0 outside of a reply."""

    def read(self, value: object, instructions: object) -> tuple[HistoryMessage, ...]:
        """Return the messages of a request.

        Raises:
            CallError: The input or an item is wrong.
        """
        if instructions is not None:
            self.messages.append(HistoryMessage("system", text_of(instructions, "instructions")))
        if isinstance(value, str):
            self.messages.append(HistoryMessage("user", text_of(value, "input")))
            return tuple(self.messages)
        items = list_of(value, "input", MAX_CALL_MESSAGES)
        for at, item in enumerate(items):
            self._item(item, f"input[{at}]")
        self._close()
        if not items or not self.messages:
            raise invalid("Invalid 'input': empty array. Expected at least one message.", "input")
        return tuple(self.messages)

    def _item(self, item: object, param: str) -> None:
        item = object_of(item, param)
        kind = item.get("type")
        if kind == "message" or (kind is None and "role" in item):
            self._message(item, param)
        elif kind == "function_call":
            only(item, param, _CALL)
            name = text_of(item.get("name"), f"{param}.name", MAX_LABEL)
            call = HistoryCall(
                text_of(item.get("call_id"), f"{param}.call_id", MAX_LABEL),
                self._tools.shown(item.get("namespace"), name),
                text_of(item.get("arguments"), f"{param}.arguments"),
            )
            self._enter(3)
            self._calls.append(call)
        elif kind == "function_call_output":
            only(item, param, _OUTPUT)
            call_id = text_of(item.get("call_id"), f"{param}.call_id", MAX_LABEL)
            written = item.get("name")
            name = "" if written is None else text_of(written, f"{param}.name", MAX_LABEL)
            text = "\n".join(texts(item.get("output"), f"{param}.output"))
            self._close()
            self.messages.append(
                HistoryMessage(
                    "tool", text, call_id=call_id, name=self._tools.shown(item.get("namespace"), name)
                )
            )
        elif kind == "reasoning":
            only(item, param, _REASONING)
            thought = _thought(item, param)
            self._enter(1)
            self._thought = thought
        elif kind == "additional_tools":
            only(item, param, _ADDITIONAL)
            self._tools.add(item.get("tools"), f"{param}.tools")
        elif kind == "item_reference" or kind is None:
            message = (
                f"Item '{param}' refers to a stored item, and items are not stored. Send the item itself."
            )
            raise invalid(message, param)
        else:
            message = f"Invalid value for '{param}.type': the model neither makes nor reads such items."
            raise invalid(message, f"{param}.type")

    def _message(self, item: Mapping[str, Any], param: str) -> None:
        only(item, param, _MESSAGE)
        written = item.get("role")
        role = _ROLES.get(written) if isinstance(written, str) else None
        if role is None:
            names = "'system', 'developer', 'user' or 'assistant'"
            raise invalid(f"Invalid value for '{param}.role': expected {names}.", f"{param}.role")
        text = "\n".join(texts(item.get("content"), f"{param}.content"))
        if role == "assistant":
            self._enter(2)
            self._text = text
        else:
            self._close()
            self.messages.append(HistoryMessage(role, text))

    def _enter(self, step: int) -> None:
        if step < self._step or step == self._step < 3:
            self._close()
        self._step = step

    def _close(self) -> None:
        if self._step:
            reply = HistoryMessage("assistant", self._text, self._thought, tuple(self._calls))
            self.messages.append(reply)
            self._thought = self._text = ""
            self._calls.clear()
            self._step = 0


def _thought(item: Mapping[str, Any], param: str) -> str:
    """Return the text of a reasoning item: its content, or else what is sealed, or else its summary."""
    if item.get("content"):
        return "\n".join(texts(item["content"], f"{param}.content"))
    if item.get("encrypted_content"):
        return _unseal(
            text_of(item["encrypted_content"], f"{param}.encrypted_content"), f"{param}.encrypted_content"
        )
    return "\n".join(texts(item.get("summary") or [], f"{param}.summary"))


def texts(content: object, param: str) -> Iterator[str]:
    """Yield the texts of a content, which is a string or a list of parts.

    Raises:
        CallError: A part is no text, or the content is anything else.
    """
    if isinstance(content, str):
        yield text_of(content, param)
        return
    for at, part in enumerate(list_of(content, param, MAX_CALL_MESSAGES)):
        path = f"{param}[{at}]"
        kind = object_of(part, path).get("type")
        if isinstance(kind, str) and kind in _NO_TEXT:
            raise invalid(f"Invalid '{path}': the model reads text only, and no {_NO_TEXT[kind]}.", path)
        field = "refusal" if kind == "refusal" else "text"
        if field == "text" and (not isinstance(kind, str) or kind not in _TEXT_PARTS):
            raise invalid(f"Invalid value for '{path}.type': expected 'input_text' or 'output_text'.", path)
        only(part, path, _PART)
        yield text_of(part.get(field), f"{path}.{field}")
