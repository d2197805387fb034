"""What OpenAI's protocols of the gateway read: calls of harnesses, histories, tools, and bad input."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from rollyard_pipeline.gateway.calls import (
    MAX_CALL_MESSAGES,
    MAX_CALL_TOOLS,
    HistoryCall,
    HistoryMessage,
    Marks,
    ModelCall,
)
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.protocols.fields import MAX_SCHEMA_DEPTH
from rollyard_pipeline.gateway.protocols.openai_chat import OpenAIChat
from rollyard_pipeline.gateway.protocols.openai_responses import OpenAIResponses
from rollyard_testing.openai_requests import CHAT_TOOLS, CODEX, OPENCODE, RESPONSES_TOOLS, SCHEMAS


def reading(
    protocol: OpenAIChat | OpenAIResponses, body: Any, headers: dict[str, str] | None = None
) -> ModelCall:
    return protocol.read(json.loads(json.dumps(body)), headers or {}, {})


USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
RESPONSES: dict[str, Any] = {"model": "m", "input": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def deep(levels: int) -> dict[str, Any]:
    """Return a schema of nested objects."""
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"a": schema}
    return schema


def tool(name: Any = "a", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **fields}]}


BAD_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"top_k": 5}, None, "Unrecognized request argument supplied: top_k"),
    ({"top_k": 5, "best": 1}, None, "Unrecognized request arguments supplied: best, top_k"),
    ({"model": None}, "model", "Missing"),
    ({"model": 5}, "model", "string"),
    ({"model": "m" * 300}, "model", "at most"),
    ({"messages": None}, "messages", "Missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "Hi"}, "messages", "array"),
    ({"messages": [USER] * (MAX_CALL_MESSAGES + 1)}, "messages", "at most"),
    ({"messages": ["Hi"]}, "messages[0]", "object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content", "array"),
    ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages[0].role", "expected"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role", "expected"),
    ({"messages": [{"role": "function", "name": "f", "content": "Hi"}]}, "messages[0].role", "expected"),
    ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood", "Unknown"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "images"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0]",
        "audio",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]", "files"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "Missing",
    ),
    ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content[0].type", "expected"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "Missing"),
    (said(content="x", function_call={"name": "f"}), "messages[1].function_call", "not supported"),
    (said(content="x", audio={"id": "a"}), "messages[1].audio", "not supported"),
    (said(content="x", thought="y"), "messages[1].thought", "Unknown"),
    (said(tool_calls=[{"id": "c", "type": "custom"}]), "messages[1].tool_calls[0].type", "function"),
    (said(tool_calls=[{"id": "c"}]), "messages[1].tool_calls[0].function", "Missing"),
    (
        said(tool_calls=[{"id": "c", "function": {"name": "f", "arguments": {}}}]),
        "messages[1].tool_calls[0].function.arguments",
        "string",
    ),
    ({"tools": [tool()] * 2}, "tools[1].function.name", "two tools"),
    ({"tools": [tool(f"t{n}") for n in range(1000)]}, "tools", f"at most {MAX_CALL_TOOLS}"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "letters"),
    ({"tools": [tool("")]}, "tools[0].function.name", "letters"),
    ({"tools": [tool("a" * 129)]}, "tools[0].function.name", "letters"),
    ({"tools": [tool("a\n")]}, "tools[0].function.name", "letters"),
    ({"tools": [tool(None)]}, "tools[0].function.name", "Missing"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "object"),
    ({"tools": [tool(parameters=deep(MAX_SCHEMA_DEPTH + 1))]}, "tools[0].function.parameters", "levels"),
    ({"tools": [tool(magic=1)]}, "tools[0].function.magic", "Unknown"),
    ({"tools": [{"type": "magic"}]}, "tools[0].type", "expected"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing"),
    ({"tools": [tool()], "tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
    (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "a"}}},
        "tool_choice",
        "'auto'",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "'tools'"),
    ({"function_call": "auto"}, "function_call", "'tool_choice'"),
    ({"n": 2}, "n", "1"),
    ({"n": True}, "n", "1"),
    ({"logprobs": True}, "logprobs", "trajectory"),
    ({"top_logprobs": 3}, "top_logprobs", "trajectory"),
    ({"stop": ["\n"]}, "stop", "not supported"),
    ({"stop": "\n"}, "stop", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "'text'"),
    ({"modalities": ["text", "audio"]}, "modalities", "text"),
    ({"audio": {"voice": "x"}}, "audio", "audio"),
    ({"web_search_options": {}}, "web_search_options", "searched"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": 3}, "temperature", "between 0 and 2"),
    ({"temperature": True}, "temperature", "number"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "numbers"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "Unknown"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
]
BAD_RESPONSES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"top_k": 5}, "top_k", "Unknown parameter: 'top_k'"),
    ({"messages": []}, "messages", "Unknown"),
    ({"model": None}, "model", "Missing"),
    ({"input": None}, "input", "Missing"),
    ({"input": []}, "input", "empty"),
    ({"input": 5}, "input", "array"),
    ({"input": ["Hi"]}, "input[0]", "object"),
    ({"input": [{"id": "msg_1"}]}, "input[0]", "not stored"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "not stored"),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type", "neither"),
    ({"input": [{"type": ["message"]}]}, "input[0].type", "neither"),
    ({"input": [{"role": "boss", "content": "Hi"}]}, "input[0].role", "expected"),
    ({"input": [{**USER, "mood": "good"}]}, "input[0].mood", "Unknown"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "images"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]", "audio"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "files"),
    ({"input": [{"role": "user", "content": [{"type": "magic"}]}]}, "input[0].content[0]", "expected"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "Missing"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id", "Missing"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "Missing"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "Missing"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "input[0].output[0]",
        "images",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA!"}]},
        "input[0].encrypted_content",
        "verified",
    ),
    ({"instructions": 5}, "instructions", "string"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
    ({"conversation": "conv_1"}, "conversation", "not stored"),
    ({"background": True}, "background", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"include": ["message.output_text.logprobs"]}, "include", "trajectory"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "'text'"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort", "string"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name", "two tools"),
    ({"tools": [{"type": "function", "name": f"t{n}"} for n in range(1000)]}, "tools", f"{MAX_CALL_TOOLS}"),
    ({"tools": [{"type": "magic"}]}, "tools[0].type", "expected"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x", "name": "a"}]}]},
        "tools[0].tools[0].type",
        "exp",
    ),
    ({"tools": [{"type": "function", "name": "a", "parameters": deep(99)}]}, "tools[0].parameters", "levels"),
    ({"tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "only allowed"),
    ({"metadata": {"a": 5}}, "metadata.a", "string"),
]


def cases(protocol: str, table: list[tuple[dict[str, Any], str | None, str]]) -> Iterator[Any]:
    for changes, param, words in table:
        yield pytest.param(protocol, changes, param, words, id=f"{protocol}-{json.dumps(changes)[:60]}")


@pytest.mark.parametrize(
    ("protocol", "changes", "param", "words"), [*cases("chat", BAD_CHAT), *cases("responses", BAD_RESPONSES)]
)
def test_bad_input_is_refused_by_the_name_of_its_field(
    protocol: str, changes: dict[str, Any], param: str | None, words: str
) -> None:
    one, good = (OpenAIChat(), CHAT) if protocol == "chat" else (OpenAIResponses(), RESPONSES)
    reading(one, good)
    with pytest.raises(CallError) as caught:
        reading(one, good | changes)
    error = caught.value
    assert (error.problem, error.param) == ("invalid", param)
    assert words in error.message
    assert len(error.message) < 1000


def test_what_changes_no_answer_is_accepted() -> None:
    chat = reading(
        OpenAIChat(),
        CHAT
        | {
            "audio": None,
            "function_call": None,
            "functions": None,
            "logprobs": False,
            "metadata": {"a": "b"},
            "modalities": ["text"],
            "n": 1,
            "parallel_tool_calls": False,
            "prediction": None,
            "prompt_cache_key": "k",
            "response_format": {"type": "text"},
            "safety_identifier": "s",
            "service_tier": "auto",
            "stop": None,
            "store": True,
            "tool_choice": "auto",
            "top_logprobs": 0,
            "user": "u",
        },
    )
    assert chat == reading(OpenAIChat(), CHAT)
    responses = reading(
        OpenAIResponses(),
        RESPONSES
        | {
            "client_metadata": {"x": "y"},
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "service_tier": "auto",
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
        },
    )
    assert responses.messages == (HistoryMessage("user", "Hi"),)
    assert responses.asked == {}


def test_the_asked_sampling_is_kept() -> None:
    call = reading(
        OpenAIChat(),
        CHAT
        | {
            "temperature": 0.5,
            "top_p": 1,
            "seed": 3,
            "presence_penalty": -1,
            "frequency_penalty": 0.25,
            "reasoning_effort": "low",
            "verbosity": "high",
            "logit_bias": {"5": -100},
            "max_tokens": 50,
            "max_completion_tokens": 40,
        },
    )
    assert call.max_tokens == 40
    assert call.asked == {
        "temperature": 0.5,
        "top_p": 1,
        "seed": 3,
        "presence_penalty": -1,
        "frequency_penalty": 0.25,
        "reasoning_effort": "low",
        "verbosity": "high",
        "logit_bias": {"5": -100},
        "max_tokens": 50,
        "max_completion_tokens": 40,
    }
    call = reading(
        OpenAIResponses(),
        RESPONSES
        | {
            "max_output_tokens": 9,
            "truncation": "disabled",
            "reasoning": {"effort": "low", "summary": None},
            "text": {"verbosity": "low"},
        },
    )
    assert call.max_tokens == 9
    assert call.asked == {
        "max_output_tokens": 9,
        "truncation": "disabled",
        "reasoning": {"effort": "low"},
        "verbosity": "low",
    }


def test_a_chat_history_is_read() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
    ]
    call = reading(
        OpenAIChat(),
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "Be good."},
                {"role": "user", "content": parts, "name": "Ann"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "Hm.",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "index": 0,
                            "type": "function",
                            "function": {"name": "f", "arguments": "{ }"},
                        },
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": parts, "name": "f"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "system", "content": "Still."},
            ],
        },
    )
    assert call.messages == (
        HistoryMessage("system", "Be good."),
        HistoryMessage("user", "a\nb"),
        HistoryMessage("assistant", "", "Hm.", (HistoryCall("c1", "f", "{ }"),)),
        HistoryMessage("tool", "a\nb", call_id="c1", name="f"),
        HistoryMessage("assistant", "No."),
        HistoryMessage("system", "Still."),
    )


def test_the_items_of_one_reply_become_one_message() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def message(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    def call(number: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}

    def result(number: int) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": f"c{number}", "output": "ok"}

    items = [
        {"role": "user", "content": "Hi"},
        *(thought("T1"), message("M1"), call(1), call(2), result(1), result(2)),
        *(call(3), result(3)),
        *(message("M2"),),
        *(thought("T3"), message("M3")),
        *(message("M4"), call(4)),
    ]
    read = reading(OpenAIResponses(), {"model": "m", "instructions": "Be good.", "input": items}).messages

    def calls(*numbers: int) -> tuple[HistoryCall, ...]:
        return tuple(HistoryCall(f"c{number}", "f", "{}") for number in numbers)

    assert read == (
        HistoryMessage("system", "Be good."),
        HistoryMessage("user", "Hi"),
        HistoryMessage("assistant", "M1", "T1", calls(1, 2)),
        HistoryMessage("tool", "ok", call_id="c1"),
        HistoryMessage("tool", "ok", call_id="c2"),
        HistoryMessage("assistant", calls=calls(3)),
        HistoryMessage("tool", "ok", call_id="c3"),
        HistoryMessage("assistant", "M2"),
        HistoryMessage("assistant", "M3", "T3"),
        HistoryMessage("assistant", "M4", calls=calls(4)),
    )


def test_hosted_tools_are_left_out() -> None:
    hosted: list[Any] = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "patch"}]
    call = reading(OpenAIResponses(), RESPONSES | {"tools": [*hosted, *RESPONSES_TOOLS]})
    assert call.tools == SCHEMAS
    assert call.asked == {"tools_left_out": ["web_search", "local_shell", "custom"]}
    call = reading(
        OpenAIChat(), CHAT | {"tools": [*CHAT_TOOLS, {"type": "custom", "custom": {"name": "patch"}}]}
    )
    assert call.tools == SCHEMAS
    assert call.asked == {"tools_left_out": ["custom"]}


def test_no_tools_are_offered_where_none_may_be_chosen() -> None:
    assert reading(OpenAIChat(), CHAT | {"tools": CHAT_TOOLS, "tool_choice": "none"}).tools == ()
    assert (
        reading(OpenAIResponses(), RESPONSES | {"tools": RESPONSES_TOOLS, "tool_choice": "none"}).tools == ()
    )


def test_additional_tools_are_offered_as_well() -> None:
    items = [{"type": "additional_tools", "role": "developer", "tools": RESPONSES_TOOLS}, USER]
    call = reading(OpenAIResponses(), {"model": "m", "input": items})
    assert call.tools == SCHEMAS
    assert call.messages == (HistoryMessage("user", "Hi"),)


@pytest.mark.parametrize(
    ("headers", "marks"),
    [
        ({}, Marks()),
        ({"x-rollyard-conversation": "subagent"}, Marks(kind="subagent")),
        ({"x-rollyard-conversation": "main", "session-id": "s", "thread-id": "t"}, Marks(kind="main")),
        ({"session-id": "s", "thread-id": "s"}, Marks("s")),
        ({"session-id": "s"}, Marks("s")),
        ({"session-id": "s", "thread-id": "t"}, Marks("s", "t", "subagent")),
        (
            {"session-id": "s", "thread-id": "t", "x-openai-subagent": "collab_spawn"},
            Marks("s", "t", "subagent"),
        ),
        ({"session-id": "s", "x-openai-subagent": "review"}, Marks("s", "review", "subagent")),
        (
            {"session-id": "s", "thread-id": "s", "x-codex-turn-metadata": '{"request_kind":"compaction"}'},
            Marks("s", "", "compaction"),
        ),
        ({"session-id": "s", "x-codex-turn-metadata": '{"request_kind":"turn"}'}, Marks("s")),
        ({"session-id": "s", "x-codex-turn-metadata": "["}, Marks("s")),
        ({"session-id": "s", "x-codex-turn-metadata": "[]"}, Marks("s")),
        ({"x-session-id": "s"}, Marks("s")),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, Marks("p", "s", "subagent")),
        ({"x-session-id": "s" * 10_000}, Marks()),
    ],
)
def test_the_marks_of_harnesses_are_read(headers: dict[str, str], marks: Marks) -> None:
    assert reading(OpenAIChat(), CHAT, headers).marks == marks
    assert reading(OpenAIResponses(), RESPONSES, headers).marks == marks


@pytest.mark.parametrize("kind", ["policy", "Main", ""])
def test_a_conversation_of_no_kind_is_refused(kind: str) -> None:
    with pytest.raises(CallError, match="must be one of main, subagent, title, compaction, other") as refused:
        reading(OpenAIChat(), CHAT, {"x-rollyard-conversation": kind})
    assert refused.value.problem == "invalid"


def test_a_call_of_codex_is_accepted() -> None:
    headers = {
        "session-id": "019a",
        "thread-id": "019a",
        "x-codex-turn-metadata": '{"turn_id":"1","request_kind":"turn"}',
        "x-codex-window-id": "019a:0",
        "originator": "codex_exec",
    }
    call = reading(OpenAIResponses(), CODEX, headers)
    assert [message.role for message in call.messages] == [
        *("system", "system", "user", "user"),
        *("assistant", "tool", "tool", "assistant"),
    ]
    calls = (
        HistoryCall("call_1", "exec_command", '{"cmd": "wc -l a"}'),
        HistoryCall("call_2", "spawn_agent", "{}"),
    )
    assert call.messages[4] == HistoryMessage("assistant", "I look.", "Hm.", calls)
    assert [tool["function"]["name"] for tool in call.tools] == ["exec_command", "spawn_agent", "view_image"]
    assert call.asked == {"reasoning": {"summary": "auto"}, "tools_left_out": ["web_search"]}
    assert call.stream
    assert call.marks == Marks("019a")


def test_a_call_of_opencode_is_accepted() -> None:
    call = reading(OpenAIChat(), OPENCODE, {"x-session-id": "ses_1"})
    assert call.messages[2].calls == (HistoryCall("call_1", "bash", '{"command":"ls"}'),)
    assert call.max_tokens == 32000
    assert call.marks == Marks("ses_1")


def test_a_call_of_opencode_over_responses_is_accepted() -> None:
    body = {
        "model": "policy",
        "input": [
            {"role": "developer", "content": "You are opencode."},
            {"role": "user", "content": [{"type": "input_text", "text": "Count the lines."}]},
            # It drops the text of a thought, and repeats what is encrypted.
            {"type": "reasoning", "encrypted_content": "SG0u", "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": '{"command":"ls"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "a\n"},
        ],
        "max_output_tokens": 32000,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "ses_1",
        "tools": RESPONSES_TOOLS,
        "tool_choice": "auto",
        "stream": True,
    }
    call = reading(OpenAIResponses(), body, {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"})
    assert call.messages[2] == HistoryMessage(
        "assistant", "I look.", "Hm.", (HistoryCall("call_1", "bash", '{"command":"ls"}'),)
    )
    assert call.max_tokens == 32000
    assert call.marks == Marks("ses_1", "ses_2", "subagent")


def test_a_call_of_mini_swe_agent_is_accepted() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Count the lines."},
            {
                "content": "I look.",
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "index": 0,
                        "function": {"name": "bash", "arguments": '{"command":  "ls"}'},
                    }
                ],
                "function_call": None,
                "provider_specific_fields": {"refusal": None},
                "annotations": [],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": '{"returncode": 0, "output": "a"}'},
        ],
        "tools": [CHAT_TOOLS[0]],
    }
    call = reading(OpenAIChat(), body)
    assert call.messages[2] == HistoryMessage(
        "assistant", "I look.", calls=(HistoryCall("call_1", "bash", '{"command":  "ls"}'),)
    )
    assert not call.stream
    assert call.marks == Marks()


def test_what_an_sdk_has_parsed_is_repeated_by_its_own_names() -> None:
    # litellm repeats the fields of the SDK's models, whose names differ from the service's.
    item = {
        "type": "function_call",
        "arguments": "{}",
        "call_id": "c1",
        "name": "bash",
        "id": "fc_1",
        "async_": None,
        "caller": None,
        "namespace": None,
        "status": "completed",
    }
    expected = (HistoryMessage("assistant", calls=(HistoryCall("c1", "bash", "{}"),)),)
    assert reading(OpenAIResponses(), RESPONSES | {"input": [item]}).messages == expected
    with pytest.raises(CallError, match="async_"):
        reading(OpenAIResponses(), RESPONSES | {"input": [item | {"async_": True}]})


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container within a JSON value with each of its keys or indices."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    1 << 63,
    "",
    "x",
    "\x00",
    [],
    {},
    [[]],
    [{}],
    {"type": []},
    ["x"] * 3,
)


@pytest.mark.parametrize("seed", range(40))
def test_no_junk_in_any_place_is_anything_but_refused_or_read(seed: int) -> None:
    random = Random(seed)
    counted = {"read": 0, "refused": 0}
    for protocol, good in ((OpenAIChat(), OPENCODE), (OpenAIResponses(), CODEX)):
        for _ in range(100):
            body = copy.deepcopy(good)
            for _ in range(random.randint(1, 3)):
                container, key = random.choice(list(places(body)))
                container[key] = copy.deepcopy(random.choice([*JUNK, body["tools"], body["model"]]))
            refusal = call = None
            try:
                call = protocol.read(body, {}, {})
            except CallError as error:
                refusal = error
            counted["read" if refusal is None else "refused"] += 1
            assert refusal is None or refusal.problem == "invalid"
            assert call is None or all(isinstance(message.text, str) for message in call.messages)
    assert min(counted.values()) > 0


def test_reading_leaves_the_body_as_it_is() -> None:
    body = copy.deepcopy(CODEX)
    OpenAIResponses().read(body, {}, {})
    assert body == CODEX
