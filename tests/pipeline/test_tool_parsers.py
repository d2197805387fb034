"""Hermes tool calls: well-formed, malformed, and adversarial; and what tools make of calls."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_pipeline.tool_parsers import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.json_calls import HermesParser
from rollyard_pipeline.tools.base import ToolContext, check_arguments, render_result
from rollyard_pipeline.tools.shipped import SubmitTool
from rollyard_pipeline.trajectories.episode import clean_turn
from rollyard_pipeline.trajectories.sanitize import clean_text, clean_value
from rollyard_sandbox.client import ExecResult


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


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"k": value}
    return value


def test_every_part_of_a_value_is_cleaned() -> None:
    big, least = 1 << 63, -(1 << 63)
    dirty = {"a\0": ["x\ud800", {"k": math.nan}], "b": [big - 1, big, least, least - 1, True, None, 0.5]}
    assert clean_value(dirty) == {
        "a�": ["x�", {"k": "nan"}], "b": [big - 1, float(big), least, float(least - 1), True, None, 0.5],
    }  # fmt: skip
    assert [type(one) for one in clean_value(dirty)["b"]] == [int, float, int, float, bool, type(None), float]
    assert clean_value(10**400) == "1" + "0" * 63
    assert [clean_value(-math.inf), clean_value(math.inf)] == ["-inf", "inf"]
    assert clean_value(nested(64)) == nested(64)
    with pytest.raises(ValueError, match="deeper than 64"):
        clean_value(nested(65))
    assert (clean_text("abc", 3), clean_text("abcd", 3), clean_text("\0bcd", 2)) == ("abc", "abc", "�b")
    assert clean_text("🙂\ud83d") == "🙂�"


def test_only_the_call_that_cannot_be_stored_is_malformed() -> None:
    calls = (
        ParsedCall("a\0" * 200, {"x": "\0"}), ParsedCall("b", nested(66)), ParsedCall("c", error="no\0"),
        ParsedCall("d", {"y": 1}),
    )  # fmt: skip
    cleaned = clean_turn(ParsedTurn("said", calls))
    assert cleaned.text == "said"
    assert cleaned.calls == (
        ParsedCall("a�" * 64, {"x": "�"}),
        ParsedCall("b", error="malformed tool call: arguments nested deeper than 64"),
        ParsedCall("c", error="no�"),
        ParsedCall("d", {"y": 1}),
    )


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "whole": {"type": "integer"}, "some": {"type": "number"},
        "flag": {"type": "boolean"}, "list": {"type": "array"}, "map": {"type": "object"},
        "kind": {"enum": ["a", 2]}, "any": {},
    },
    "required": ["text", "whole"],
}  # fmt: skip
ALL = "text, whole, [some], [flag], [list], [map], [kind], [any]"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, None), ({"some": 1, "flag": False, "list": [], "map": {}, "kind": "a", "any": None}, None),
        ({"some": 0.5, "flag": True, "kind": 2, "any": "x"}, None),
        ({"text": None}, "argument 'text' must be of type string, not NoneType"),
        ({"whole": True}, "argument 'whole' must be of type integer, not bool"),
        ({"whole": 1.0}, "argument 'whole' must be of type integer, not float"),
        ({"some": True}, "argument 'some' must be of type number, not bool"),
        ({"some": "1"}, "argument 'some' must be of type number, not str"),
        ({"flag": 1}, "argument 'flag' must be of type boolean, not int"),
        ({"list": {}}, "argument 'list' must be of type array, not dict"),
        ({"map": []}, "argument 'map' must be of type object, not list"),
        ({"kind": "b"}, "argument 'kind' must be one of a, 2"),
        ({"text": ..., "some": 1}, f"argument 'text' is missing; expected {ALL}"),
        ({"whole": ...}, f"argument 'whole' is missing; expected {ALL}"),
        ({"other": 1}, f"unknown argument 'other'; expected {ALL}"),
    ],
)  # fmt: skip
def test_arguments_of_calls_are_checked(arguments: dict[str, Any], problem: str | None) -> None:
    """Each case changes arguments that fit; an ellipsis leaves one out."""
    given = {name: value for name, value in {"text": "", "whole": 0, **arguments}.items() if value is not ...}
    assert check_arguments(SCHEMA, given) == problem


def test_a_tool_without_arguments_takes_none() -> None:
    assert check_arguments({}, {}) is None
    assert check_arguments({"properties": {}}, {"x": 1}) == "unknown argument 'x'; expected none"


RAN = ExecResult(0, b"", "/work", 0.1, False, False, 0, False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "(no output)"),
        ({"output": b"a\n\r\n\n"}, "a"),
        ({"output": b"\na\n b \n"}, "\na\n b "),
        ({"exit_code": 3}, "[exit code 3]"),
        ({"exit_code": -9, "output": b"a\n"}, "a\n[exit code -9]"),
        ({"exit_code": None}, "(no output)"),
        ({"exit_code": 137, "timed_out": True, "output": b"a"}, "a\n[timed out after 2.5 s]"),
        ({"exit_code": 137, "timed_out": True, "shell_restarted": True},
         "[timed out after 2.5 s]\n[shell restarted]"),
        ({"exit_code": 1, "shell_restarted": True}, "[exit code 1]\n[shell restarted]"),
        ({"shell_restarted": True}, "[shell restarted]"),
        ({"output": b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07\x1b(Bplain\n"}, "red plain"),
        ({"output": b"\x1b]no end\nthe rest\x1b"}, "\nthe rest\x1b"),
        ({"output": b"\x1b[?1049h\x1b[24;1H~\x1b[1;1Hone\r\n\x1b[2;1H", "timed_out": True},
         "~one\n[a full-screen program ran, and there is no screen here]\n[timed out after 2.5 s]"),
    ],
)  # fmt: skip
def test_the_policy_reads_of_a_command_what_it_always_did(changes: dict[str, Any], text: str) -> None:
    assert render_result(replace(RAN, **changes), 2.5) == text


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, False), ({"exit_code": 1}, False), ({"exit_code": 143}, False), ({"timed_out": True}, False),
        ({"exit_code": 137}, True), ({"exit_code": -9}, True), ({"killed": True}, True),
        ({"shell_restarted": True}, True),
    ],
)  # fmt: skip
async def test_only_what_sigkill_may_have_ended_can_have_used_up_the_memory(
    changes: dict[str, Any], asked: bool
) -> None:
    async def answer() -> bool:
        return dead

    for dead in (True, False):
        context = ToolContext(client=None, timeout=2.5, max_output_bytes=9, oom_killed=answer)
        observed = await context.ran(replace(RAN, **changes))
        assert observed.truncates == ("SandboxOutOfMemory" if asked and dead else "")
        assert observed.error == ("timed out" if "timed_out" in changes else None)
    without = ToolContext(client=None, timeout=2.5, max_output_bytes=9)
    assert not (await without.ran(replace(RAN, **changes))).truncates


async def test_an_answer_ends_the_episode_unless_no_test_could_read_it() -> None:
    context = ToolContext(client=None, timeout=2.5, max_output_bytes=9)
    for taken in ("", "4 2", "é" * 32_768):
        result = await SubmitTool().call({"answer": taken}, context)
        assert (result.answer, result.error) == (taken, None)
    for refused, words in (("é" * 32_768 + "a", "65537 bytes, at most 65536"), ("a\0b", "NUL")):
        result = await SubmitTool().call({"answer": refused}, context)
        assert result.answer is None
        assert words in (result.error or "")
        assert result.text == f"error: {result.error}"


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
