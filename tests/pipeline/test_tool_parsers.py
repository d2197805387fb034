"""Hermes tool calls: well-formed, malformed, and adversarial."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_pipeline.tool_parsers import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.hermes import HermesParser
from rollyard_pipeline.trajectories.episode import clean_turn
from rollyard_pipeline.trajectories.sanitize import clean_text


def call(name: str, arguments: object) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def parse(text: str) -> ParsedTurn:
    return HermesParser().parse(text)


def test_text_and_several_calls() -> None:
    parsed = parse(
        "I look.\n" + call("bash", {"command": "ls"}) + "\n" + call("submit", {"answer": "7"}) + "\nbye"
    )
    assert parsed.text.startswith("I look.")
    assert parsed.text.endswith("bye")
    assert parsed.calls == (ParsedCall("bash", {"command": "ls"}), ParsedCall("submit", {"answer": "7"}))


def test_a_value_may_hold_the_closing_mark() -> None:
    parsed = parse(call("bash", {"command": "echo '</tool_call>'"}))
    assert parsed.calls == (ParsedCall("bash", {"command": "echo '</tool_call>'"}),)


def test_a_call_in_a_thought_is_no_call() -> None:
    parsed = parse(
        "<think>maybe " + call("bash", {"command": "rm"}) + "</think>" + call("bash", {"command": "ls"})
    )
    assert [item.arguments for item in parsed.calls] == [{"command": "ls"}]


def test_raw_newlines_and_quoted_arguments_are_accepted() -> None:
    assert (
        parse('<tool_call>{"name": "bash", "arguments": {"command": "a\nb"}}</tool_call>').calls[0].error
        is None
    )
    assert parse(call("bash", '{"command": "ls"}')).calls == (ParsedCall("bash", {"command": "ls"}),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<tool_call>{"name": "bash"', "</tool_call> is missing"),
        ("<tool_call>not json</tool_call>", "not JSON: Expecting value at character 0"),
        ('<tool_call>{"name": "bash", "arguments": {}} x</tool_call>', "text between"),
        ('<tool_call>["bash"]</tool_call>', "expected a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "'name' must be"),
        ('<tool_call>{"name": "bash", "arguments": [1]}</tool_call>', "'arguments' must be a JSON object"),
        ('<tool_call>{"name": "' + "x" * 200 + '"}</tool_call>', "'name' must be"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ('<tool_call>{"name": "a", "arguments": {"n": ' + "9" * 6000 + "}}</tool_call>", "not JSON"),
    ],
)
def test_malformed_calls_say_why(text: str, says: str) -> None:
    (only,) = parse(text).calls
    assert only.error is not None
    assert only.error.startswith("malformed tool call")
    assert says in only.error


def test_values_that_cannot_be_stored_are_made_storable() -> None:
    arguments = '{"a": "\\ud800\\u0000", "n": 123456789012345678901234}'
    (only,) = clean_turn(parse(f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>')).calls
    assert only.error is None
    assert only.arguments == {"a": "��", "n": 1.2345678901234568e23}
    deep = '{"k": ' * 100 + "1" + "}" * 100
    (only,) = clean_turn(parse(f'<tool_call>{{"name": "bash", "arguments": {deep}}}</tool_call>')).calls
    assert only.error == "malformed tool call: arguments nested deeper than 64"


_PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"name"',
        ": ",
        '"bash"',
        ", ",
        '"arguments"',
        "[",
        "]",
        '"',
        "\\",
        "</think>",
    ]
)


@given(st.lists(st.one_of(_PIECES, st.text(max_size=5)), max_size=30).map("".join))
def test_any_text_parses(text: str) -> None:
    parsed = clean_turn(parse(text))
    said = text.rpartition("</think>")[2]
    assert len(parsed.calls) <= said.count("<tool_call>")
    for item in parsed.calls:
        assert item.error or item.name
        assert clean_text(item.name) == item.name
        json.dumps(item.arguments).encode()
