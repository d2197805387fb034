"""Anthropic's Messages: the call, the answer, its events, the count of tokens, and the list of models.

What differs from the real service is what a model of one's own cannot have:

- Images, documents, forced tools, stop sequences, containers and the compaction by the server are refused.
- Tools that the provider's servers run, such as `web_search_20250305`, are left out of what the model sees.
  Tools whose schema only Anthropic's models know, such as `bash_20250124`, are refused.
- `output_config.format` is recorded, and nothing forces the model to keep to it.
- Blocks of empty text are accepted, because a model in training may write an empty reply.
- A thought is sent if the call asks for `thinking`. Its signature is not checked.
- An answer names the model that the call names. Claude Code repeats no thought of a model of another name.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from rollyard_crds.trajectory import ConversationKind

from rollyard_pipeline.gateway.calls import (
    Delta,
    Finish,
    Marks,
    ModelCall,
    ModelReply,
    Opening,
    ReplyCall,
    Usage,
)
from rollyard_pipeline.gateway.errors import CallError, CallProblem
from rollyard_pipeline.gateway.interface import RolloutGateway
from rollyard_pipeline.gateway.protocols.anthropic_history import only, read_messages, read_tools
from rollyard_pipeline.gateway.protocols.base import ERROR_FIELD, EventWriter, ProviderProtocol
from rollyard_pipeline.gateway.protocols.fields import (
    MAX_LABEL,
    flag_of,
    list_of,
    number_of,
    object_of,
    text_of,
)
from rollyard_pipeline.gateway.protocols.marks import declared_kind, marks
from rollyard_pipeline.gateway.protocols.objects import bounded, call_object, json_bytes, refused

COUNT_TOKENS: Final = "count_tokens"
"""What `path["method"]` is for the call that counts tokens."""
_COUNTED: Final = frozenset(
    {
        "messages",
        "model",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "cache_control",
        "context_management",
        "mcp_servers",
        "speed",
        "billing_policy",
        "user_profile_id",
        "workspace_id",
    }
)
_ACCEPTED: Final = _COUNTED | frozenset(
    {
        "max_tokens",
        "stop_sequences",
        "stream",
        "temperature",
        "top_k",
        "top_p",
        "metadata",
        "service_tier",
        "diagnostics",
        "inference_geo",
        "fallbacks",
        "fallback_credit_token",
    }
)
_UNAVAILABLE: Final = {
    "container": "there are no containers here; leave it out",
    "compaction": "the server compacts no history here; leave it out",
    "thread": "the server keeps no threads here; send the whole history in 'messages'",
}
_COMPACTION: Final = "CRITICAL: Respond with TEXT ONLY"
"""How the last text begins with which Claude Code asks for the summary of a conversation."""
_STOP: Final[dict[Finish, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR: Final[dict[CallProblem, str]] = {
    "unauthorized": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "unavailable": "overloaded_error",
    "failed": "api_error",
}
_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'


class AnthropicMessages(ProviderProtocol):
    """`POST /v1/messages`, and `POST /v1/messages/count_tokens`, whose path has the method `count_tokens`."""

    name = "anthropic-messages"

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str], path: Mapping[str, str]) -> ModelCall:
        """Return the call."""
        counts = path.get("method") == COUNT_TOKENS
        for field in body.keys() - (_COUNTED if counts else _ACCEPTED):
            if field in _UNAVAILABLE and body[field] is None:
                continue
            raise refused(field, _UNAVAILABLE.get(field, "Extra inputs are not permitted"))
        for field in ("model", "messages") if counts else ("model", "max_tokens", "messages"):
            if field not in body:
                raise refused(field, "Field required")
        model = text_of(body["model"], "model", MAX_LABEL)
        messages = read_messages(body.get("system"), body["messages"])
        if not counts and messages[-1].role == "assistant":
            why = "This model does not support assistant message prefill. "
            raise refused("messages", why + "The conversation must end with a user message.")
        tools, left_out = read_tools(body.get("tools"))
        asked = bounded({**_asked(body), **({"tools_left_out": left_out} if left_out else {})})
        if not _may_use_tools(body.get("tool_choice")):
            tools = ()
        stream = body.get("stream")
        return ModelCall(
            messages=messages,
            tools=tools,
            stream=stream is not None and flag_of(stream, "stream"),
            max_tokens=asked.get("max_tokens"),
            asked=asked,
            model=model,
            marks=_marks(headers, _kind(body, asked, bool(tools))),
            details={"thinking": _shown(asked.get("thinking"))},
        )

    def answer(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """Return the message."""
        content: list[dict[str, Any]] = []
        thinking = call.details.get("thinking")
        if reply.thought and thinking:
            shown = reply.thought if thinking == "summarized" else ""
            content.append({"type": "thinking", "thinking": shown, "signature": reply.id})
        if reply.text or not (reply.calls or content):
            content.append({"type": "text", "text": reply.text})
        content.extend({**_use(one), "input": call_object(one)} for one in reply.calls)
        return {
            **_message(reply.id, call.model or reply.model),
            "content": content,
            "stop_reason": _STOP[reply.finish],
            "usage": {**_usage(reply.usage), "service_tier": "standard"},
        }

    def events(self, call: ModelCall, opening: Opening) -> EventWriter:
        """Return the writer of the message's events."""
        return _MessageEvents(opening, call.model or opening.model, call.details.get("thinking"))

    def error(self, error: CallError) -> dict[str, Any]:
        """Return the error. Claude Code compacts its history if the text says that the prompt is too long."""
        message = error.message
        if error.problem == "context" and error.tokens is not None:
            message = "prompt is too long: {} tokens > {} maximum".format(*error.tokens)
        body: dict[str, Any] = {
            "type": _ERROR.get(error.problem, "invalid_request_error"),
            "message": message,
        }
        if error.param == "thread":
            # The SDK's runner of tools asks for a thread first, and sends whole histories after this error.
            body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": body, "request_id": f"req_{secrets.token_hex(12)}"}

    def counted(self, tokens: int) -> dict[str, Any]:
        """Return the body of the answer to a call that counts tokens."""
        return {"input_tokens": tokens}

    def models(self, gateway: RolloutGateway, path: Mapping[str, str]) -> dict[str, Any]:
        """Return the list of models, or one. See `ProviderProtocol.models`."""
        own = {
            "type": "model",
            "id": gateway.model,
            "display_name": gateway.model,
            "created_at": datetime.fromtimestamp(0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": gateway.context,
            "max_tokens": gateway.context,
        }
        asked = path.get("model")
        if asked is None:
            return {"data": [own], "has_more": False, "first_id": gateway.model, "last_id": gateway.model}
        if asked != gateway.model:
            raise CallError("not_found", f"model: {asked[:MAX_LABEL]}")
        return own


def _asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of sampling."""
    asked: dict[str, Any] = {}
    if "max_tokens" in body:
        asked["max_tokens"] = int(number_of(body["max_tokens"], "max_tokens", 1, math.inf, whole=True))
    for field in ("temperature", "top_p"):
        if (value := body.get(field)) is not None:
            asked[field] = number_of(value, field, 0, 1)
    if (value := body.get("top_k")) is not None:
        asked["top_k"] = number_of(value, "top_k", 0, math.inf, whole=True)
    if (stops := body.get("stop_sequences")) is not None and list_of(stops, "stop_sequences", MAX_LABEL):
        raise refused("stop_sequences", "the model stops at its own end only; leave it out or empty")
    if (thinking := body.get("thinking")) is not None:
        asked["thinking"] = _thinking(object_of(thinking, "thinking"))
    if (output := body.get("output_config")) is not None:
        fields = object_of(output, "output_config")
        only(fields, frozenset({"effort", "format", "task_budget"}), "output_config")
        asked["output_config"] = fields
    if (schema := body.get("output_format")) is not None:
        asked["output_format"] = object_of(schema, "output_format")
    return asked


def _thinking(thinking: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a call says of thoughts."""
    only(thinking, frozenset({"type", "budget_tokens", "display"}), "thinking")
    if thinking.get("type") not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise refused("thinking.type", "Input should be 'enabled', 'disabled', 'adaptive' or 'between_tools'")
    if thinking["type"] == "enabled":
        number_of(thinking.get("budget_tokens"), "thinking.budget_tokens", 1024, math.inf, whole=True)
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise refused("thinking.display", "Input should be 'summarized' or 'omitted'")
    return thinking


def _shown(thinking: Mapping[str, Any] | None) -> str | None:
    """Return how thoughts are shown: `summarized`, `omitted`, or None if the call asks for no thinking."""
    if thinking is None or thinking["type"] == "disabled":
        return None
    return thinking.get("display") or "summarized"


def _may_use_tools(choice: object) -> bool:
    """Return whether the call lets the model use tools.

    Raises:
        CallError: It forces the model to.
    """
    if choice is None:
        return True
    kind = object_of(choice, "tool_choice").get("type")
    if kind in ("any", "tool"):
        raise refused("tool_choice", f"'{kind}' cannot be had, because the model samples freely; use 'auto'")
    if kind not in ("auto", "none"):
        raise refused("tool_choice.type", "Input should be 'auto' or 'none'")
    return bool(kind == "auto")


def _marks(headers: Mapping[str, str], kind: ConversationKind | None) -> Marks:
    """Return what Claude Code says of a call, or else another harness."""
    session = headers.get("x-claude-code-session-id", "")[:MAX_LABEL]
    kind = declared_kind(headers) or kind
    if not session:
        other = marks(headers)
        return Marks(other.session, other.agent, kind or other.kind)
    agent = headers.get("x-claude-code-agent-id", "")[:MAX_LABEL]
    return Marks(session, agent, kind or ("subagent" if agent else None))


def _kind(body: Mapping[str, Any], asked: Mapping[str, Any], tools: bool) -> ConversationKind | None:
    """Return what Claude Code's calls for a summary and for a title say of themselves."""
    content = body["messages"][-1]["content"]
    if isinstance(content, list) and content:
        content = content[-1].get("text")
    if isinstance(content, str) and content.startswith(_COMPACTION):
        return "compaction"
    if tools:
        return None
    output = asked.get("output_config", {}).get("format") or asked.get("output_format")
    match output:
        case {"schema": {"properties": {"title": _}}}:
            return "title"
    return None


def _message(reply: str, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{reply}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.sampled,
        "output_tokens_details": {"thinking_tokens": usage.thought},
    }


def _use(call: ReplyCall) -> dict[str, Any]:
    """Return the block of a call without its arguments."""
    block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    if call.error:
        block[ERROR_FIELD] = call.error
    return block


def _event(event: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


class _MessageEvents(EventWriter):
    """The events of a message. At most one block is open."""

    def __init__(self, opening: Opening, model: str, thinking: str | None) -> None:
        self._opening = opening
        self._model = model
        self._thinking = thinking
        self._index = -1
        """The number of the last block."""
        self._open = ""
        """The type of the block that is open, or an empty string."""
        self._before = b""
        """The event of a piece of the open block, up to its text."""

    def begin(self) -> bytes:
        """Return `message_start`."""
        usage = {**_usage(Usage(self._opening.prompt_tokens, 1)), "service_tier": "standard"}
        message = {**_message(self._opening.id, self._model), "usage": usage}
        return _event({"type": "message_start", "message": message}) + _PING

    def delta(self, delta: Delta) -> bytes:
        """Return a piece of a block, which is opened if need be. A call is one whole block."""
        if delta.call is not None:
            return self._whole(delta.call)
        if delta.thought:
            if self._thinking is None:
                return _PING
            opened = b"" if self._open == "thinking" else self._opened("thinking", "thinking_delta")
            if self._thinking == "omitted":
                return opened or _PING
            return opened + self._before + orjson.dumps(delta.thought) + b"}}\n\n"
        opened = b"" if self._open == "text" else self._opened("text", "text_delta")
        return opened + self._before + orjson.dumps(delta.text) + b"}}\n\n"

    def idle(self) -> bytes:
        """Return an empty piece of the text if it is open. Claude Code's timer for silence ignores pings."""
        return self._before + b'""}}\n\n' if self._open == "text" else _PING

    def end(self, reply: ModelReply) -> bytes:
        """Return the end of the last block, the reason of the end, and the number of tokens."""
        # Claude Code needs a block. The real service sends none for an empty message.
        empty = self._opened("text", "text_delta") if self._index < 0 else b""
        closed = empty + self._closed()
        end = {"stop_reason": _STOP[reply.finish], "stop_sequence": None}
        last = {"type": "message_delta", "delta": end, "usage": _usage(reply.usage)}
        return closed + _event(last) + _event({"type": "message_stop"})

    def fail(self, error: CallError) -> bytes:
        """Return an event `error`."""
        return _event(AnthropicMessages().error(error))

    def _opened(self, kind: str, piece: str) -> bytes:
        """Return the events that close the open block, and begin one of text or of a thought."""
        closed = self._closed()
        self._index += 1
        self._open = kind
        self._before = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (self._index, piece.encode(), kind.encode())
        )
        block = {"type": kind, kind: ""}
        if kind == "thinking":
            block["signature"] = ""
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + _event(start)

    def _closed(self) -> bytes:
        """Return the events that close the open block."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signed = b""
        if kind == "thinking":
            signature = {"type": "signature_delta", "signature": self._opening.id}
            signed = _event({"type": "content_block_delta", "index": self._index, "delta": signature})
        return signed + _event({"type": "content_block_stop", "index": self._index})

    def _whole(self, call: ReplyCall) -> bytes:
        """Return the events of a call. A harness may run it once its block has ended."""
        closed = self._closed()
        self._index += 1
        arguments = json_bytes(call_object(call)).decode()
        piece = {"type": "input_json_delta", "partial_json": arguments}
        return b"".join(
            (
                closed,
                _event({"type": "content_block_start", "index": self._index, "content_block": _use(call)}),
                _event({"type": "content_block_delta", "index": self._index, "delta": piece}),
                _event({"type": "content_block_stop", "index": self._index}),
            )
        )
