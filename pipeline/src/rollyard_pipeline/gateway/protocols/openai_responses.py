"""OpenAI's Responses, `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import orjson

from rollyard_pipeline.gateway.calls import Delta, ModelCall, ModelReply, Opening, ReplyCall, Usage
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.protocols.base import ERROR_FIELD, EventWriter
from rollyard_pipeline.gateway.protocols.fields import (
    MAX_LABEL,
    cannot,
    flag_of,
    invalid,
    list_of,
    object_of,
    text_of,
)
from rollyard_pipeline.gateway.protocols.marks import marks
from rollyard_pipeline.gateway.protocols.openai import (
    OpenAIProtocol,
    asked_of,
    check_stream_options,
    plain_text_format,
    refuse_set,
    tools_chosen,
)
from rollyard_pipeline.gateway.protocols.openai_items import ResponsesInput, ResponsesTools, seal

_KNOWN: Final = frozenset(
    [
        "access_programs",
        "background",
        "background_options",
        "client_metadata",
        "context_management",
        "conversation",
        "image",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "model",
        "moderation",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    ]
)
"""What is not read below is ignored, such as `store` and the keys of caches, which change no answer."""
_REFUSED: Final = {
    "background": "is not supported. Wait for the answer instead.",
    "context_management": "is not supported. The harness must shorten its history itself.",
    "conversation": "is not supported, because conversations are not stored. Send all items as 'input'.",
    "moderation": "is not supported, because nothing is moderated here.",
    "previous_response_id": "is not supported, because responses are not stored. Send all items as 'input'.",
    "prompt": "is not supported, because there are no stored prompts. Use 'instructions'.",
}
_ENCRYPTED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
_MAX_METADATA: Final = 16
_REASONING: Final = ("context", "effort", "generate_summary", "mode", "summary")
_Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OpenAIResponses(OpenAIProtocol):
    """Responses.

    A reply's thought is a `reasoning` item with its text as content. The answer repeats neither
    `instructions` nor `tools`, which may be large.
    """

    name: ClassVar[str] = "openai-responses"

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str], path: Mapping[str, str]) -> ModelCall:
        """Return the call that a request makes. See `ProviderProtocol.read`."""
        for name in body:
            if name not in _KNOWN:
                raise invalid(f"Unknown parameter: '{name[:MAX_LABEL]}'.", name[:MAX_LABEL])
        refuse_set(body, _REFUSED)
        if body.get("top_logprobs") not in (None, 0):
            raise cannot("top_logprobs", "must be 0. Log-probabilities are in the rollout's trajectory.")
        include = [] if body.get("include") is None else list_of(body["include"], "include", 64)
        if _LOGPROBS in include:
            raise cannot("include", "has log-probabilities, which are in the rollout's trajectory.")
        asked, max_tokens = asked_of(body, ("max_output_tokens",))
        if body.get("reasoning") is not None:
            reasoning = object_of(body["reasoning"], "reasoning", _REASONING)
            asked["reasoning"] = {
                name: text_of(value, f"reasoning.{name}", 64)
                for name, value in reasoning.items()
                if value is not None
            }
        if body.get("text") is not None:
            text = object_of(body["text"], "text", ("format", "verbosity"))
            plain_text_format(text.get("format"), "text.format")
            if text.get("verbosity") is not None:
                asked["verbosity"] = text_of(text["verbosity"], "text.verbosity", 64)
        if body.get("truncation") is not None:
            asked["truncation"] = text_of(body["truncation"], "truncation", 64)
        model = text_of(body.get("model"), "model", MAX_LABEL)
        stream = flag_of(body.get("stream"), "stream")
        check_stream_options(body, ("include_obfuscation",))
        tools = ResponsesTools()
        tools.add(body.get("tools"), "tools")
        messages = ResponsesInput(tools).read(body.get("input"), body.get("instructions"))
        if tools.left_out:
            asked["tools_left_out"] = tools.left_out
        chosen = tools_chosen(body.get("tool_choice"))
        return ModelCall(
            messages=messages,
            tools=tuple(tools.offered.schemas) if chosen else (),
            stream=stream,
            max_tokens=max_tokens,
            asked=asked,
            model=model,
            marks=marks(headers),
            details={
                "namespaces": tools.namespaces,
                "sealed": _ENCRYPTED in include,
                "repeated": {
                    "max_output_tokens": max_tokens,
                    "metadata": _metadata(body.get("metadata")),
                    "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
                    "tool_choice": "auto" if chosen else "none",
                },
            },
        )

    def answer(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """Return the body of the answer, which is a `response`."""
        items = _Items(reply.id, call.details)
        output = [items.reasoning(reply.thought)] if reply.thought else []
        if reply.text or not (reply.thought or reply.calls):
            output.append(items.message(reply.text))
        output.extend(items.call(one, at) for at, one in enumerate(reply.calls))
        return _ended(call, reply, output)

    def events(self, call: ModelCall, opening: Opening) -> EventWriter:
        """Return what writes the events of the items."""
        return _ResponsesEvents(call, opening)


class _ResponsesEvents(EventWriter):
    """The events of one reply. Each has the next `sequence_number`."""

    def __init__(self, call: ModelCall, opening: Opening) -> None:
        self._call = call
        self._opening = opening
        self._items = _Items(opening.id, call.details)
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._kind: Literal["", "reasoning", "message"] = ""
        """The item that is open."""
        self._pieces: list[str] = []
        self._prefix = b""
        """The beginning of the event of a piece of the open item."""
        self._calls = 0

    def begin(self) -> bytes:
        response = _response(self._call, self._opening, "in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        if delta.call is not None:
            return self._close() + self._called(delta.call)
        text = delta.thought or delta.text
        kind: Literal["reasoning", "message"] = "reasoning" if delta.thought else "message"
        opened = self._close() + self._open(kind) if kind != self._kind else b""
        self._pieces.append(text)
        event = b'%b,"sequence_number":%d,"delta":%b}\n\n' % (self._prefix, self._number, orjson.dumps(text))
        self._number += 1
        return opened + event

    def idle(self) -> bytes:
        """Return an event that says nothing new. Codex's timer for silence ignores all that is no event."""
        response = _response(self._call, self._opening, "in_progress", [])
        return self._event("response.in_progress", response=response)

    def end(self, reply: ModelReply) -> bytes:
        last = b"" if self._kind or self._output else self._open("message")
        last += self._close(incomplete=reply.finish == "length")
        name = "response.incomplete" if reply.finish == "length" else "response.completed"
        return last + self._event(name, response=_ended(self._call, reply, self._output))

    def fail(self, error: CallError) -> bytes:
        code = {"unavailable": "server_error", "failed": "server_error", "busy": "rate_limit_exceeded"}.get(
            error.problem, "invalid_prompt"
        )
        response = _response(self._call, self._opening, "failed", self._output)
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(body))

    def _open(self, kind: Literal["reasoning", "message"]) -> bytes:
        """Return the events that begin an item with text."""
        self._kind = kind
        item = self._items.reasoning("") if kind == "reasoning" else self._items.message("")
        at = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        head = {"type": name, **at} if kind == "reasoning" else {"type": name, **at, "logprobs": []}
        self._prefix = b"event: %b\ndata: %b" % (name.encode(), orjson.dumps(head)[:-1])
        part = item["content"][0]
        item = {**item, "status": "in_progress", "content": []}
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        return added + self._event("response.content_part.added", **at, part=part)

    def _close(self, incomplete: bool = False) -> bytes:
        """Return the events that end the open item, if one is open."""
        if not self._kind:
            return b""
        text = "".join(self._pieces)
        self._pieces.clear()
        thought = self._kind == "reasoning"
        item = self._items.reasoning(text) if thought else self._items.message(text)
        if incomplete:
            item["status"] = "incomplete"
        at = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        if thought:
            done = self._event("response.reasoning_text.done", **at, text=text)
        else:
            done = self._event("response.output_text.done", **at, text=text, logprobs=[])
        done += self._event("response.content_part.done", **at, part=item["content"][0])
        self._kind = ""
        return done + self._finished(item)

    def _called(self, call: ReplyCall) -> bytes:
        item = self._items.call(call, self._calls)
        self._calls += 1
        index = len(self._output)
        started = {**item, "arguments": "", "status": "in_progress"}
        at = {"item_id": item["id"], "output_index": index}
        return (
            self._event("response.output_item.added", output_index=index, item=started)
            + self._event("response.function_call_arguments.delta", **at, delta=call.arguments)
            + self._event("response.function_call_arguments.done", **at, arguments=call.arguments)
            + self._finished(item)
        )

    def _finished(self, item: dict[str, Any]) -> bytes:
        index = len(self._output)
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)


