"""Answers, events and errors of OpenAI's protocols of the gateway, as OpenAI's own SDK reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from rollyard_pipeline.gateway.calls import HistoryCall, HistoryMessage, ReplyCall
from rollyard_pipeline.gateway.errors import STATUS, CallError, CallProblem
from rollyard_pipeline.gateway.protocols.openai_chat import OpenAIChat
from rollyard_pipeline.gateway.protocols.openai_responses import OpenAIResponses
from rollyard_testing.gateway import MODEL, REPLIES, ScriptedGateway, ScriptedReply, serving, unknown_fields
from rollyard_testing.openai_requests import CHAT_TOOLS, RESPONSES_TOOLS, SCHEMAS, function

OWN_FIELDS = {"reasoning_content", "rollyard_error"}
"""What we send and the SDK doesn't know."""
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def url(gateway: ScriptedGateway) -> AsyncIterator[str]:
    protocols = {"/v1/chat/completions": OpenAIChat(), "/v1/responses": OpenAIResponses()}
    models = dict.fromkeys(("/v1/models", "/v1/models/{model}"), OpenAIChat().models)
    async with serving(gateway, protocols, models) as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as one:
        yield one


def own(parsed: BaseModel) -> set[str]:
    """Return the names of the fields that an SDK's model doesn't know."""
    return {path.rpartition(".")[2] for path in unknown_fields(parsed)}


