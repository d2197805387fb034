"""Tools and calls of OpenAI's protocols, as harnesses send them."""

from __future__ import annotations

from typing import Any

BASH = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
CHAT_TOOLS: Any = [{"type": "function", "function": BASH}, {"type": "function", "function": {"name": "read"}}]
RESPONSES_TOOLS: Any = [
    {"type": "function", "strict": False, **BASH},
    {"type": "function", "name": "read", "parameters": None, "strict": None},
]
SCHEMAS = (
    {"type": "function", "function": BASH},
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}},
)


def input_text(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def function(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": "",
        "strict": False,
        "parameters": {"type": "object"},
    }


CODEX: dict[str, Any] = {
    "model": "policy",
    "stream": True,
    "input": [
        {"id": "msg_1", **input_text("developer", "You are a coding agent running in the Codex CLI.")},
        {"id": "msg_2", **input_text("developer", "<permissions instructions>")},
        {"id": "msg_3", **input_text("user", "<environment_context>")},
        {"id": "msg_4", **input_text("user", "Count the lines.")},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": "SG0u",
        },
        {
            "type": "message",
            "status": "completed",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1_0",
            "name": "exec_command",
            "arguments": '{"cmd": "wc -l a"}',
            "call_id": "call_1",
        },
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1_1",
            "name": "spawn_agent",
            "namespace": "multi_agent_v1",
            "arguments": "{}",
            "call_id": "call_2",
        },
        {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": "call_1",
            "output": "Chunk ID: 1f\nOutput:\n3 a\n",
        },
        {"type": "function_call_output", "id": "fco_2", "call_id": "call_2", "output": '{"agent_id":"t"}'},
        # A call that gives no encrypted content has nulls in its place.
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    ],
    "tools": [
        function("exec_command"),
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Sub-agents.",
            "tools": [function("spawn_agent")],
        },
        function("view_image"),
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a",
    "client_metadata": {"x-codex-installation-id": "i"},
}
OPENCODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "messages": [
        {"role": "system", "content": "You are opencode."},
        {"role": "user", "content": "Count the lines."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command":"ls"}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a\n"},
    ],
    "tools": CHAT_TOOLS,
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
