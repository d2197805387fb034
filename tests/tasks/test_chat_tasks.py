"""Messages in the forms of OpenAI, TRL and verl, the format `chat`, and columns that change a task."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollyard_crds import Task
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.formats import Row, RowRefused, TaskFormat
from rollyard_tasks.formats.registry import task_format
from rollyard_tasks.task_list import TaskListError, parse_lines

FUNCTION = {"name": "grep", "arguments": '{"pattern": "x", "path": null}'}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
OPENAI: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where is"}, {"type": "text", "text": "x?"}]},
    {
        "role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None,
        "reasoning_content": "I look.", "tool_calls": [{**CALL, "index": 0}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "x marks"},
    {"role": "assistant", "content": "It marks.", "tool_calls": [], "reasoning_content": ""},
    {"role": "user", "content": "The spot?", "name": "ada"},
]  # fmt: skip
"""A conversation as OpenAI's clients, servers of open models and their logs write it."""
PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is\nx?"},
    {
        "role": "assistant", "content": "", "reasoning_content": "I look.",
        "tool_calls": [
            {
                "id": "call_1", "type": "function",
                "function": {"name": "grep", "arguments": {"pattern": "x", "path": None}},
            }
        ],
    },
    {"role": "tool", "content": "x marks", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It marks."},
    {"role": "user", "content": "The spot?", "name": "ada"},
]  # fmt: skip
VERL = {"data_source": "s", "reward_model": {"ground_truth": "2"}}


def mapped(row: dict[str, Any], name: str = "rollyard") -> Task:
    (task,) = parse_lines([json.dumps(row)], TaskSource(url="x", format=name))
    return task


def messages(task: Task) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in task.chat()]


def refusal(row: dict[str, Any], name: str = "rollyard") -> str:
    with pytest.raises(TaskListError) as refused:
        mapped(row, name)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("rollyard", {"id": "a", "messages": OPENAI}),
        ("rollyard", {"id": "a", "messages": PLAIN}),
        ("verl", {**VERL, "prompt": OPENAI}),
        ("verl", {**VERL, "prompt": json.dumps(OPENAI)}),
        ("chat", {"messages": OPENAI}),
        ("chat", {"messages": [*OPENAI, {"role": "assistant", "content": "Yes."}]}),
        ("chat", {"prompt": OPENAI}),
        ("chat", {"prompt": json.dumps(OPENAI)}),
    ],
)
def test_messages_of_every_format_become_the_same(name: str, row: dict[str, Any]) -> None:
    task = mapped(row, name)
    assert messages(task) == PLAIN
    assert Task.model_validate_json(task.model_dump_json()) == task, "what is stored is read as the same"


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_a_thought_has_three_names(name: str) -> None:
    said = {"role": "assistant", "content": "a", name: "hm"}
    (message,) = mapped({"id": "a", "messages": [said]}).chat()
    assert message.reasoning_content == "hm"
    same = {**said, "reasoning_content": "hm"}
    assert mapped({"id": "a", "messages": [same]}).chat() == [message]
    other = {**said, "reasoning_content": "no"}
    assert refusal({"id": "a", "messages": [other]}).startswith(
        f"line 1: messages[0].{name}: must be the same as 'reasoning_content'"
    )


def test_a_table_gives_every_call_the_arguments_of_all() -> None:
    """A struct column of Parquet has null for what a row lacks; a JSON text says what it means."""
    given = {"role": "assistant", "content": None, "name": None, "tool_call_id": None}
    struct = {"pattern": "x", "flags": {"i": True, "w": None}, "path": None}
    call = {"id": None, "type": "function", "function": {"name": "grep", "arguments": struct}}
    task = mapped({**VERL, "prompt": [{**given, "tool_calls": [call]}]}, "verl")
    made = {"name": "grep", "arguments": {"pattern": "x", "flags": {"i": True}}}
    assert messages(task)[0]["tool_calls"] == [{"type": "function", "function": made}]


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.invalid/x.png"}}