class _Items:
    """The items of one reply, complete."""

    def __init__(self, reply: str, details: Mapping[str, Any]) -> None:
        self._reply = reply
        self._sealed = details.get("sealed", False)
        self._namespaces: Mapping[str, tuple[str, str]] = details.get("namespaces", {})

    def reasoning(self, thought: str) -> dict[str, Any]:
        """Return the item of a thought."""
        item: dict[str, Any] = {
            "id": f"rs_{self._reply}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": thought}],
            "status": "completed",
        }
        if self._sealed:
            item["encrypted_content"] = seal(thought)
        return item

    def message(self, text: str) -> dict[str, Any]:
        """Return the item of a text."""
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {
            "id": f"msg_{self._reply}",
            "type": "message",
            "role": "assistant",
            "content": [part],
            "status": "completed",
        }

    def call(self, call: ReplyCall, number: int) -> dict[str, Any]:
        """Return the item of a call, which is the `number`-th of the reply."""
        namespace, name = self._namespaces.get(call.name, ("", call.name))
        item = {
            "id": f"fc_{self._reply}_{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": name,
            "arguments": call.arguments,
            "status": "completed",
        }
        if namespace:
            item["namespace"] = namespace
        if call.error:
            item[ERROR_FIELD] = call.error
        return item


def _response(
    call: ModelCall,
    reply: Opening | ModelReply,
    status: _Status,
    output: Sequence[Mapping[str, Any]],
    usage: Usage | None = None,
) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_tool_calls": None,
        "model": reply.model,
        "output": output,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "user": None,
        **call.details.get("repeated", {}),
    }


def _ended(call: ModelCall, reply: ModelReply, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response whose reply has ended. The last item of one that was cut off is incomplete."""
    if reply.finish != "length":
        return _response(call, reply, "completed", output, reply.usage)
    output[-1]["status"] = "incomplete"
    response = _response(call, reply, "incomplete", output, reply.usage)
    response["incomplete_details"] = {"reason": "max_output_tokens"}
    return response


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.sampled,
    }


def _metadata(value: object) -> dict[str, str]:
    metadata = {} if value is None else object_of(value, "metadata")
    if len(metadata) > _MAX_METADATA or any(len(name) > 64 for name in metadata):
        message = f"Invalid 'metadata': at most {_MAX_METADATA} pairs with keys of 64 characters are allowed."
        raise invalid(message, "metadata")
    return {name: text_of(one, f"metadata.{name}"[:MAX_LABEL], 512) for name, one in metadata.items()}
