"""What the author of a job tries with the messages that his tasks begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from rollyard_crds import Task
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.file_rows import json_row
from rollyard_tasks.task_list import TaskLines, TaskListError

pytestmark = pytest.mark.attack(boundary="control plane", surface="messages of tasks")


SECRET = "hunter2-is-the-secret"
Wrap = Callable[[list[dict[str, Any]]], dict[str, Any]]
WRAPS: dict[str, Wrap] = {
    "rollyard": lambda messages: {"id": "a", "messages": messages},
    "verl": lambda messages: {
        "data_source": "s", "prompt": messages, "reward_model": {"ground_truth": "2"}
    },
    "chat": lambda messages: {"messages": messages},
}  # fmt: skip


def read(name: str, messages: list[dict[str, Any]], *, quote: bool = True) -> Task:
    lines = TaskLines(quote=quote, source=TaskSource(url="x", format=name))
    task = lines.add(json_row(1, json.dumps(WRAPS[name](messages))))
    lines.end()
    assert task is not None
    return task


def calling(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


HOSTILE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a text of a megabyte": (
        [{"role": "user", "content": "x" * ((1 << 20) + 1)}], "at most 1048576 characters"
    ),
    "a thought of a megabyte": (
        [
            {"role": "assistant", "reasoning": "x" * ((1 << 20) + 1)},
            {"role": "user", "content": "?"},
        ],
        "at most 1048576 characters",
    ),
    "parts of a megabyte": (
        [{"role": "user", "content": [{"type": "text", "text": "x" * 1024}] * 1024}],
        "at most 1048576 characters",
    ),
    "arguments of a megabyte": (calling(json.dumps("x" * (1 << 20))), "is longer than 1048576 characters"),
    "arguments that exhaust the stack": (calling(nested(100_000)), "is a text that is not JSON"),
    "arguments deeper than a document": (calling(nested(150)), "lists and objects may nest 100 deep"),
    "a key twice": (calling('{"a": 1, "b": {"c": 1, "c": 2}}'), "has the same key twice in one object"),
    "half a character": (calling('{"a": "\\ud800"}'), "holds half of a character"),
    "a number without end": (calling('{"a": ' + "9" * 5000 + "}"), "is a text that is not JSON"),
    "too many calls": (
        [
            {"role": "assistant", "tool_calls": calling("{}")[1]["tool_calls"] * 65},
            {"role": "user", "content": "?"},
        ],
        "at most 64 items",
    ),
    "a result of nothing": (
        [{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "c", "content": "x"}],
        "no message before this one makes a call of this id",
    ),
    "a result before its call": (
        [calling("{}")[place] for place in (2, 0, 1, 2)], "no message before this one makes a call of this id"
    ),
}  # fmt: skip


HOSTILE_MESSAGES = pytest.mark.attack(
    "texts of megabytes, arguments that nest until the stack ends, name a key twice or hold half of a "
    "character, a result of no call",
    stopped_by="bounds on texts and depth before and after arguments are decoded; one meaning or none; "
    "the message names the field and shows nothing",
)


@HOSTILE_MESSAGES
@pytest.mark.parametrize("attack", HOSTILE)
@pytest.mark.parametrize("name", WRAPS)
def test_hostile_messages_are_refused_by_field(name: str, attack: str) -> None:
    messages, problem = HOSTILE[attack]
    with pytest.raises(TaskListError) as refused:
        read(name, messages)
    (found,) = refused.value.problems
    assert problem in found
    assert len(found) < 400, "and what they hold is not repeated"
    # What stands beside it is read: the fault is the attack's alone.
    assert len(read(name, calling(nested(50))).chat()) == 3


@HOSTILE_MESSAGES
@pytest.mark.parametrize(
    "message",
    [
        {"role": SECRET},
        {"role": "user", "content": [{"type": SECRET}]},
        {"role": "user", "content": [{"type": "text", SECRET: SECRET}]},
        {"role": "user", "content": "x", SECRET: SECRET},
        {"role": "assistant", "refusal": SECRET},
        {"role": "assistant", "reasoning": SECRET, "thinking": "x"},
        {"role": "tool", "tool_call_id": SECRET},
        calling(SECRET)[1],
        calling(f'{{"{SECRET}": 1, "{SECRET}": 2}}')[1],
        calling(f'{{"{SECRET}": "\\ud800"}}')[1],
        {"role": "assistant", "tool_calls": [{SECRET: SECRET}]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", WRAPS)
def test_a_refused_message_is_not_shown(name: str, message: dict[str, Any]) -> None:
    with pytest.raises(TaskListError) as refused:
        read(name, [message, {"role": "user", "content": "?"}], quote=False)
    assert SECRET not in str(refused.value)
    assert str(refused.value).startswith("line 1: ")