def calling(**function: Any) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "f", **function}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "judge", "content": "x"}, "role: must be one of system, developer, user, assistant, tool"),
        ({"content": "x"}, "role: must be one of"),
        ({"role": "function", "name": "f", "content": "x"}, "role: must be one of"),
        ({"role": "user", "content": [IMAGE]}, "content[0].type: must be 'text': a model gets only texts"),
        ({"role": "user", "content": ["x"]}, "content[0].type: must be 'text'"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "content[0]: must be {"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "content[0]: must be {"),
        ({"role": "user", "content": {"text": "x"}}, "content: must be a string"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "refusal: cannot be shown to a model"),
        ({"role": "assistant", "audio": {"id": "a"}}, "audio: cannot be shown to a model"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call: is the form from before"),
        ({"role": "user", "content": "x", "weight": 1}, "weight: unknown field"),
        ({"role": "user", "tool_calls": []}, ""),
        ({"role": "user", "tool_calls": [CALL]}, "tool_calls: belongs to messages of the role 'assistant'"),
        ({"role": "user", "reasoning": "hm"}, "reasoning_content: belongs to messages of the role"),
        ({"role": "user", "tool_call_id": "c"}, "tool_call_id: belongs to messages of the role 'tool'"),
        (calling(arguments="{"), "tool_calls[0].function.arguments: is a text that is not JSON"),
        (calling(arguments="[1]"), "tool_calls[0].function.arguments: is not the text of a JSON object"),
        (calling(arguments='{"a": NaN}'), "tool_calls[0].function.arguments: is a text that is not JSON"),
        (calling(arguments=[1]), "tool_calls[0].function.arguments: must be"),
        (calling(arguments=""), ""),
        (calling(arguments=None), ""),
        ({"role": "assistant", "tool_calls": [{**CALL, "index": 1}]}, "tool_calls[0].index: must be"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls[0].type: "),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "tool_calls[0].function: "),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool_calls[0]: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rollyard", "verl"])
def test_what_no_message_can_hold_is_refused_by_name(
    name: str, message: dict[str, Any], problem: str
) -> None:
    given = [{"role": "user", "content": "?"}, message]
    row = {"id": "a", "messages": given} if name == "rollyard" else {**VERL, "prompt": given}
    if not problem:
        assert len(mapped(row, name).chat()) == 2
        return
    found = refusal(row, name)
    # What only the task itself can refuse has its name for the conversation.
    starts = {f"line 1: {column}[1].{problem}" for column in ("messages", "prompt")}
    assert any(found.startswith(start) for start in starts), found


def test_a_refused_role_is_shown_to_those_who_may_see_it() -> None:
    assert refusal({"id": "a", "messages": [{"role": "judge"}]}).endswith("(got 'judge')")
    assert refusal({**VERL, "prompt": [{"role": "judge"}]}, "verl").endswith("(got 'judge')")


TURNS = [{"role": "user", "content": "1 + 1?"}]
SAID = {"role": "assistant", "content": "It is 2."}
EMPTY_CALL = {"id": "c", "function": {"name": "f", "arguments": {}}}
CHATS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("a text", {"prompt": "1 + 1?", "answer": "2"}, {"prompt": "1 + 1?", "answer": "2"}),
    ("a text in brackets", {"prompt": "[1, 2]"}, {"prompt": "[1, 2]"}),
    ("a number", {"prompt": TURNS, "answer": 2}, {"messages": TURNS, "answer": "2"}),
    ("a solution", {"prompt": TURNS, "solution": "$2$"}, {"messages": TURNS, "answer": "$2$"}),
    (
        "both", {"prompt": TURNS, "solution": "so 2", "answer": "2"},
        {"messages": TURNS, "answer": "2", "metadata": {"solution": "so 2"}},
    ),
    (
        "columns of a reward function", {"prompt": TURNS, "ground_truth": "2", "level": 3, "id": "a/1"},
        {"id": "a/1", "messages": TURNS, "answer": "2", "metadata": {"level": 3}},
    ),
    ("an id as pandas may write it", {"prompt": "?", "id": 3.0}, {"id": "3", "prompt": "?"}),
    (
        "a preference", {"prompt": TURNS, "chosen": [SAID], "rejected": [SAID]},
        {"messages": TURNS, "metadata": {"chosen": [SAID], "rejected": [SAID]}},
    ),
    ("a row of fine-tuning", {"messages": [*TURNS, SAID]}, {"messages": TURNS, "answer": "It is 2."}),
    (
        "with an answer beside it", {"messages": [*TURNS, SAID], "answer": "2"},
        {"messages": TURNS, "answer": "2", "metadata": {"reference": SAID}},
    ),
    (
        "a call as the answer", {"messages": [*TURNS, calling(arguments="{}")]},
        {"messages": TURNS, "metadata": {"reference": {"role": "assistant", "tool_calls": [EMPTY_CALL]}}},
    ),
    (
        "a thought before the answer", {"messages": [*TURNS, {**SAID, "thinking": "hm"}], "tools": []},
        {
            "messages": TURNS, "answer": "It is 2.",
            "metadata": {"reference": {**SAID, "reasoning_content": "hm"}, "tools": []},
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "task"), [case[1:] for case in CHATS], ids=[case[0] for case in CHATS])
def test_rows_of_chats(row: dict[str, Any], task: dict[str, Any]) -> None:
    assert mapped(row, "chat") == Task.model_validate({"id": "1", **task})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": "2"}, "messages: is missing"),
        ({"prompt": 3}, "prompt: must be a text"),
        ({"prompt": []}, "prompt: must not be empty"),
        ({"messages": "hello"}, "messages: is a text that is not JSON"),
        ({"messages": [SAID]}, "messages: must end with a message that is not an assistant's"),
        ({"messages": [*TURNS, SAID, SAID]}, "messages: must end with"),
        ({"prompt": [*TURNS, SAID]}, "prompt: must end with a message that is not an assistant's"),
        ({"prompt": TURNS, "answer": [{}]}, "answer: must be a text or a number"),
        ({"messages": TURNS, "tools": [CALL]}, "tools: would be the tools of this task alone"),
    ],
)
def test_refused_rows_of_chats(row: dict[str, Any], problem: str) -> None:
    assert refusal(row, "chat").startswith(f"line 1: {problem}")


