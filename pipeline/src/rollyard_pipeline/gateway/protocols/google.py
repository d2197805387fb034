"""Google's generateContent: the call, the answer, a stream, the count of tokens, and the list of models.

What differs from the real service is what a model of one's own cannot have:

- Images, audio and files, forced calls, stop sequences, several candidates, cached contents, and answers that
  keep to a schema are refused.
- Tools that Google's servers run, such as `googleSearch`, are left out of what the model sees.
- Thoughts are sent if the call asks for them with `includeThoughts`. Signatures of thoughts are
  neither sent nor read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs

import orjson

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
from rollyard_pipeline.gateway.protocols.base import ERROR_FIELD, EventWriter, ProviderProtocol
from rollyard_pipeline.gateway.protocols.fields import MAX_LABEL, flag_of, list_of, number_of, text_of
from rollyard_pipeline.gateway.protocols.google_history import (
    known,
    names_of,
    read_contents,
    read_declarations,
    whole_number,
)
from rollyard_pipeline.gateway.protocols.marks import marks
from rollyard_pipeline.gateway.protocols.objects import bounded, call_object, refused

STREAM: Final = "streamGenerateContent"
COUNT: Final = "countTokens"
_BODY: Final = names_of(
    "model contents systemInstruction tools toolConfig safetySettings generationConfig cachedContent labels"
    " serviceTier store"
)
_COUNTED: Final = names_of("model contents systemInstruction tools generationConfig generateContentRequest")
_TOOL_CONFIG: Final = names_of("functionCallingConfig retrievalConfig includeServerSideToolInvocations")
_CALLING: Final = names_of("mode allowedFunctionNames streamFunctionCallArguments")
_GENERATION: Final = {
    **names_of(
        "stopSequences responseMimeType responseSchema responseJsonSchema responseModalities candidateCount"
        " maxOutputTokens temperature topP topK seed presencePenalty frequencyPenalty responseLogprobs"
        " logprobs enableEnhancedCivicAnswers speechConfig thinkingConfig imageConfig mediaResolution"
        " responseFormat"
    ),
    "_responseJsonSchema": "responseJsonSchema",
}
_THINKING: Final = names_of("includeThoughts thinkingBudget thinkingLevel")
_UNAVAILABLE: Final = {
    "stopSequences": "the model stops at its own end only; leave it out or empty",
    "responseSchema": "nothing forces the model to keep to a schema; ask for it in the prompt",
    "responseJsonSchema": "nothing forces the model to keep to a schema; ask for it in the prompt",
    "responseFormat": "nothing forces the model to keep to a form; ask for it in the prompt",
    "responseLogprobs": "log-probabilities are in the rollout's record only; leave it out",
    "logprobs": "log-probabilities are in the rollout's record only; leave it out",
    "speechConfig": "the model writes text only; leave it out",
    "imageConfig": "the model writes text only; leave it out",
}
_RANGES: Final = {
    "temperature": (0.0, 2.0),
    "topP": (0.0, 1.0),
    "presencePenalty": (-2.0, 2.0),
    "frequencyPenalty": (-2.0, 2.0),
}
_FINISH: Final[dict[Finish, str]] = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
_STATUS: Final[dict[CallProblem, str]] = {
    "unauthorized": "UNAUTHENTICATED",
    "not_found": "NOT_FOUND",
    "busy": "RESOURCE_EXHAUSTED",
    "unavailable": "UNAVAILABLE",
    "failed": "INTERNAL",
}


class GoogleGenerateContent(ProviderProtocol):
    """The methods of `POST /v1beta/models/{model}:{method}`.

    They are `generateContent`, `countTokens`, and `streamGenerateContent`, which answers with events if the
    query has `alt=sse`, else with a JSON array.
    """

    name = "google-generate-content"

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str], path: Mapping[str, str]) -> ModelCall:
        """Return the call."""
        method = path.get("method", "")
        fields = _counted(body) if method == COUNT else known(body, _BODY, "")
        if fields.get("cachedContent"):
            raise refused("cachedContent", "no content is cached here; send the whole history in 'contents'")
        messages = read_contents(fields.get("systemInstruction"), fields.get("contents", []))
        if method != COUNT and messages[-1].role == "assistant":
            raise refused("contents", "the last content must be the user's")
        tools, left_out = read_declarations(fields.get("tools"))
        asked = _asked(fields.get("generationConfig", {}))
        asked = bounded({**asked, **({"toolsLeftOut": left_out} if left_out else {})})
        known_marks = marks(headers)
        # Gemini CLI says by nothing else that a call is a sub-agent's.
        if (
            known_marks.kind is None
            and "GeminiCLI" in headers.get("user-agent", "")
            and any(tool["function"]["name"] == "complete_task" for tool in tools)
        ):
            known_marks = Marks(known_marks.session, known_marks.agent, "subagent")
        if not _may_call(fields.get("toolConfig")):
            tools = ()
        return ModelCall(
            messages=messages,
            tools=tools,
            stream=method == STREAM,
            max_tokens=asked.get("maxOutputTokens"),
            asked=asked,
            model=path.get("model", ""),
            marks=known_marks,
            details={
                "sse": parse_qs(path.get("query", "")).get("alt") == ["sse"],
                "thoughts": bool(asked.get("thinkingConfig", {}).get("includeThoughts")),
            },
        )

    def answer(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """Return the response."""
        parts: list[dict[str, Any]] = []
        if reply.thought and call.details.get("thoughts"):
            parts.append({"text": reply.thought, "thought": True})
        if reply.text:
            parts.append({"text": reply.text})
        parts.extend(_called(one) for one in reply.calls)
        return {
            "candidates": [
                {
                    "content": {"parts": parts or [{"text": ""}], "role": "model"},
                    "finishReason": _FINISH[reply.finish],
                    "index": 0,
                }
            ],
            "usageMetadata": _usage(reply.usage),
            "modelVersion": reply.model,
            "responseId": reply.id,
        }

    def events(self, call: ModelCall, opening: Opening) -> EventWriter:
        """Return the writer of the stream, as events or as a JSON array."""
        writer = _ResponseEvents if call.details.get("sse") else _ResponseArray
        return writer(opening, bool(call.details.get("thoughts")))

    def error(self, error: CallError) -> dict[str, Any]:
        """Return the error."""
        message = error.message
        if error.problem == "context" and error.tokens is not None:
            size, most = error.tokens
            message = f"The input token count ({size}) exceeds the maximum number of tokens allowed ({most})."
        status = _STATUS.get(error.problem, "INVALID_ARGUMENT")
        body: dict[str, Any] = {"code": error.status, "message": message, "status": status}
        if error.retry_after is not None:
            kind = "type.googleapis.com/google.rpc.RetryInfo"
            body["details"] = [{"@type": kind, "retryDelay": f"{error.retry_after:g}s"}]
        return {"error": body}

    def counted(self, tokens: int) -> dict[str, Any]:
        """Return the body of the answer to a call that counts tokens."""
        return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}

    def models(self, gateway: RolloutGateway, path: Mapping[str, str]) -> dict[str, Any]:
        """Return the list of models, or one. See `ProviderProtocol.models`."""
        own = {
            "name": f"models/{gateway.model}",
            "baseModelId": gateway.model,
            "version": "1",
            "displayName": gateway.model,
            "inputTokenLimit": gateway.context,
            "outputTokenLimit": gateway.context,
            "supportedGenerationMethods": ["generateContent", STREAM, COUNT],
        }
        asked = path.get("model")
        if asked is None:
            return {"models": [own]}
        if asked != gateway.model:
            raise CallError(
                "not_found", f"models/{asked[:MAX_LABEL]} is not found; use models/{gateway.model}"
            )
        return own


def _counted(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a call that counts tokens: those of `generateContentRequest`, or its own."""
    fields = known(body, _COUNTED, "")
    request = fields.pop("generateContentRequest", None)
    if request is None:
        return fields
    if "contents" in fields:
        raise refused("contents", "give it or generateContentRequest, and not both")
    return known(request, _BODY, "generate_content_request")


