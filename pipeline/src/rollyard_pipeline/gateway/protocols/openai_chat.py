"""OpenAI's Chat Completions, `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import orjson

from rollyard_pipeline.gateway.calls import (
    MAX_CALL_MESSAGES,
    MAX_CALL_TOOLS,
    Delta,
    HistoryCall,
    HistoryMessage,
    ModelCall,
    ModelReply,
    Opening,
    ReplyCall,
    Role,
    Usage,
)
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.protocols.base import ERROR_FIELD, EventWriter
from rollyard_pipeline.gateway.protocols.fields import (
    MAX_LABEL,
    OfferedTools,
    cannot,
    flag_of,
    invalid,
    is_text,
    list_of,
    object_of,
    only,
    text_of,
)
from rollyard_pipeline.gateway.protocols.marks import marks
from rollyard_pipeline.gateway.protocols.openai import (
    HOSTED_TOOLS,
    OpenAIProtocol,
    asked_of,
    check_stream_options,
    error_body,
    plain_text_format,
    refuse_set,
    tools_chosen,
)

_KNOWN: Final = frozenset(
    [
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "modalities",
        "model",
        "moderation",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    ]
)
_REFUSED: Final = {
    "functions": "is not supported. Use 'tools' instead.",
    "function_call": "is not supported. Use 'tool_choice' instead.",
    "audio": "is not supported, because the model speaks no audio.",
    "web_search_options": "is not supported, because nothing is searched here.",
    "moderation": "is not supported, because nothing is moderated here.",
    "logprobs": "is not supported. Log-probabilities are in the rollout's trajectory.",
    "stop": "is not supported, because sampling ends where the model ends its turn.",
}
_MAX_BIASES: Final = 300
_ROLES: Final[Mapping[object, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MESSAGE: Final = frozenset(("role", "content", "name"))
_TOOL_MESSAGE: Final = frozenset(("role", "content", "tool_call_id", "name"))
_REPLAYED: Final = frozenset(
    ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "provider_specific_fields")
)
"""What servers of other models add to a message, and clients such as litellm repeat.

Only the first two are read.
"""
_ASSISTANT: Final = _MESSAGE | _REPLAYED | {"tool_calls", "refusal", "audio", "function_call", "annotations"}
_TOOL_CALL: Final = frozenset(("id", "type", "function", "index", "provider_specific_fields", ERROR_FIELD))
_CALLED: Final = frozenset(("name", "arguments", "parsed_arguments"))
"""The last one is what the SDK's `parse` adds, and repeats."""
_PART: Final = frozenset(
    ("type", "text", "refusal", "cache_control", "prompt_cache_breakpoint", "annotations")
)
_FUNCTION: Final = frozenset(("name", "description", "parameters", "strict"))
_NO_TEXT: Final = {
    "image_url": "images",
    "input_audio": "audio",
    "file": "files",
}