MCQ = {"question": "Which?", "choices": ["x", "y"], "answer": 1}
ROWS: dict[str, dict[str, Any]] = {
    "verl": {**VERL, "prompt": TURNS},
    "chat": {"prompt": TURNS},
    "mcq": MCQ,
    "humaneval": {"task_id": "a/1", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): f()"},
    "mbpp": {"text": "?", "code": "def f(): return 1", "test_list": ["assert f() == 1"]},
    "livecodebench": {"question_content": "?", "public_test_cases": '[{"input": "1", "output": "2"}]'},
    "swebench": {
        "instance_id": "a", "repo": "a/b", "problem_statement": "?", "image": "a", "log_parser": "pytest",
        "eval_script": "true", "FAIL_TO_PASS": ["test_a.py::test_a"],
    },
}  # fmt: skip
READ = {("mcq", "hint"), ("mcq", "context"), ("mcq", "passage"), ("livecodebench", "starter_code")}
"""The columns that formats use."""
CHANGING = {
    "image": {"bytes": "aGk=", "path": None}, "images": [{"bytes": "aGk="}], "image_1": "a.png",
    "Images": ["a.png"], "videos": ["a.mp4"], "audio": {"path": "a.wav"}, "hint": "Read.",
    "context": "Once.", "passage": "Once.", "tools": [CALL], "tool_calls": [CALL], "system": "Be brief.",
    "system_prompt": "Be brief.", "starter_code": "def f():", "multi_modal_data": {"image": ["a"]},
    "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_columns_that_change_a_task_are_used_or_refused_by_name(name: str) -> None:
    reader, row = task_format(name), ROWS[name]

    def asked(values: dict[str, Any]) -> Any:
        task = reader.read(values, 1)
        return task.get("messages", task.get("prompt"))

    plain = asked(row)
    for column, value in CHANGING.items():
        if (name, column) in READ:
            assert asked({**row, column: value}) != plain, column
            continue
        with pytest.raises(RowRefused, match=f"^{column}: "):
            reader.read({**row, column: value}, 1)
        if column not in row:
            for nothing in (None, "", " ", [], {}, [None, {"bytes": None}]):
                assert asked({**row, column: nothing}) == plain


def test_a_hint_stands_before_the_question() -> None:
    row = {**MCQ, "hint": "The passage.\n", "lecture": "What explains it.", "image": None}
    task = mapped(row, "mcq")
    assert task.prompt is not None
    assert task.prompt.startswith("The passage.\n\nWhich?\n\nA. x\n")
    assert "explains" not in task.model_dump_json()


class Careless(TaskFormat):
    """A format of another package, which hands all columns on and reads one."""

    def task(self, row: Row) -> dict[str, Any]:
        known = {key: value for key, value in row.values.items() if key != "id"}
        return {"prompt": row.text("question"), "answer": "2", "metadata": {**known, **dict(row.values)}}


class Careful(Careless):
    """One that uses the column."""

    def task(self, row: Row) -> dict[str, Any]:
        return {**super().task(row), "prompt": row.text("hint") + row.values["question"]}


def test_formats_of_other_packages_drop_no_column_either(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"question": "1 + 1?", "hint": "Add. ", "level": 3}
    monkeypatch.setattr("rollyard_tasks.task_list.task_format", lambda _name: Careless())
    assert refusal(row, "verl").startswith("line 1: hint: would be a part of the task")
    monkeypatch.setattr("rollyard_tasks.task_list.task_format", lambda _name: Careful())
    assert mapped(row, "verl").prompt == "Add. 1 + 1?"


def test_a_column_that_is_only_looked_for_is_not_read() -> None:
    class Looking(TaskFormat):
        def task(self, row: Row) -> dict[str, Any]:
            return {"prompt": "pictured" if "image" in row.values else "?"}

    assert task_format("verl").read({**VERL, "prompt": TURNS}, 1)["answer"] == "2"
    with pytest.raises(ValueError, match=r"^image: holds pictures"):
        Looking().read({"image": "a.png"}, 1)