def _may_call(value: object) -> bool:
    """Return whether the call lets the model call functions.

    Raises:
        CallError: It forces the model to, or to call some of them only.
    """
    if value is None:
        return True
    config = known(value, _TOOL_CONFIG, "tool_config")
    field = "tool_config.function_calling_config"
    calling = known(config.get("functionCallingConfig", {}), _CALLING, field)
    mode = text_of(calling.get("mode", "AUTO"), f"{field}.mode").upper()
    if mode in ("ANY", "VALIDATED") or calling.get("allowedFunctionNames"):
        raise refused(field, "the model samples freely; use mode AUTO or NONE, and no allowedFunctionNames")
    if mode not in ("AUTO", "NONE", "MODE_UNSPECIFIED"):
        raise refused(f"{field}.mode", "Invalid value, AUTO or NONE is needed")
    return mode != "NONE"


def _asked(value: object) -> dict[str, Any]:
    """Return the parameters of sampling."""
    field = "generation_config"
    asked = known(value, _GENERATION, field)
    for name, why in _UNAVAILABLE.items():
        if asked.get(name):
            raise refused(f"{field}.{name}", why)
        asked.pop(name, None)
    for name, (least, most) in _RANGES.items():
        if name in asked:
            number_of(asked[name], f"{field}.{name}", least, most)
    for name, least in (("maxOutputTokens", 1), ("candidateCount", 1), ("seed", -(1 << 31)), ("topK", 0)):
        if name in asked:
            asked[name] = whole_number(asked[name], f"{field}.{name}")
            if asked[name] < least:
                raise refused(f"{field}.{name}", f"at least {least} is needed")
    if asked.get("candidateCount", 1) != 1:
        raise refused(f"{field}.candidateCount", "a call has one candidate; use 1")
    if asked.get("responseMimeType", "text/plain") != "text/plain":
        raise refused(f"{field}.responseMimeType", "the model writes text freely; use 'text/plain'")
    if list_of(asked.get("responseModalities", []), f"{field}.responseModalities", 8) not in ([], ["TEXT"]):
        raise refused(f"{field}.responseModalities", "the model writes text only; use ['TEXT']")
    if "thinkingConfig" in asked:
        thinking = known(asked["thinkingConfig"], _THINKING, f"{field}.thinking_config")
        if "includeThoughts" in thinking:
            flag_of(thinking["includeThoughts"], f"{field}.thinking_config.includeThoughts")
        asked["thinkingConfig"] = thinking
    return asked


