"""Anthropic's protocol of the gateway, as Anthropic's own SDK and Claude Code speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from aiohttp import web
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from pydantic import TypeAdapter, ValidationError
from rollyard_pipeline.gateway.calls import (
    MAX_CALL_MESSAGES,
    MAX_CALL_TOOLS,
    Delta,
    HistoryCall,
    HistoryMessage,
    ModelCall,
    Opening,
    ReplyCall,
)
from rollyard_pipeline.gateway.errors import STATUS, CallError
from rollyard_pipeline.gateway.protocols.anthropic import AnthropicMessages
from rollyard_pipeline.gateway.protocols.fields import MAX_SCHEMA_DEPTH
from rollyard_pipeline.gateway.protocols.objects import MAX_ASKED, MAX_TOOLS
from rollyard_testing.gateway import MODEL, REPLIES, ScriptedGateway, ScriptedReply, serving, unknown_fields

PROTOCOL = AnthropicMessages()
THINKING: Any = {"type": "adaptive"}
BASH: Any = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}
ASK: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BETA_EVENT: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def url(gateway: ScriptedGateway) -> AsyncIterator[str]:
    async def count(request: web.Request) -> web.Response:
        try:
            call = PROTOCOL.read(await request.json(), {}, {"method": "count_tokens"})
            return web.json_response(PROTOCOL.counted(await gateway.count_tokens(call)))
        except CallError as error:
            return web.json_response(PROTOCOL.error(error), status=error.status)

    models = {"/v1/models": PROTOCOL.models, "/v1/models/{model}": PROTOCOL.models}
    counting = {"/v1/messages/count_tokens": count}
    async with serving(gateway, {"/v1/messages": PROTOCOL}, models, counting) as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as one:
        yield one


def reading(body: Any, headers: dict[str, str] | None = None, method: str = "messages") -> ModelCall:
    return PROTOCOL.read(json.loads(json.dumps(body)), headers or {}, {"method": method})


def stream(reply: ScriptedReply, thinking: str | None = "summarized") -> list[dict[str, Any]]:
    """Return the events of a streamed reply, each of which is checked for the form of its text."""
    call = ModelCall((), stream=True, details={"thinking": thinking})
    whole = reply.whole(1)
    writer = PROTOCOL.events(call, Opening(whole.id, whole.created, whole.model, whole.usage.prompt))
    sent = writer.begin() + b"".join(map(writer.delta, reply.pieces())) + writer.end(whole)
    events = []
    for block in sent.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("thinking", [None, "summarized", "omitted"])
def test_answers_and_events_have_every_field_of_the_sdk_and_no_others(
    name: str, thinking: str | None
) -> None:
    reply = REPLIES[name]
    ours = {"rollyard_error"} if name == "malformed" else set()
    call = ModelCall((), details={"thinking": thinking})
    body = json.loads(json.dumps(PROTOCOL.answer(call, reply.whole(1))))
    for model in (Message, BetaMessage):
        parsed = model.model_validate(body)
        assert {path.rpartition(".")[2] for path in unknown_fields(parsed)} == ours
    for adapter in (STREAM_EVENT, BETA_EVENT):
        fields: set[str] = set()
        for event in stream(reply, thinking):
            if event["type"] == "ping":
                assert event == {"type": "ping"}
                continue
            fields |= {path.rpartition(".")[2] for path in unknown_fields(adapter.validate_python(event))}
        assert fields == ours


def test_the_sdk_would_refuse_an_event_without_a_field_or_with_another_one() -> None:
    event = stream(REPLIES["text"])[0]
    with pytest.raises(ValidationError, match="usage"):
        STREAM_EVENT.validate_python(
            {**event, "message": {k: v for k, v in event["message"].items() if k != "usage"}}
        )
    parsed = STREAM_EVENT.validate_python({**event, "message": {**event["message"], "more": 1}})
    assert list(unknown_fields(parsed)) == ["message.more"]


@pytest.mark.parametrize("name", REPLIES)
async def test_the_sdk_reads_answer_and_stream_alike(
    name: str, gateway: ScriptedGateway, client: anthropic.AsyncAnthropic, url: str
) -> None:
    reply = REPLIES[name]
    gateway.say(*[reply] * 4)
    ask = {**ASK, "thinking": THINKING, "tools": [BASH]}
    answer = await client.messages.create(**ask)
    async with client.messages.stream(**ask) as events:
        streamed = await events.get_final_message()
    async with client.beta.messages.stream(**ask, betas=["interleaved-thinking-2025-05-14"]) as beta_events:
        beta = await beta_events.get_final_message()
    assert [call.stream for call in gateway.calls] == [False, True, True]
    kinds = ["thinking"] * bool(reply.thought) + ["text"] * bool(reply.text)
    kinds += ["tool_use"] * len(reply.calls)
    texts = [reply.thought] * bool(reply.thought) + [reply.text] * bool(reply.text)
    stop = {"length": "max_tokens", None: "tool_use" if reply.calls else "end_turn"}[reply.finish]
    for message in (answer, streamed, beta):
        blocks = [block.model_dump() for block in message.content]
        assert [block["type"] for block in blocks] == (kinds or ["text"])
        said = [block["text"] if block["type"] == "text" else block.get("thinking") for block in blocks]
        assert [text for text in said if text] == texts
        signatures = [block["signature"] for block in blocks if block["type"] == "thinking"]
        assert all(signatures)
        used = [block for block in blocks if block["type"] == "tool_use"]
        assert [(use["id"], use["name"]) for use in used] == [(call.id, call.name) for call in reply.calls]
        inputs = (
            [{"__unparsedToolInput": {"raw": '{"command": ls', "len": 14}}] if name == "malformed" else []
        )
        assert [use["input"] for use in used] == (
            inputs or [json.loads(call.arguments) for call in reply.calls]
        )
        assert [use.get("rollyard_error") for use in used] == [call.error or None for call in reply.calls]
        assert (message.stop_reason, message.model, message.id[:4]) == (stop, ASK["model"], "msg_")
        usage = message.usage
        assert (usage.input_tokens > 100, usage.output_tokens) == (True, 20)
        details = usage.output_tokens_details
        assert details is not None
        assert details.thinking_tokens == (7 if reply.thought else 0)


async def test_the_synchronous_sdk_reads_answer_and_stream(url: str, gateway: ScriptedGateway) -> None:
    reply = REPLIES["all"]
    gateway.say(reply, reply)

    def talk() -> tuple[Message, str, Message]:
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as sync:
            answer = sync.messages.create(**ASK)
            with sync.messages.stream(**ASK) as events:
                return answer, "".join(events.text_stream), events.get_final_message()

    answer, text, final = await asyncio.to_thread(talk)
    assert text == reply.text
    assert final.to_dict()["content"] == answer.to_dict()["content"]
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_repeated_reply_is_read_as_it_was_sent(
    name: str, streams: bool, gateway: ScriptedGateway, client: anthropic.AsyncAnthropic
) -> None:
    reply = REPLIES[name]
    gateway.say(reply, ScriptedReply("ok"))
    ask: dict[str, Any] = {**ASK, "thinking": THINKING, "tools": [BASH]}
    if streams:
        async with client.messages.stream(**ask) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**ask)
    results: Any = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "out", "is_error": True}
        for call in reply.calls
    ]
    ask["messages"] = [
        *ASK["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    await client.messages.create(**ask)
    said, *after = gateway.calls[-1].messages[1:]
    assert (said.role, said.text, said.thought) == ("assistant", reply.text, reply.thought)
    assert [(call.id, call.name) for call in said.calls] == [(call.id, call.name) for call in reply.calls]
    for sent, repeated in zip(reply.calls, said.calls, strict=True):
        if sent.error:
            assert repeated.arguments == sent.arguments
        else:
            assert json.loads(repeated.arguments) == json.loads(sent.arguments)
    assert after == [
        *(
            HistoryMessage("tool", "out", call_id=call.id, name=call.name, failed=True)
            for call in reply.calls
        ),
        HistoryMessage("user", "Go on."),
    ]


async def test_the_sdk_runs_tools_by_itself(
    gateway: ScriptedGateway, client: anthropic.AsyncAnthropic
) -> None:
    """Its runner asks the service to keep the history first, and sends it all when that is refused."""

    @anthropic.beta_async_tool
    async def bash(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    for streams in (False, True):
        gateway.calls.clear()
        calls = (
            ReplyCall("call_1", "bash", '{"command": "ls"}'),
            ReplyCall("call_2", "bash", '{"command": "w"}'),
        )
        gateway.say(ScriptedReply("I look.", calls=calls), ScriptedReply("Done."))
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=9, messages=ASK["messages"], tools=[bash], stream=streams
        )
        last = await runner.until_done()
        assert last.content[-1].to_dict()["text"] == "Done."
        sent = [(message.role, message.text) for message in gateway.calls[-1].messages]
        results = [("tool", "ran ls"), ("tool", "ran w")]
        assert sent == [("user", "Hi"), ("assistant", "I look."), *results]


async def test_models_and_counts_of_tokens(
    gateway: ScriptedGateway, client: anthropic.AsyncAnthropic
) -> None:
    listed = [model async for model in client.models.list()]
    one = await client.models.retrieve(MODEL)
    assert [model.id for model in listed] == [one.id] == [MODEL]
    assert list(unknown_fields(ModelInfo.model_validate(PROTOCOL.models(gateway, {"model": MODEL})))) == []
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("other")
    count = await client.messages.count_tokens(model="m", messages=ASK["messages"], system="Be kind.")
    assert count.input_tokens == len("Hi" + "Be kind.")
    assert list(unknown_fields(MessageTokensCount.model_validate(PROTOCOL.counted(3)))) == []
    with pytest.raises(anthropic.BadRequestError, match="temperature: Extra inputs are not permitted"):
        await client.messages.count_tokens(model="m", messages=ASK["messages"], extra_body={"temperature": 1})


@pytest.mark.parametrize("problem", STATUS)
async def test_errors_have_the_form_of_the_service(
    problem: Any, gateway: ScriptedGateway, client: anthropic.AsyncAnthropic
) -> None:
    error = CallError(problem, "so it is", tokens=(5000, 4096) if problem == "context" else None)
    gateway.say(ScriptedReply(refused=error), ScriptedReply("He", refused=error))
    with pytest.raises(anthropic.APIStatusError) as refused:
        await client.messages.create(**ASK)
    assert refused.value.status_code == error.status
    body: Any = refused.value.body
    assert set(body) == {"type", "error", "request_id"}
    message = "prompt is too long: 5000 tokens > 4096 maximum" if problem == "context" else "so it is"
    assert body["error"]["message"] == message
    expected = {
        "unauthorized": "authentication_error",
        "not_found": "not_found_error",
        "too_large": "request_too_large",
        "busy": "rate_limit_error",
        "unavailable": "overloaded_error",
        "failed": "api_error",
    }
    assert body["error"]["type"] == expected.get(problem, "invalid_request_error")


async def test_a_stream_that_breaks_ends_with_an_error(
    gateway: ScriptedGateway, client: anthropic.AsyncAnthropic
) -> None:
    gateway.say(ScriptedReply("Hello", broken=CallError("unavailable", "no backend")))
    heard = []

    async def listen() -> None:
        async with client.messages.stream(**ASK) as events:
            async for text in events.text_stream:
                heard.append(text)

    with pytest.raises(anthropic.APIStatusError, match="no backend"):
        await listen()
    assert "".join(heard) == "Hello"


def test_thoughts_are_shown_as_the_call_asks() -> None:
    reply = REPLIES["all"]

    def shown(thinking: Any) -> list[str]:
        call = reading({**ASK, **({"thinking": thinking} if thinking else {})})
        blocks = PROTOCOL.answer(call, reply.whole(1))["content"]
        events = stream(reply, call.details["thinking"])
        started = [
            event["content_block"]["type"] for event in events if event["type"] == "content_block_start"
        ]
        assert [block["type"] for block in blocks] == started
        thought = "".join(
            event["delta"].get("thinking", "") for event in events if event["type"] == "content_block_delta"
        )
        return [block["thinking"] for block in blocks if block["type"] == "thinking"] + [thought]

    assert shown(None) == shown({"type": "disabled"}) == [""]
    assert shown({"type": "enabled", "budget_tokens": 1024}) == ["Where?", "Where?"]
    assert shown({"type": "adaptive", "display": "omitted"}) == ["", ""]


def test_a_call_ends_its_block_at_once_so_that_a_cut_stream_keeps_it() -> None:
    whole = REPLIES["all"].whole(1)
    writer = PROTOCOL.events(ModelCall(()), Opening("a", 1, MODEL, 3))
    writer.begin()
    writer.delta(Delta(text="I look."))
    sent = writer.delta(Delta(call=whole.calls[0])).decode()
    kinds = [json.loads(block.split("data: ")[1])["type"] for block in sent.strip().split("\n\n")]
    assert kinds == [
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]
    assert b"error" in writer.fail(CallError("ended", "the harness has ended"))


def test_an_idle_stream_sends_what_resets_the_timer_of_claude_code() -> None:
    writer = PROTOCOL.events(ModelCall(()), Opening("a", 1, MODEL, 3))
    writer.begin()
    assert writer.idle().startswith(b"event: ping")
    writer.delta(Delta(text="I"))
    event = json.loads(writer.idle().decode().split("data: ")[1])
    assert event == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": ""},
    }


CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 32000,
    "stream": True,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [
        {**BASH, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
        {"role": "system", "content": "Today is Sunday."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "00"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "bash", "input": {"command": "ls"}},
                {
                    "type": "tool_use",
                    "id": "call_2",
                    "name": "bash",
                    "input": {},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Hm.</system-reminder>"},
                {"type": "tool_result", "tool_use_id": "call_1", "content": "a.py", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_2",
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "such"}],
                    "is_error": True,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "Well?"},
            ],
        },
    ],
}


def test_a_call_of_claude_code_is_understood() -> None:
    headers = {"x-claude-code-session-id": "s-1", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}
    call = reading(CLAUDE_CODE, headers)
    assert call.messages == (
        HistoryMessage("system", "You are Claude Code.\nBe brief."),
        HistoryMessage("user", "Fix it.\n<system-reminder>\nToday is Sunday.\n</system-reminder>"),
        HistoryMessage(
            "assistant",
            "I look.",
            "Look.",
            (HistoryCall("call_1", "bash", '{"command":"ls"}'), HistoryCall("call_2", "bash", "{}")),
        ),
        HistoryMessage("tool", "a.py", call_id="call_1", name="bash"),
        HistoryMessage("tool", "no\nsuch", call_id="call_2", name="bash", failed=True),
        HistoryMessage("user", "<system-reminder>Hm.</system-reminder>\nWell?"),
    )
    assert [tool["function"] for tool in call.tools] == [
        {"name": "bash", "description": "Run a command.", "parameters": BASH["input_schema"]}
    ]
    assert (call.stream, call.max_tokens, call.model) == (True, 32000, "claude-x")
    assert call.asked == {
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "tools_left_out": ["web_search_20250305"],
    }
    assert (call.marks.session, call.marks.agent, call.marks.kind) == ("s-1", "", None)


def test_a_system_message_within_a_conversation_is_text_of_the_user() -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "bash", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "out"}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "B"}]},
        {"role": "system", "content": "C"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
        {"role": "system", "content": "D"},
        {"role": "system", "content": "E"},
    ]
    call = reading({**ASK, "system": "A", "messages": messages})
    reminders = "".join(f"\n<system-reminder>\n{text}\n</system-reminder>" for text in "DE")[1:]
    assert [(message.role, message.text) for message in call.messages] == [
        ("system", "A\nB\nC"),
        ("user", "Hi"),
        ("assistant", ""),
        ("tool", "out"),
        ("user", reminders),
    ]
    alone = reading({**ASK, "messages": messages[1:3]})
    assert alone.messages == (HistoryMessage("system", "C"), HistoryMessage("user", "Hi"))


def test_strings_and_blocks_and_moved_cache_marks_are_the_same_history() -> None:
    plain = reading({**ASK, "system": "Be kind.", "messages": [{"role": "user", "content": "Hi"}]})
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = reading(
        {
            **ASK,
            **mark,
            "system": [{"type": "text", "text": "Be kind.", **mark}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **mark}]}],
        }
    )
    assert plain.messages == blocks.messages


def test_what_claude_code_says_of_a_conversation() -> None:
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    marks = reading(ASK, headers).marks
    assert (marks.session, marks.agent, marks.kind) == ("s", "a", "subagent")
    summary = {"type": "text", "text": "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- …"}
    content = [{"type": "text", "text": "Hi"}, summary]
    asked = {**ASK, "tools": [BASH], "messages": [{"role": "user", "content": content}]}
    assert reading(asked, headers).marks.kind == "compaction"
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    titled = {**ASK, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert reading(titled).marks.kind == "title"
    assert reading({**titled, "tools": [BASH]}).marks.kind is None
    assert reading(titled, {"x-rollyard-conversation": "other"}).marks.kind == "other"
    opencode = {"x-session-id": "child", "x-parent-session-id": "parent"}
    marks = reading(ASK, opencode).marks
    assert (marks.session, marks.agent, marks.kind) == ("parent", "child", "subagent")


def test_assistant_messages_that_follow_each_other_are_one() -> None:
    one = {"role": "assistant", "content": "A"}
    use = {"type": "tool_use", "id": "call_1", "name": "bash", "input": {}}
    two = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, use]}
    call = reading({**ASK, "messages": [ASK["messages"][0], one, two, {"role": "user", "content": "B"}]})
    assert call.messages[1] == HistoryMessage("assistant", "A", calls=(HistoryCall("call_1", "bash", "{}"),))
    last = {**ASK, "messages": [ASK["messages"][0], one]}
    assert (
        reading({"model": "m", "messages": last["messages"]}, method="count_tokens").messages[-1].text == "A"
    )


def test_arguments_that_claude_code_could_not_parse_are_the_text_again() -> None:
    for given, text in (
        ({"__unparsedToolInput": {"raw": '{"a', "len": 3}}, '{"a'),
        ({"__unparsedToolInput": "x"}, '{"__unparsedToolInput":"x"}'),
        ({"__unparsedToolInput": {"raw": "x", "len": 1}, "b": 1}, None),
    ):
        use = {"type": "tool_use", "id": "call_1", "name": "bash", "input": given}
        messages = [ASK["messages"][0], {"role": "assistant", "content": [use]}, ASK["messages"][0]]
        [call] = reading({**ASK, "messages": messages}).messages[1].calls
        assert call.arguments == (text or json.dumps(given, separators=(",", ":")))


def test_no_tools_are_offered_where_the_choice_is_none() -> None:
    assert reading({**ASK, "tools": [BASH], "tool_choice": {"type": "none"}}).tools == ()
    chosen = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(reading({**ASK, "tools": [BASH], "tool_choice": chosen}).tools) == 1


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, ASK["messages"][0]]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
USE = {"type": "tool_use", "id": "call_1", "name": "bash", "input": {}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown-field": ({"frequency_penalty": 1}, "frequency_penalty: Extra inputs are not permitted"),
    "no-max-tokens": ({"max_tokens": None}, "max_tokens"),
    "zero-max-tokens": ({"max_tokens": 0}, "max_tokens"),
    "text-max-tokens": ({"max_tokens": "9"}, "max_tokens"),
    "model": ({"model": 3}, "model"),
    "stream": ({"stream": "yes"}, "stream"),
    "temperature": ({"temperature": 1.5}, "temperature"),
    "top-p": ({"top_p": "x"}, "top_p"),
    "top-k": ({"top_k": 1.5}, "top_k"),
    "stop": ({"stop_sequences": ["END"]}, "stop_sequences"),
    "stop-type": ({"stop_sequences": "END"}, "stop_sequences"),
    "thinking": ({"thinking": {"type": "deep"}}, "thinking.type"),
    "thinking-budget": ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    "thinking-field": ({"thinking": {"type": "adaptive", "x": 1}}, "thinking.x: Extra inputs"),
    "output-config": ({"output_config": {"style": "x"}}, "output_config.style: Extra inputs"),
    "long-output-config": ({"output_config": {"format": {"x": "a" * MAX_ASKED}}}, "output_config"),
    "container": ({"container": "c"}, "container: there are no containers"),
    "forced-tool": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "named-tool": ({"tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice"),
    "tool-choice": ({"tool_choice": "auto"}, "tool_choice"),
    "no-messages": ({"messages": []}, "messages: at least one message"),
    "messages": ({"messages": "Hi"}, "messages"),
    "too-many": ({"messages": [{"role": "user", "content": ""}] * (MAX_CALL_MESSAGES + 1)}, "messages"),
    "message": ({"messages": ["Hi"]}, "messages.0"),
    "message-field": (
        {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        "messages.0.name: Extra",
    ),
    "role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    "content": ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
    "prefill": ({"messages": [{"role": "assistant", "content": "a"}]}, "must end with a user message"),
    "clear-at": (
        {"messages": [{"role": "system", "content": "a", "clear_at": "next_user_message"}]},
        "messages.0.clear_at",
    ),
    "image": (user(IMAGE), "messages.0.content.0: the model reads no images"),
    "document": (
        user({"type": "document", "source": {}}),
        "messages.0.content.0: the model reads no documents",
    ),
    "block": (user({"type": "audio"}), "messages.0.content.0.type: a block 'audio'"),
    "block-type": (user({}), "messages.0.content.0.type"),
    "block-text": (user("Hi"), "messages.0.content.0"),
    "text": (user({"type": "text", "text": 1}), "messages.0.content.0.text"),
    "text-field": (user({"type": "text", "text": "a", "x": 1}), "messages.0.content.0.x: Extra inputs"),
    "use-of-user": (user(USE), "messages.0.content.0.type"),
    "result-of-assistant": (said({"type": "tool_result", "tool_use_id": "a"}), "messages.0.content.0.type"),
    "server-result": (said({"type": "web_search_tool_result"}), "messages.0.content.0.type"),
    "orphan": (user({"type": "tool_result", "tool_use_id": "a"}), "messages.0.content.0.tool_use_id"),
    "twice": (said(USE, USE), "messages.0.content.1.id: `tool_use` ids must be unique"),
    "use-id": (said({**USE, "id": ""}), "messages.0.content.0.id"),
    "use-input": (said({**USE, "input": "{}"}), "messages.0.content.0.input"),
    "use-name": (said({**USE, "name": None}), "messages.0.content.0.name"),
    "thought": (said({"type": "thinking", "signature": "x"}), "messages.0.content.0.thinking"),
    "result-image": (
        {
            "messages": [
                {"role": "assistant", "content": [USE]},
                *user({"type": "tool_result", "tool_use_id": "call_1", "content": [IMAGE]})["messages"],
            ]
        },
        "messages.1.content.0.content.0: the model reads no images",
    ),
    "system": ({"system": 1}, "system"),
    "system-image": ({"system": [IMAGE]}, "system.0"),
    "tools": ({"tools": {}}, "tools"),
    "many-tools": (
        {"tools": [{**BASH, "name": f"t{number}"} for number in range(1000)]},
        f"'tools': it has 1000 entries, and at most {MAX_CALL_TOOLS}",
    ),
    "large-tools": (
        {"tools": [{**BASH, "description": "a" * MAX_TOOLS}]},
        f"tools: at most {MAX_TOOLS} bytes",
    ),
    "same-tools": ({"tools": [BASH, BASH]}, "tools.1.name"),
    "tool-name": ({"tools": [{**BASH, "name": "a b"}]}, "tools.0.name"),
    "long-name": ({"tools": [{**BASH, "name": "a" * 129}]}, "tools.0.name"),
    "tool-field": ({"tools": [{**BASH, "parameters": {}}]}, "tools.0.parameters: Extra inputs"),
    "schema": ({"tools": [{"name": "bash"}]}, "tools.0.input_schema"),
    "schema-type": ({"tools": [{"name": "bash", "input_schema": {}}]}, "tools.0.input_schema.type"),
    "deep": ({"tools": [{**BASH, "input_schema": nested(MAX_SCHEMA_DEPTH)}]}, "tools.0.input_schema"),
    "known-tool": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: only Anthropic's"),
    "tool-type": ({"tools": [{"type": "function"}]}, "tools.0.type"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_the_name_of_the_field(name: str) -> None:
    change, expected = BAD[name]
    with pytest.raises(CallError) as refused:
        reading({**ASK, **change})
    assert expected in refused.value.message
    assert refused.value.status == 400
    assert refused.value.param is not None
    assert len(refused.value.message) < 1000


@pytest.mark.parametrize("field", ["max_tokens", "model", "messages"])
def test_required_fields(field: str) -> None:
    with pytest.raises(CallError, match=f"{field}: Field required"):
        reading({name: value for name, value in ASK.items() if name != field})


def test_arguments_that_are_nested_deeply_are_read_or_refused() -> None:
    for depth, read in ((300, True), (100_000, False)):
        value: Any = {}
        for _ in range(depth):
            value = {"a": value}
        body = {**ASK, **said({**USE, "input": value})}
        if read:
            [call] = PROTOCOL.read(body, {}, {}).messages[0].calls
            assert call.arguments.count("{") == depth + 1
        else:
            with pytest.raises(CallError, match="nested too deeply"):
                PROTOCOL.read(body, {}, {})
        with pytest.raises(CallError, match=r"tools\.0|output_config|nested"):
            PROTOCOL.read(
                {**ASK, "tools": [{**BASH, "input_schema": {"type": "object", "a": value}}]}, {}, {}
            )


@pytest.mark.parametrize("depth", [2000, 900])
def test_a_history_that_is_nested_deeply_breaks_nothing(depth: int) -> None:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    with pytest.raises(CallError, match=r"messages\.0"):
        PROTOCOL.read({**ASK, "messages": [{"role": "user", "content": value}]}, {}, {})


def test_arguments_that_no_json_object_can_hold_are_sent_as_text() -> None:
    deep = '{"a":' * 200 + "1" + "}" * 200
    for arguments in (deep, "[1]", "nothing", '{"a": NaN}', '{"a": "\ud800"}', ""):
        reply = ScriptedReply(calls=(ReplyCall("call_1", "bash", arguments),))
        [block] = PROTOCOL.answer(ModelCall(()), reply.whole(1))["content"]
        assert block["input"]["__unparsedToolInput"]["raw"] == arguments
        [piece] = [event for event in stream(reply) if event["type"] == "content_block_delta"]
        assert "__unparsedToolInput" in json.loads(piece["delta"]["partial_json"])
