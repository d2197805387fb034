"""Google's protocol of the gateway, as Google's own SDK and Gemini CLI speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from aiohttp import web
from google import genai
from google.genai import errors, types
from pydantic import ValidationError
from rollyard_pipeline.gateway.calls import (
    MAX_CALL_MESSAGES,
    MAX_CALL_TOOLS,
    HistoryCall,
    HistoryMessage,
    ModelCall,
    Opening,
    ReplyCall,
)
from rollyard_pipeline.gateway.errors import STATUS, CallError
from rollyard_pipeline.gateway.protocols.fields import MAX_SCHEMA_DEPTH
from rollyard_pipeline.gateway.protocols.google import GoogleGenerateContent
from rollyard_pipeline.gateway.protocols.objects import MAX_TOOLS
from rollyard_testing.gateway import MODEL, REPLIES, ScriptedGateway, ScriptedReply, serving

# The SDK's own asynchronous transport derives from aiohttp's session.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
PROTOCOL = GoogleGenerateContent()
BASH: Any = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {
        "type": "OBJECT",
        "properties": {"command": {"type": "STRING", "nullable": True}, "type": {"type": "INTEGER"}},
        "required": ["command"],
        "propertyOrdering": ["command"],
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": ["string", "null"]}, "type": {"type": "integer"}},
    "required": ["command"],
}
THOUGHTS = types.GenerateContentConfig(
    thinking_config=types.ThinkingConfig(include_thoughts=True),
    tools=[types.Tool(function_declarations=[types.FunctionDeclaration.model_validate(BASH)])],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)
HI: dict[str, Any] = {"role": "user", "parts": [{"text": "Hi"}]}
OURS = {"rollyard_error"}
"""What we send and the SDK does not know."""


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def url(gateway: ScriptedGateway) -> AsyncIterator[str]:
    async def count(request: web.Request) -> web.Response:
        call = PROTOCOL.read(await request.json(), {}, {"method": "countTokens", "model": "m"})
        return web.json_response(PROTOCOL.counted(await gateway.count_tokens(call)))

    models = {"/v1/models": PROTOCOL.models, "/v1/models/{model}": PROTOCOL.models}
    counting = {f"/v1/models/{MODEL}:countTokens": count}
    paths = {
        f"/v1/models/{{model}}:{{method:{method}}}": PROTOCOL
        for method in ("generateContent", "streamGenerateContent")
    }
    async with serving(gateway, paths, models, counting) as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[genai.client.AsyncClient]:
    client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=url))
    async with client.aio as one:
        yield one
    client.close()


def reading(body: Any, headers: dict[str, str] | None = None, method: str = "generateContent") -> ModelCall:
    return PROTOCOL.read(json.loads(json.dumps(body)), headers or {}, {"method": method, "model": "m"})


def without_ours(value: Any) -> tuple[Any, set[str]]:
    """Return a body without the fields that are ours, and the names of those."""
    if isinstance(value, list):
        parts = [without_ours(one) for one in value]
        return [one for one, _ in parts], set().union(*(names for _, names in parts))
    if isinstance(value, dict):
        parts = [without_ours(one) for one in value.values()]
        kept = {name: one for name, (one, _) in zip(value, parts, strict=True) if name not in OURS}
        return kept, set().union(value.keys() & OURS, *(names for _, names in parts))
    return value, set()


def stream(reply: ScriptedReply, *, thoughts: bool = True, sse: bool = True) -> bytes:
    call = ModelCall((), stream=True, details={"sse": sse, "thoughts": thoughts})
    whole = reply.whole(1)
    writer = PROTOCOL.events(call, Opening(whole.id, whole.created, whole.model, whole.usage.prompt))
    sent = writer.begin() + writer.idle() + b"".join(map(writer.delta, reply.pieces())) + writer.idle()
    assert writer.content_type == ("text/event-stream" if sse else "application/json")
    return sent + writer.end(whole)


def chunks(sent: bytes) -> Iterator[dict[str, Any]]:
    """Yield the responses of a stream of events, which holds nothing else but blank lines."""
    for line in sent.decode().splitlines():
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("thoughts", [False, True])
def test_answers_and_responses_of_a_stream_have_no_field_that_the_sdk_does_not_know(
    name: str, thoughts: bool
) -> None:
    reply = REPLIES[name]
    ours = OURS if name == "malformed" else set()
    body = PROTOCOL.answer(ModelCall((), details={"thoughts": thoughts}), reply.whole(1))
    seen: set[str] = set()
    for response in (json.loads(json.dumps(body)), *chunks(stream(reply, thoughts=thoughts))):
        known, names = without_ours(response)
        parsed = types.GenerateContentResponse.model_validate(known)
        assert parsed.model_dump(mode="json", by_alias=True, exclude_unset=True) == known
        assert parsed.candidates
        assert parsed.candidates[0].content is not None
        assert parsed.candidates[0].content.parts
        assert parsed.usage_metadata is not None
        assert (parsed.response_id, parsed.model_version) == (f"{1:032x}", MODEL)
        seen |= names
    assert seen == ours


def test_the_sdk_would_refuse_a_field_that_it_does_not_know() -> None:
    body = PROTOCOL.answer(ModelCall(()), REPLIES["text"].whole(1))
    body["candidates"][0]["content"]["more"] = 1
    with pytest.raises(ValidationError, match=r"content\.more"):
        types.GenerateContentResponse.model_validate(body)


@pytest.mark.parametrize("name", REPLIES)
def test_a_stream_without_events_is_one_json_array(name: str) -> None:
    reply = REPLIES[name]
    assert json.loads(stream(reply, sse=False)) == list(chunks(stream(reply)))


def test_a_stream_that_breaks_ends_with_an_error_in_both_forms() -> None:
    for sse in (True, False):
        call = ModelCall((), stream=True, details={"sse": sse})
        writer = PROTOCOL.events(call, Opening("a", 1, MODEL, 3))
        first = writer.begin()
        second = writer.fail(CallError("unavailable", "no backend", retry_after=1.5))
        whole = next(chunks(first + second)) if sse else json.loads(first + second)[0]
        retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "1.5s"}
        error = {"code": 503, "message": "no backend", "status": "UNAVAILABLE", "details": [retry]}
        assert whole == {"error": error}


def check(responses: list[types.GenerateContentResponse], reply: ScriptedReply) -> types.Content:
    """Compare what the SDK has read with a reply, and return its parts as one content."""
    parts = []
    for response in responses:
        assert response.candidates
        content = response.candidates[0].content
        assert content is not None
        assert content.role == "model"
        parts.extend(content.parts or ())
    assert "".join(part.text or "" for part in parts if part.thought) == reply.thought
    assert "".join(part.text or "" for part in parts if not part.thought) == reply.text
    calls = [part.function_call for part in parts if part.function_call]
    assert [(call.id, call.name) for call in calls] == [(call.id, call.name) for call in reply.calls]
    for call, sent in zip(calls, reply.calls, strict=True):
        unparsed = {"__unparsedToolInput": {"raw": sent.arguments, "len": len(sent.arguments)}}
        assert call.args == (unparsed if sent.error else json.loads(sent.arguments))
    *before, last = responses
    finish = types.FinishReason.MAX_TOKENS if reply.finish == "length" else types.FinishReason.STOP
    assert [response.candidates[0].finish_reason for response in before if response.candidates] == [
        None
    ] * len(before)
    assert last.candidates
    assert last.candidates[0].finish_reason == finish
    usage = last.usage_metadata
    assert usage is not None
    assert usage.prompt_token_count is not None
    assert usage.candidates_token_count == (13 if reply.thought else 20)
    assert usage.thoughts_token_count == (7 if reply.thought else None)
    assert usage.total_token_count == usage.prompt_token_count + 20
    return types.Content(role="model", parts=parts)


@pytest.mark.parametrize("name", REPLIES)
async def test_the_sdk_reads_answer_and_stream_alike(
    name: str, gateway: ScriptedGateway, client: genai.client.AsyncClient, url: str
) -> None:
    reply = REPLIES[name]
    gateway.say(*[reply] * 4)
    answer = await client.models.generate_content(model=MODEL, contents="Hi", config=THOUGHTS)
    streaming = await client.models.generate_content_stream(model=MODEL, contents="Hi", config=THOUGHTS)
    check([answer], reply)
    check([response async for response in streaming], reply)

    def talk() -> tuple[types.GenerateContentResponse, list[types.GenerateContentResponse]]:
        with genai.Client(api_key="k", http_options=types.HttpOptions(base_url=url)) as sync:
            once = sync.models.generate_content(model=MODEL, contents="Hi", config=THOUGHTS)
            return once, list(
                sync.models.generate_content_stream(model=MODEL, contents="Hi", config=THOUGHTS)
            )

    once, streamed = await asyncio.to_thread(talk)
    check([once], reply)
    check(streamed, reply)
    assert [call.stream for call in gateway.calls] == [False, True] * 2
    assert {call.model for call in gateway.calls} == {MODEL}
    assert gateway.calls[0].tools == (
        {
            "type": "function",
            "function": {"name": "bash", "description": "Run a command.", "parameters": SCHEMA},
        },
    )


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_chat_of_the_sdk_repeats_a_reply_as_it_was_sent(
    name: str, streams: bool, gateway: ScriptedGateway, client: genai.client.AsyncClient
) -> None:
    reply = REPLIES[name]
    gateway.say(reply, ScriptedReply("ok"))
    chat = client.chats.create(model=MODEL, config=THOUGHTS)
    if streams:
        async for _ in await chat.send_message_stream("Hi"):
            pass
    else:
        await chat.send_message("Hi")
    parts: list[Any] = [
        types.Part(
            function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": "out"})
        )
        for call in reply.calls
    ]
    await chat.send_message([*parts, "Go on."])
    asked, said, *after = gateway.calls[-1].messages
    assert asked == HistoryMessage("user", "Hi")
    assert (said.role, said.text, said.thought) == ("assistant", reply.text, reply.thought)
    assert [(call.id, call.name) for call in said.calls] == [(call.id, call.name) for call in reply.calls]
    for sent, repeated in zip(reply.calls, said.calls, strict=True):
        if sent.error:
            assert repeated.arguments == sent.arguments
        else:
            assert json.loads(repeated.arguments) == json.loads(sent.arguments)
    assert after == [
        *(HistoryMessage("tool", "out", call_id=call.id, name=call.name) for call in reply.calls),
        HistoryMessage("user", "Go on."),
    ]


async def test_the_sdk_runs_a_function_by_itself(
    gateway: ScriptedGateway, client: genai.client.AsyncClient
) -> None:
    def read(name: str) -> str:
        """Read a file."""
        return f"text of {name}"

    gateway.say(ScriptedReply(calls=(ReplyCall("call_1", "read", '{"name": "a"}'),)), ScriptedReply("Done."))
    config = types.GenerateContentConfig(tools=[read])
    answer = await client.models.generate_content(model=MODEL, contents="Hi", config=config)
    assert answer.text == "Done."
    _, said, result = gateway.calls[-1].messages
    assert said.calls == (HistoryCall("call_1", "read", '{"name":"a"}'),)
    assert (result.role, result.name, json.loads(result.text)) == ("tool", "read", {"result": "text of a"})


async def test_models_and_counts_of_tokens(
    gateway: ScriptedGateway, client: genai.client.AsyncClient
) -> None:
    listed = [model async for model in await client.models.list()]
    one = await client.models.get(model=MODEL)
    assert [model.name for model in listed] == [one.name] == [f"models/{MODEL}"]
    assert (one.input_token_limit, one.supported_actions) == (
        gateway.context,
        ["generateContent", "streamGenerateContent", "countTokens"],
    )
    with pytest.raises(errors.ClientError, match="models/other is not found"):
        await client.models.get(model="other")
    count = await client.models.count_tokens(model=MODEL, contents="Hello")
    assert count.total_tokens == len("Hello")
    request = {"model": "models/m", "contents": [HI], "systemInstruction": {"parts": [{"text": "Be kind."}]}}
    call = reading({"generateContentRequest": request}, method="countTokens")
    assert [message.role for message in call.messages] == ["system", "user"]


@pytest.mark.parametrize("problem", STATUS)
async def test_errors_have_the_form_of_the_service(
    problem: Any, gateway: ScriptedGateway, client: genai.client.AsyncClient
) -> None:
    error = CallError(problem, "so it is", tokens=(5000, 4096) if problem == "context" else None)
    gateway.say(ScriptedReply(refused=error), ScriptedReply("He", broken=error))
    with pytest.raises(errors.APIError) as refused:
        await client.models.generate_content(model=MODEL, contents="Hi")
    statuses = {
        "unauthorized": "UNAUTHENTICATED",
        "not_found": "NOT_FOUND",
        "busy": "RESOURCE_EXHAUSTED",
        "unavailable": "UNAVAILABLE",
        "failed": "INTERNAL",
    }
    text = "The input token count (5000) exceeds the maximum number of tokens allowed (4096)."
    message = text if problem == "context" else "so it is"
    expected = (error.status, statuses.get(problem, "INVALID_ARGUMENT"), message)
    assert (refused.value.code, refused.value.status, refused.value.message) == expected

    heard = []

    async def listen() -> None:
        async for response in await client.models.generate_content_stream(model=MODEL, contents="Hi"):
            heard.append(response.text)

    with pytest.raises(errors.APIError) as broken:
        await listen()
    assert (broken.value.code, broken.value.message) == (error.status, message)
    assert heard == ["He"]


def test_thoughts_are_shown_if_the_call_asks_for_them() -> None:
    reply = REPLIES["all"]
    shown = reading({"contents": [HI], "generationConfig": {"thinkingConfig": {"includeThoughts": True}}})
    hidden = reading({"contents": [HI], "generationConfig": {"thinkingConfig": {"thinkingBudget": -1}}})
    for call, thoughts in ((shown, ["Where?"]), (hidden, [])):
        answer = PROTOCOL.answer(call, reply.whole(1))
        parts = answer["candidates"][0]["content"]["parts"]
        assert [part["text"] for part in parts if part.get("thought")] == thoughts
        sent = stream(reply, thoughts=call.details["thoughts"])
        assert (b'"thought":true' in sent) == bool(thoughts)


GEMINI_CLI: dict[str, Any] = {
    "contents": [
        {"parts": [{"text": "<session_context>\nToday is Sunday."}], "role": "user"},
        {"parts": [{"text": "Fix it."}], "role": "user"},
        {
            "parts": [
                {"text": "I look."},
                {
                    "functionCall": {"id": "call_1", "name": "run_shell_command", "args": {"command": "ls"}},
                    "thoughtSignature": "skip_thought_signature_validator",
                },
                {"functionCall": {"name": "read_file", "args": {"path": "a"}}},
            ],
            "role": "model",
        },
        {
            "parts": [
                {
                    "functionResponse": {
                        "id": "call_1",
                        "name": "run_shell_command",
                        "response": {"output": "Output: a.py\nProcess Group PGID: 7"},
                    }
                },
                {"functionResponse": {"name": "read_file", "response": {"error": "no such file"}}},
                {"functionResponse": {"name": "glob", "response": {"output": "x", "more": [1]}}},
            ],
            "role": "user",
        },
    ],
    "systemInstruction": {"parts": [{"text": "You are Gemini CLI."}], "role": "user"},
    "tools": [
        {
            "functionDeclarations": [
                {
                    "name": "mcp.files:read-it",
                    "description": "Read.",
                    "parametersJsonSchema": {"type": "object", "properties": {"path": {"type": "string"}}},
                },
                {"name": "complete_task"},
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    "generationConfig": {
        "temperature": 1,
        "topP": 0.95,
        "topK": 64,
        "maxOutputTokens": "1000",
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
    },
}


def snake(value: Any) -> Any:
    """Return a body with the names of all fields in snake_case, as litellm writes some of them."""
    if isinstance(value, list):
        return [snake(one) for one in value]
    if isinstance(value, dict):
        return {
            "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name): snake(one)
            for name, one in value.items()
        }
    return value


def test_a_call_of_gemini_cli_is_understood() -> None:
    call = reading(GEMINI_CLI, {"user-agent": "GeminiCLI/0.61.0 (linux; x64)"}, "streamGenerateContent")
    assert call.messages == (
        HistoryMessage("system", "You are Gemini CLI."),
        HistoryMessage("user", "<session_context>\nToday is Sunday."),
        HistoryMessage("user", "Fix it."),
        HistoryMessage(
            "assistant",
            "I look.",
            calls=(
                HistoryCall("call_1", "run_shell_command", '{"command":"ls"}'),
                HistoryCall("", "read_file", '{"path":"a"}'),
            ),
        ),
        HistoryMessage(
            "tool", "Output: a.py\nProcess Group PGID: 7", call_id="call_1", name="run_shell_command"
        ),
        HistoryMessage("tool", "no such file", name="read_file", failed=True),
        HistoryMessage("tool", '{"output":"x","more":[1]}', name="glob"),
    )
    assert [tool["function"]["name"] for tool in call.tools] == ["mcp.files:read-it", "complete_task"]
    assert call.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert (call.stream, call.max_tokens, call.marks.kind) == (True, 1000, "subagent")
    assert call.asked == {
        "temperature": 1,
        "topP": 0.95,
        "topK": 64,
        "maxOutputTokens": 1000,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
        "toolsLeftOut": ["googleSearch"],
    }
    assert reading(GEMINI_CLI).marks.kind is None
    assert reading(GEMINI_CLI, {"x-rollyard-conversation": "subagent"}).marks.kind == "subagent"


def test_both_spellings_of_names_are_the_same_call() -> None:
    assert reading(snake(GEMINI_CLI)) == reading(GEMINI_CLI)


def test_an_object_may_stand_for_a_list_of_one() -> None:
    call = reading({"contents": {"parts": {"text": "Hi"}}, "tools": {"functionDeclarations": BASH}})
    assert call.messages == (HistoryMessage("user", "Hi"),)
    assert call.tools[0]["function"]["parameters"] == SCHEMA


def test_the_contents_of_a_stream_are_one_message() -> None:
    pieces = [
        {"role": "model", "parts": [{"text": "Wh", "thought": True}]},
        {"role": "model", "parts": [{"text": "y", "thought": True}, {"text": "He"}]},
        {"role": "model", "parts": [{"text": "llo"}, {"thoughtSignature": "AA=="}]},
        {"role": "model", "parts": [{"functionCall": {"name": "read"}}]},
        {"role": "model", "parts": [{"text": ""}]},
    ]
    call = reading({"contents": [HI, *pieces, HI]})
    assert call.messages[1:2] == (
        HistoryMessage("assistant", "Hello", "Why", (HistoryCall("", "read", "{}"),)),
    )
    assert len(call.messages) == 3


def test_a_schema_of_google_becomes_a_json_schema() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "any_of": {"anyOf": [{"type": "STRING", "min_length": "1"}, {"$ref": "#/$defs/a"}]},
            "list": {"type": "ARRAY", "items": {"type": "NUMBER", "example": 3}, "maxItems": 4},
            "map": {"type": "OBJECT", "additionalProperties": {"type": "BOOLEAN"}},
            "plain": {"type": "TYPE_UNSPECIFIED", "description": "d", "enum": ["a"], "default": "a"},
        },
        "defs": {"a": {"type": "NULL"}},
    }
    [tool] = reading(
        {"contents": [HI], "tools": [{"functionDeclarations": [{"name": "t", "parameters": parameters}]}]}
    ).tools
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "any_of": {"anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/a"}]},
            "list": {"type": "array", "items": {"type": "number", "examples": [3]}, "maxItems": 4},
            "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "plain": {"description": "d", "enum": ["a"], "default": "a"},
        },
        "$defs": {"a": {"type": "null"}},
    }


def test_the_query_says_which_stream_it_is_and_the_mode_whether_tools_are_offered() -> None:
    for query, sse in (("alt=sse", True), ("key=k&alt=sse", True), ("alt=json", False), ("", False)):
        path = {"method": "streamGenerateContent", "model": "m", "query": query}
        assert PROTOCOL.read({"contents": [HI]}, {}, path).details["sse"] == sse
    none = {"functionCallingConfig": {"mode": "NONE"}}
    assert reading({**GEMINI_CLI, "toolConfig": none}).tools == ()
    opencode = {"x-session-id": "child", "x-parent-session-id": "parent"}
    marks = reading({"contents": [HI]}, opencode).marks
    assert (marks.session, marks.agent, marks.kind) == ("parent", "child", "subagent")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "OBJECT"}
    for _ in range(depth):
        schema = {"type": "OBJECT", "properties": {"a": schema}}
    return schema


def parts(*several: Any, role: str = "user") -> dict[str, Any]:
    return {"contents": [{"role": role, "parts": list(several)}, HI]}


def tools(*several: Any) -> dict[str, Any]:
    return {"tools": [{"functionDeclarations": list(several)}]}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown-field": ({"foo": 1}, 'Unknown name "foo": Cannot find field.'),
    "unknown-part": (
        parts({"txt": "a"}),
        "Unknown name \"txt\" at 'contents[0].parts[0]': Cannot find field.",
    ),
    "unknown-sampling": (sampling(topX=1), "Unknown name \"topX\" at 'generation_config'"),
    "both-names": ({"toolConfig": {}, "tool_config": {}}, "tool_config: the field is set twice"),
    "no-contents": ({"contents": []}, "contents"),
    "contents": ({"contents": "Hi"}, "contents"),
    "many-contents": ({"contents": [HI] * (MAX_CALL_MESSAGES + 1)}, "contents"),
    "content": ({"contents": ["Hi"]}, "contents[0]"),
    "role": ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role: Please use a valid role"),
    "last": ({"contents": [HI, {"role": "model", "parts": []}]}, "contents: the last content"),
    "parts": ({"contents": [{"parts": "Hi"}]}, "contents[0].parts"),
    "text": (parts({"text": 1}), "contents[0].parts[0].text"),
    "two-kinds": (parts({"text": "a", "inlineData": {}}), "contents[0].parts[0]: a part has one kind"),
    "image": (parts({"inlineData": {"mimeType": "image/png", "data": ""}}), "the model reads no images"),
    "audio": (
        parts({"inlineData": {"mimeType": "audio/wav", "data": ""}}),
        "contents[0].parts[0].inlineData: the model reads no images, audio or files",
    ),
    "file": (parts({"file_data": {"fileUri": "x"}}), "contents[0].parts[0].fileData: the model reads no"),
    "code": (parts({"executableCode": {}}, role="model"), "contents[0].parts[0].executableCode"),
    "call-of-user": (parts({"functionCall": {"name": "a"}}), "contents[0].parts[0].functionCall"),
    "result-of-model": (
        parts({"functionResponse": {"name": "a"}}, role="model"),
        "contents[0].parts[0].functionResponse",
    ),
    "args": (parts({"functionCall": {"name": "a", "args": "{}"}}, role="model"), "functionCall.args"),
    "call-id": (parts({"functionCall": {"id": 1}}, role="model"), "functionCall.id"),
    "long-id": (parts({"functionCall": {"id": "a" * 999}}, role="model"), "functionCall.id"),
    "response": (parts({"functionResponse": {"response": "x"}}), "functionResponse.response"),
    "response-parts": (
        parts({"functionResponse": {"parts": [{}]}}),
        "functionResponse.parts: the model reads no",
    ),
    "thought": (parts({"text": "a", "thought": "yes"}, role="model"), "contents[0].parts[0].thought"),
    "system": ({"systemInstruction": "Be kind."}, "system_instruction"),
    "system-image": ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "system_instruction.parts[0]"),
    "cached": ({"cachedContent": "cachedContents/1"}, "cachedContent"),
    "any": (
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        "function_calling_config: the model samples",
    ),
    "mode": ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "function_calling_config.mode"),
    "allowed": (
        {"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["a"]}}},
        "function_calling_config",
    ),
    "stop": (sampling(stopSequences=["END"]), "generation_config.stopSequences"),
    "candidates": (sampling(candidateCount=2), "generation_config.candidateCount"),
    "schema": (sampling(responseSchema={"type": "OBJECT"}), "generation_config.responseSchema"),
    "json-schema": (sampling(_responseJsonSchema={"a": 1}), "generation_config.responseJsonSchema"),
    "json": (sampling(responseMimeType="application/json"), "generation_config.responseMimeType"),
    "speech": (sampling(responseModalities=["AUDIO"]), "generation_config.responseModalities"),
    "logprobs": (sampling(responseLogprobs=True), "generation_config.responseLogprobs"),
    "temperature": (sampling(temperature=3), "generation_config.temperature"),
    "top-p": (sampling(topP="x"), "generation_config.topP"),
    "most": (sampling(maxOutputTokens=0), "generation_config.maxOutputTokens"),
    "most-fraction": (sampling(maxOutputTokens=1.5), "generation_config.maxOutputTokens"),
    "thinking": (
        sampling(thinkingConfig={"deep": 1}),
        "Unknown name \"deep\" at 'generation_config.thinking_config'",
    ),
    "long": (sampling(thinkingConfig={"thinkingLevel": "a" * 20_000}), "thinkingConfig"),
    "tools": ({"tools": "x"}, "tools"),
    "many-tools": (
        tools(*({"name": f"t{number}"} for number in range(1000))),
        f"it has 1000 entries, and at most {MAX_CALL_TOOLS}",
    ),
    "many-lists": (
        {"tools": [{"functionDeclarations": [{"name": f"t{number}"}]} for number in range(1000)]},
        f"it has 1000 entries, and at most {MAX_CALL_TOOLS}",
    ),
    "large-tools": (tools({**BASH, "description": "a" * MAX_TOOLS}), f"tools: at most {MAX_TOOLS} bytes"),
    "same-tools": (tools(BASH, BASH), "tools[0].function_declarations[1].name"),
    "tool-name": (tools({"name": "1 a"}), "tools[0].function_declarations[0].name"),
    "long-name": (tools({"name": "a" * 129}), "tools[0].function_declarations[0].name"),
    "computer": ({"tools": [{"computerUse": {}}]}, "tools[0].computerUse"),
    "two-schemas": (
        tools({**BASH, "parametersJsonSchema": {}}),
        "tools[0].function_declarations[0].parameters",
    ),
    "schema-type": (tools({"name": "a", "parameters": {"type": "BYTES"}}), "parameters.type"),
    "schema-field": (tools({"name": "a", "parameters": {"oneOf": []}}), 'Unknown name "oneOf"'),
    "deep": (
        tools({"name": "a", "parameters": nested(MAX_SCHEMA_DEPTH)}),
        "function_declarations[0].parameters",
    ),
    "very-deep": (tools({"name": "a", "parameters": nested(300)}), "nested more than"),
    "deep-json": (
        tools({"name": "a", "parametersJsonSchema": nested(300)}),
        "function_declarations[0].parameters",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_the_name_of_the_field(name: str) -> None:
    change, expected = BAD[name]
    with pytest.raises(CallError) as refused:
        reading({"contents": [HI], **change})
    assert expected in refused.value.message
    assert refused.value.status == 400
    assert refused.value.param is not None
    assert len(refused.value.message) < 1000


def test_null_counts_as_absent() -> None:
    call = reading({"contents": [{"role": None, "parts": [{"text": "Hi", "thought": None}]}], "tools": None})
    assert call.messages == (HistoryMessage("user", "Hi"),)


async def test_no_stream_has_a_comment(url: str, gateway: ScriptedGateway) -> None:
    gateway.say(REPLIES["all"])
    body = {"contents": [HI]}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/v1/models/m:streamGenerateContent?alt=sse", json=body)
    texts = [
        part.get("text")
        for chunk in chunks(answer.content)
        for part in chunk["candidates"][0]["content"]["parts"]
    ]
    assert "".join(text or "" for text in texts) == "I look."