class OpenAIChat(OpenAIProtocol):
    """Chat Completions.

    A reply's thought is `reasoning_content`, as with vLLM and DeepSeek. Hosted and custom tools are not
    offered to the model (see `HOSTED_TOOLS`), and the names of users are ignored.
    """

    name: ClassVar[str] = "openai-chat"

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str], path: Mapping[str, str]) -> ModelCall:
        """Return the call that a request makes. See `ProviderProtocol.read`."""
        unknown = [name for name in body if name not in _KNOWN]
        if unknown:
            # The service names them in the message only.
            plural = "s" if len(unknown) > 1 else ""
            names = ", ".join(sorted(unknown))[:MAX_LABEL]
            raise invalid(f"Unrecognized request argument{plural} supplied: {names}")
        refuse_set(body, _REFUSED)
        if body.get("n") not in (None, 1) or isinstance(body.get("n"), bool):
            raise cannot("n", "must be 1, because every reply is a turn of one rollout.")
        if body.get("top_logprobs") not in (None, 0):
            raise cannot("top_logprobs", "must be 0. Log-probabilities are in the rollout's trajectory.")
        if body.get("modalities") not in (None, ["text"]):
            raise cannot("modalities", "must be ['text'], because the model writes nothing else.")
        plain_text_format(body.get("response_format"), "response_format")
        asked, max_tokens = asked_of(body, ("max_tokens", "max_completion_tokens"))
        if body.get("logit_bias"):
            asked["logit_bias"] = _biases(body["logit_bias"])
        offered = _tools(body.get("tools"), asked)
        model = text_of(body.get("model"), "model", MAX_LABEL)
        stream = flag_of(body.get("stream"), "stream")
        options = check_stream_options(body, ("include_usage", "include_obfuscation"))
        return ModelCall(
            messages=_messages(body.get("messages")),
            tools=tuple(offered.schemas) if tools_chosen(body.get("tool_choice")) else (),
            stream=stream,
            max_tokens=max_tokens,
            asked=asked,
            model=model,
            marks=marks(headers),
            details={"include_usage": bool(options.get("include_usage"))},
        )

    def answer(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """Return the body of the answer, which is a `chat.completion`."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text if reply.text or not reply.calls else None,
            "refusal": None,
            "annotations": [],
        }
        if reply.thought:
            message["reasoning_content"] = reply.thought
        if reply.calls:
            message["tool_calls"] = [_call(one) for one in reply.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
        return {
            "id": f"chatcmpl-{reply.id}",
            "object": "chat.completion",
            "created": reply.created,
            "model": reply.model,
            "choices": [choice],
            "usage": _usage(reply.usage),
            "service_tier": "default",
            "system_fingerprint": None,
        }

    def events(self, call: ModelCall, opening: Opening) -> EventWriter:
        """Return what writes the `chat.completion.chunk` of each piece."""
        return _ChatEvents(opening, call.details.get("include_usage", False))


class _ChatEvents(EventWriter):
    """The chunks of one reply. What the chunks share is encoded once."""

    def __init__(self, opening: Opening, include_usage: bool) -> None:
        head = {
            "id": f"chatcmpl-{opening.id}",
            "object": "chat.completion.chunk",
            "created": opening.created,
            "model": opening.model,
            "service_tier": "default",
            "system_fingerprint": None,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._delta = self._head + b',"choices":[{"index":0,"delta":{"'
        no_usage = b',"usage":null' if include_usage else b""
        self._tail = b',"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"
        self._no_usage = no_usage
        self._include_usage = include_usage
        self._calls = 0

    def begin(self) -> bytes:
        return self._delta + b'role":"assistant","content":"","refusal":null}' + self._tail

    def delta(self, delta: Delta) -> bytes:
        if delta.call is not None:
            call = {"index": self._calls, **_call(delta.call)}
            self._calls += 1
            return self._delta + b'tool_calls":[' + orjson.dumps(call) + b"]}" + self._tail
        if delta.thought:
            return self._delta + b'reasoning_content":' + orjson.dumps(delta.thought) + b"}" + self._tail
        return self._delta + b'content":' + orjson.dumps(delta.text) + b"}" + self._tail

    def end(self, reply: ModelReply) -> bytes:
        finish = b',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"%b"}]%b}\n\n'
        last = self._head + finish % (reply.finish.encode(), self._no_usage)
        if self._include_usage:
            last += self._head + b',"choices":[],"usage":' + orjson.dumps(_usage(reply.usage)) + b"}\n\n"
        return last + b"data: [DONE]\n\n"

    def fail(self, error: CallError) -> bytes:
        return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


def _call(call: ReplyCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    written: dict[str, Any] = {"id": call.id, "type": "function", "function": function}
    if call.error:
        written[ERROR_FIELD] = call.error
    return written


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.thought,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _biases(value: object) -> Mapping[str, Any]:
    biases = object_of(value, "logit_bias")
    numbers = all(len(name) <= 20 and type(bias) in (int, float) for name, bias in biases.items())
    if len(biases) > _MAX_BIASES or not numbers:
        message = f"Invalid 'logit_bias': expected at most {_MAX_BIASES} numbers by the ids of tokens."
        raise invalid(message, "logit_bias")
    return biases


def _tools(value: object, asked: dict[str, Any]) -> OfferedTools:
    offered = OfferedTools()
    for at, tool in enumerate([] if value is None else list_of(value, "tools", MAX_CALL_TOOLS)):
        param = f"tools[{at}]"
        kind = object_of(tool, param).get("type")
        if kind != "function":
            if not isinstance(kind, str) or kind not in HOSTED_TOOLS:
                raise invalid(f"Invalid value for '{param}.type': expected 'function'.", f"{param}.type")
            left_out = asked.setdefault("tools_left_out", [])
            if kind not in left_out:
                left_out.append(kind)
            continue
        only(tool, param, ("type", "function"))
        function = object_of(tool.get("function"), f"{param}.function", _FUNCTION)
        offered.add(
            function.get("name"),
            function.get("description"),
            function.get("parameters"),
            f"{param}.function",
        )
    return offered


def _messages(value: object) -> tuple[HistoryMessage, ...]:
    messages = list_of(value, "messages", MAX_CALL_MESSAGES)
    if not messages:
        raise invalid("Invalid 'messages': empty array. Expected at least one message.", "messages")
    return tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages))


def _message(message: object, param: str) -> HistoryMessage:
    if not isinstance(message, dict):
        message = object_of(message, param)
    written = message.get("role")
    role = _ROLES.get(written) if isinstance(written, str) else None
    if role is None:
        names = "'system', 'developer', 'user', 'assistant' or 'tool'"
        raise invalid(f"Invalid value for '{param}.role': expected {names}.", f"{param}.role")
    content = message.get("content")
    if role == "assistant":
        return _assistant(message, param)
    text = content if is_text(content) else "\n".join(_texts(content, f"{param}.content"))
    if role == "tool":
        only(message, param, _TOOL_MESSAGE)
        call_id = text_of(message.get("tool_call_id"), f"{param}.tool_call_id", MAX_LABEL)
        name = message.get("name")
        return HistoryMessage(
            "tool",
            text,
            call_id=call_id,
            name="" if name is None else text_of(name, f"{param}.name", MAX_LABEL),
        )
    only(message, param, _MESSAGE)
    return HistoryMessage(role, text)


def _assistant(message: Mapping[str, Any], param: str) -> HistoryMessage:
    only(message, param, _ASSISTANT)
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise invalid(f"Unsupported parameter: '{param}.{name}' is not supported.", f"{param}.{name}")
    content = message.get("content")
    if is_text(content):
        texts = [content]
    else:
        texts = [] if content is None else list(_texts(content, f"{param}.content"))
    if message.get("refusal") is not None:
        texts.append(text_of(message["refusal"], f"{param}.refusal"))
    thought = message.get("reasoning_content")
    if thought is None:
        thought = message.get("reasoning")
    return HistoryMessage(
        "assistant",
        "\n".join(texts),
        thought="" if thought is None else text_of(thought, f"{param}.reasoning_content"),
        calls=tuple(_history_calls(message.get("tool_calls"), f"{param}.tool_calls")),
    )


def _history_calls(value: object, param: str) -> Iterator[HistoryCall]:
    for at, call in enumerate([] if value is None else list_of(value, param, MAX_CALL_MESSAGES)):
        path = f"{param}[{at}]"
        object_of(call, path, _TOOL_CALL)
        if call.get("type", "function") != "function":
            raise invalid(f"Invalid value for '{path}.type': expected 'function'.", f"{path}.type")
        function = object_of(call.get("function"), f"{path}.function", _CALLED)
        yield HistoryCall(
            text_of(call.get("id"), f"{path}.id", MAX_LABEL),
            text_of(function.get("name"), f"{path}.function.name", MAX_LABEL),
            text_of(function.get("arguments"), f"{path}.function.arguments"),
        )


def _texts(content: object, param: str) -> Iterator[str]:
    """Yield the texts of a message's content."""
    if isinstance(content, str):
        yield text_of(content, param)
        return
    for at, part in enumerate(list_of(content, param, MAX_CALL_MESSAGES)):
        path = f"{param}[{at}]"
        kind = object_of(part, path).get("type")
        if isinstance(kind, str) and kind in _NO_TEXT:
            raise invalid(f"Invalid '{path}': the model reads text only, and no {_NO_TEXT[kind]}.", path)
        if kind not in ("text", "refusal"):
            raise invalid(f"Invalid value for '{path}.type': expected 'text'.", f"{path}.type")
        only(part, path, _PART)
        yield text_of(part.get(kind), f"{path}.{kind}")