async def raw_events(url: str, path: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Return name and data of each event of a stream."""
    async with httpx.AsyncClient() as http:
        answer = await http.post(url + path, json=body | {"stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        name = lines[0].removeprefix("event: ") if len(lines) == 2 else ""
        events.append((name, lines[-1].removeprefix("data: ")))
    return events


@pytest.mark.parametrize("name", REPLIES)
async def test_a_chat_answer_is_the_services(
    name: str, gateway: ScriptedGateway, client: openai.AsyncOpenAI, url: str
) -> None:
    script = REPLIES[name]
    gateway.say(script, script)
    got = await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Hi"}], tools=CHAT_TOOLS
    )
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as sync:
        again = await asyncio.to_thread(
            lambda: sync.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "Hi"}], tools=CHAT_TOOLS
            )
        )
    assert again.choices == got.choices
    checked = ChatCompletion.model_validate(got.to_dict())
    assert own(checked) <= OWN_FIELDS
    whole = script.whole(1)
    [choice] = checked.choices
    message = choice.message
    assert (checked.id, checked.model, checked.created) == (f"chatcmpl-{whole.id}", MODEL, whole.created)
    assert (message.content or "") == whole.text
    assert (message.content is None) == bool(whole.calls and not whole.text)
    assert (message.model_extra or {}).get("reasoning_content", "") == whole.thought
    assert choice.finish_reason == whole.finish
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        (call.id, call.name, call.arguments) for call in whole.calls
    ]
    assert [(call.model_extra or {}).get("rollyard_error", "") for call in calls] == [
        call.error for call in whole.calls
    ]
    usage = checked.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (101, 20, 121)
    assert usage.completion_tokens_details.reasoning_tokens == whole.usage.thought
    assert gateway.calls[0] == gateway.calls[1]
    assert gateway.calls[0].tools == SCHEMAS


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("name", REPLIES)
async def test_a_chat_stream_is_the_services(
    name: str, usage: bool, gateway: ScriptedGateway, client: openai.AsyncOpenAI, url: str
) -> None:
    script = REPLIES[name]
    gateway.say(script, script, script)
    body: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": CHAT_TOOLS,
    }
    if usage:
        body["stream_options"] = {"include_usage": True}
    events = await raw_events(url, "/v1/chat/completions", body)
    assert {event for event, _ in events} == {""}
    assert events[-1][1] == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(data) for _, data in events[:-1]]
    assert {field for chunk in chunks for field in own(chunk)} <= OWN_FIELDS
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [usage]
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    whole = script.whole(1)
    assert ends == [None] * (len(ends) - 1) + [whole.finish]

    # The SDK puts the chunks together as it does for its users.
    text, thought, ids = "", "", []
    stream = await client.chat.completions.create(**body, stream=True)
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            ids += [call.id for call in choice.delta.tool_calls or ()]
    assert (text, thought, ids) == (whole.text, whole.thought, [call.id for call in whole.calls])
    if script.finish == "length":  # The helper raises an exception for a reply that was cut off.
        return
    async with client.chat.completions.stream(**body) as helper:
        async for _ in helper:
            pass
        final = await helper.get_final_completion()
    direct = ChatCompletion.model_validate(OpenAIChat().answer(gateway.calls[-1], script.whole(3)))
    message = final.choices[0].message
    assert (message.content or "") == (direct.choices[0].message.content or "")
    assert [call.to_dict()["function"] for call in message.tool_calls or ()] == [
        {**call.to_dict()["function"], "parsed_arguments": None}  # type: ignore[dict-item]
        for call in direct.choices[0].message.tool_calls or ()
    ]
    assert final.usage == (direct.usage if usage else None)


@pytest.mark.parametrize("name", REPLIES)
async def test_a_response_is_the_services(
    name: str, gateway: ScriptedGateway, client: openai.AsyncOpenAI, url: str
) -> None:
    script = REPLIES[name]
    gateway.say(script, script)
    got = await client.responses.create(model="any", input="Hi", tools=RESPONSES_TOOLS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as sync:
        again = await asyncio.to_thread(
            lambda: sync.responses.create(model="any", input="Hi", tools=RESPONSES_TOOLS)
        )
    assert len(again.output) == len(got.output)
    checked = Response.model_validate(got.to_dict())
    assert own(checked) <= OWN_FIELDS
    whole = script.whole(1)
    assert (checked.id, checked.model) == (f"resp_{whole.id}", MODEL)
    assert checked.output_text == whole.text
    cut = whole.finish == "length"
    assert checked.status == ("incomplete" if cut else "completed")
    assert (checked.incomplete_details is not None) == cut
    items = checked.output
    kinds = ["reasoning"] if whole.thought else []
    kinds += ["message"] if whole.text or not (whole.thought or whole.calls) else []
    assert [item.type for item in items] == kinds + ["function_call"] * len(whole.calls)
    if whole.thought:
        assert items[0].type == "reasoning"
        assert items[0].content is not None
        assert items[0].content[0].text == whole.thought
    calls = [item for item in items if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        (call.id, call.name, call.arguments) for call in whole.calls
    ]
    assert [(call.model_extra or {}).get("rollyard_error", "") for call in calls] == [
        call.error for call in whole.calls
    ]
    assert checked.usage is not None
    assert (checked.usage.input_tokens, checked.usage.output_tokens, checked.usage.total_tokens) == (
        101,
        20,
        121,
    )
    assert checked.usage.output_tokens_details.reasoning_tokens == whole.usage.thought
    assert gateway.calls[0] == gateway.calls[1]
    assert gateway.calls[0].tools == SCHEMAS


@pytest.mark.parametrize("name", REPLIES)
async def test_a_stream_of_a_response_is_the_services(
    name: str, gateway: ScriptedGateway, client: openai.AsyncOpenAI, url: str
) -> None:
    script = REPLIES[name]
    gateway.say(script, script)
    body: dict[str, Any] = {"model": "any", "input": "Hi", "tools": RESPONSES_TOOLS}
    raw = await raw_events(url, "/v1/responses", body)
    events = [STREAM_EVENT.validate_json(data) for _, data in raw]
    assert [event.type for event in events] == [kind for kind, _ in raw]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {field for event in events for field in own(event)} <= OWN_FIELDS
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]

    # The events of each item stand together, and tell what the item has in the end.
    final = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert done == final.output
    assert [item.id for item in added] == [item.id for item in done]
    assert len({item.id for item in done}) == len(done)
    indices = [event.output_index for event in events if hasattr(event, "output_index")]
    assert indices == sorted(indices)
    assert set(indices) == set(range(len(done)))
    for index, item in enumerate(done):
        about = [event for event in events if getattr(event, "output_index", None) == index]
        assert {event.item_id for event in about if hasattr(event, "item_id")} == {item.id}
        pieces = "".join(event.delta for event in about if event.type.endswith(".delta"))
        if item.type == "function_call":
            assert pieces == item.arguments
        else:
            assert pieces == item.content[0].text
    direct = OpenAIResponses().answer(gateway.calls[0], script.whole(1))
    assert json.loads(raw[-1][1])["response"] == direct

    async with client.responses.stream(**body) as helper:
        async for _ in helper:
            pass
        if script.finish != "length":
            parsed = await helper.get_final_response()
            assert parsed.output_text == script.text
            assert [item.type for item in parsed.output] == [item["type"] for item in direct["output"]]


async def test_the_models_are_listed(client: openai.AsyncOpenAI) -> None:
    listed = [model async for model in client.models.list()]
    assert [Model.model_validate(model.to_dict()).id for model in listed] == [MODEL]
    assert not own(await client.models.retrieve(MODEL))
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


RAISED: dict[CallProblem, tuple[type[openai.APIStatusError], str | None]] = {
    "invalid": (openai.BadRequestError, None),
    "unauthorized": (openai.AuthenticationError, "invalid_api_key"),
    "not_found": (openai.NotFoundError, None),
    "too_large": (openai.APIStatusError, "request_too_large"),
    "context": (openai.BadRequestError, "context_length_exceeded"),
    "limit": (openai.BadRequestError, "rollout_limit_reached"),
    "busy": (openai.RateLimitError, "rate_limit_exceeded"),
    "unavailable": (openai.InternalServerError, "server_error"),
    "failed": (openai.InternalServerError, "server_error"),
    "ended": (openai.BadRequestError, "rollout_ended"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("problem", STATUS)
async def test_a_refused_call_raises_the_sdks_exception(
    problem: CallProblem, stream: bool, gateway: ScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    kind, code = RAISED[problem]
    refused = ScriptedReply(refused=CallError(problem, "Not now.", param="input"))
    gateway.say(refused, refused)
    calls: list[Any] = [
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], stream=stream
        ),
        client.responses.create(model="m", input="Hi", stream=stream),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            await call
        error = caught.value
        assert (error.status_code, error.code, error.param) == (STATUS[problem], code, "input")
        assert "Not now." in error.message


async def test_an_overflow_names_both_numbers(gateway: ScriptedGateway, client: openai.AsyncOpenAI) -> None:
    gateway.say(ScriptedReply(refused=CallError("context", "Too long.", tokens=(5000, 4096))))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="m", input="Hi")
    # litellm knows an overflow by these words, and other harnesses by the code.
    assert "This model's maximum context length is 4096 tokens" in caught.value.message
    assert "5000" in caught.value.message
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("problem", "code"),
    [("unavailable", "server_error"), ("busy", "rate_limit_exceeded"), ("limit", "invalid_prompt")],
)
async def test_a_stream_that_breaks_ends_with_an_error(
    problem: CallProblem, code: str, gateway: ScriptedGateway, client: openai.AsyncOpenAI, url: str
) -> None:
    broken = ScriptedReply("Half of it", broken=CallError(problem, "It broke."))
    gateway.say(broken, broken, broken)
    stream = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    texts: list[str] = []

    async def listen() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match=r"It broke\."):
        await listen()
    assert "".join(texts) == "Half of it"
    raw = await raw_events(url, "/v1/responses", {"model": "m", "input": "Hi"})
    failed = STREAM_EVENT.validate_json(raw[-1][1])
    assert failed.type == raw[-1][0] == "response.failed"
    assert not own(failed)
    assert failed.response.status == "failed"
    assert (failed.response.error.code, failed.response.error.message) == (code, "It broke.")
    seen = [event.type async for event in await client.responses.create(model="m", input="Hi", stream=True)]
    assert seen[-1] == "response.failed"


async def test_a_refusal_reaches_the_sdk(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], extra_body={"top_k": 5}
        )
    assert caught.value.body == {
        "message": "Unrecognized request argument supplied: top_k",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize("name", [name for name in REPLIES if not name.startswith("cut")])
async def test_a_repeated_reply_is_read_as_it_was_sent(
    name: str, gateway: ScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    script = REPLIES[name]
    gateway.say(*[script] * 6)
    expected = HistoryMessage(
        "assistant",
        script.text,
        script.thought,
        tuple(HistoryCall(call.id, call.name, call.arguments) for call in script.calls),
    )
    user: Any = {"role": "user", "content": "Hi"}
    sent = await client.chat.completions.create(model="m", messages=[user], tools=CHAT_TOOLS)
    for repeated in (
        sent.choices[0].message,
        sent.choices[0].message.model_dump(exclude_none=True),
        sent.choices[0].message.to_dict(),
    ):
        reading_of: Any = [user, repeated, user]
        await client.chat.completions.create(model="m", messages=reading_of, tools=CHAT_TOOLS)
        assert gateway.calls[-1].messages[1] == expected
    gateway.script.clear()
    gateway.say(*[script] * 8)
    for include in (["reasoning.encrypted_content"], []):
        asked: Any = {"model": "m", "tools": RESPONSES_TOOLS, "include": include}
        response = await client.responses.create(input=[user], **asked)
        dumped = [item.model_dump(exclude_none=True) for item in response.output]
        if include:  # As harnesses repeat it that keep only what is encrypted.
            for item in dumped:
                if item["type"] == "reasoning":
                    del item["content"]
        for items in (list(response.output), dumped):
            await client.responses.create(input=[user, *items, user], **asked)
            assert gateway.calls[-1].messages[1:] == (expected, HistoryMessage("user", "Hi"))


class Bash(BaseModel):
    """Run a command."""

    command: str


async def test_what_the_helpers_of_the_sdk_have_parsed_is_repeated(
    gateway: ScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    call = ReplyCall("call_1", "Bash", '{"command": "ls"}')
    gateway.say(*[ScriptedReply("I look.", calls=(call,))] * 2, *[ScriptedReply("Done.")] * 4)
    user: Any = {"role": "user", "content": "Hi"}
    asked: Any = {"model": "m", "tools": [openai.pydantic_function_tool(Bash)]}
    parsed = await client.chat.completions.parse(messages=[user], **asked)
    async with client.chat.completions.stream(messages=[user], **asked) as stream:
        streamed = await stream.get_final_completion()
    for message in (parsed.choices[0].message, streamed.choices[0].message):
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.parsed_arguments == Bash(command="ls")
        result = {"role": "tool", "tool_call_id": "call_1", "content": "out"}
        for repeated in (message, message.model_dump()):
            done = await client.chat.completions.parse(messages=[user, repeated, result], **asked)
            assert done.choices[0].message.content == "Done."
            said = HistoryMessage(
                "assistant", "I look.", calls=(HistoryCall(call.id, call.name, call.arguments),)
            )
            assert gateway.calls[-1].messages[1] == said


async def test_the_functions_of_a_namespace_are_called_with_it(
    gateway: ScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    tools: Any = [
        {
            "type": "namespace",
            "name": "agents",
            "description": "",
            "tools": [function("spawn"), function("bash")],
        },
        {"type": "namespace", "name": "others", "description": "", "tools": [function("spawn")]},
        function("bash"),
    ]
    names = ["spawn", "agents__bash", "others__spawn", "bash"]
    gateway.say(
        ScriptedReply(calls=tuple(ReplyCall(f"c{name}", name, "{}") for name in names)), ScriptedReply("x")
    )
    response = await client.responses.create(model="m", input="Hi", tools=tools)
    assert [tool["function"]["name"] for tool in gateway.calls[0].tools] == names
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.namespace, call.name) for call in calls] == [
        ("agents", "spawn"),
        ("agents", "bash"),
        ("others", "spawn"),
        (None, "bash"),
    ]
    items: Any = [*response.output, {"type": "function_call_output", "call_id": "cspawn", "output": "done"}]
    await client.responses.create(model="m", input=items, tools=tools)
    assert [call.name for call in gateway.calls[1].messages[0].calls] == names