def _called(call: ReplyCall) -> dict[str, Any]:
    """Return the part of a call."""
    function: dict[str, Any] = {"id": call.id, "name": call.name, "args": call_object(call)}
    if call.error:
        function[ERROR_FIELD] = call.error
    return {"functionCall": function}


def _usage(usage: Usage) -> dict[str, Any]:
    counts = {
        "promptTokenCount": usage.prompt,
        "candidatesTokenCount": usage.sampled - usage.thought,
        "totalTokenCount": usage.prompt + usage.sampled,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": usage.prompt}],
    }
    if usage.thought:
        counts["thoughtsTokenCount"] = usage.thought
    return counts


class _ResponseEvents(EventWriter):
    """A stream of responses, each in an event without a name. Comments are never part of it.

    Gemini CLI fails at a comment. It ignores blank lines.
    """

    _BEGIN: ClassVar[bytes] = b"\n"
    _BEFORE: ClassVar[bytes] = b"data: "
    _AFTER: ClassVar[bytes] = b"\r\n\r\n"
    _END: ClassVar[bytes] = b""

    def __init__(self, opening: Opening, thoughts: bool) -> None:
        self._thoughts = thoughts
        known_now = {
            "usageMetadata": {
                "promptTokenCount": opening.prompt_tokens,
                "totalTokenCount": opening.prompt_tokens,
            },
            "modelVersion": opening.model,
            "responseId": opening.id,
        }
        self._rest = b'],"role":"model"},"index":0}],' + orjson.dumps(known_now)[1:]
        """What follows the one part in each response but the last one."""
        self._between = b""
        """What stands between the last response and the next one."""

    def begin(self) -> bytes:
        """Return the beginning of the stream, which is no response yet."""
        return self._BEGIN

    def delta(self, delta: Delta) -> bytes:
        """Return a response of one part."""
        if delta.call is not None:
            part = orjson.dumps(_called(delta.call))
        elif not delta.thought:
            part = b'{"text":' + orjson.dumps(delta.text) + b"}"
        elif self._thoughts:
            part = b'{"text":' + orjson.dumps(delta.thought) + b',"thought":true}'
        else:
            return self.idle()
        return self._written(b'{"candidates":[{"content":{"parts":[' + part + self._rest)

    def idle(self) -> bytes:
        """Return a blank line."""
        return b"\n"

    def end(self, reply: ModelReply) -> bytes:
        """Return the last response, which has the reason of the end and no further text."""
        response = {
            "candidates": [
                {
                    "content": {"parts": [{"text": ""}], "role": "model"},
                    "finishReason": _FINISH[reply.finish],
                    "index": 0,
                }
            ],
            "usageMetadata": _usage(reply.usage),
            "modelVersion": reply.model,
            "responseId": reply.id,
        }
        return self._written(orjson.dumps(response)) + self._END

    def fail(self, error: CallError) -> bytes:
        """Return the error in the place of a response."""
        return self._written(orjson.dumps(GoogleGenerateContent().error(error))) + self._END

    def _written(self, response: bytes) -> bytes:
        between, self._between = self._between, self._BETWEEN
        return between + self._BEFORE + response + self._AFTER

    _BETWEEN: ClassVar[bytes] = b""


class _ResponseArray(_ResponseEvents):
    """A stream of responses that is a JSON array."""

    content_type = "application/json"
    _BEGIN = b"["
    _BEFORE = b""
    _AFTER = b"\n"
    _BETWEEN = b","
    _END = b"]"
