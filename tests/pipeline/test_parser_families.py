"""Every family's format: well-formed turns, malformed ones, round trips and hostile texts."""

# ruff: noqa: E501  (a turn is read more easily on one line)

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollyard_pipeline.registry import TOOL_PARSERS, Registry, installed
from rollyard_pipeline.tool_parsers import ConfigurableParser, ParsedCall, ToolCallParser
from rollyard_pipeline.tool_parsers.base import ChatModel
from rollyard_pipeline.tool_parsers.detect import AutoParser, choose
from rollyard_pipeline.tool_parsers.renderers import Readers
from rollyard_pipeline.trajectories.episode import clean_turn
from rollyard_testing.families import FAMILIES as MODELS
from rollyard_testing.families import Family

Arguments = dict[str, Any]
Calls = list[tuple[str, Arguments]]
FAMILIES = (
    "hermes", "qwen_coder", "llama3_json", "pythonic", "mistral", "deepseek", "gpt_oss", "deepseek_dsml", "gemma4",
    "glm", "kimi_k2", "kimi_k3",
)  # fmt: skip

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "deep": {"type": "boolean"},
            "items": {"type": "array"},
            "table": {"type": "object"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
    }
}


def parser(name: str) -> ToolCallParser:
    made: ToolCallParser = Registry().load(TOOL_PARSERS, name)()
    if isinstance(made, ConfigurableParser):
        made.configure("", SCHEMAS)
    return made


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# -- how each family writes calls ---------------------------------------------------------------------


def xml_value(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def write_hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def write_qwen_coder(calls: Calls) -> str:
    def one(name: str, arguments: Arguments) -> str:
        values = "".join(
            f"<parameter={key}>\n{xml_value(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def write_llama3_json(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls)


def write_pythonic(calls: Calls) -> str:
    return (
        "["
        + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        )
        + "]"
    )


def write_mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def write_deepseek(calls: Calls) -> str:
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def write_gpt_oss(calls: Calls) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}"
        for name, arguments in calls
    )


def write_dsml(calls: Calls) -> str:
    def one(name: str, arguments: Arguments) -> str:
        values = "".join(
            f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{xml_value(value)}</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'

    return f"<｜DSML｜tool_calls>\n{''.join(one(*call) for call in calls)}</｜DSML｜tool_calls>"


def write_glm(calls: Calls) -> str:
    def one(name: str, arguments: Arguments) -> str:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{xml_value(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{values}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def write_gemma(calls: Calls) -> str:
    def value_text(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, list):
            return f"[{','.join(map(value_text, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{value_text(one)}' for key, one in value.items())}}}"
        return dumps(value)

    return "".join(f"<|tool_call>call:{name}{value_text(values)}<tool_call|>" for name, values in calls)


def write_kimi_k2(calls: Calls) -> str:
    each = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"


def xtml_type(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def write_kimi_k3(calls: Calls) -> str:
    def one(number: int, name: str, arguments: Arguments) -> str:
        values = "".join(
            f'<|open|>argument key="{key}" type="{xtml_type(value)}"<|sep|>{xml_value(value)}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        return f'<|open|>call tool="{name}" index="{number}"<|sep|>{values}<|close|>call<|sep|>'

    each = "".join(one(number, *call) for number, call in enumerate(calls, 1))
    return f"<|open|>tools<|sep|>{each}<|close|>tools<|sep|><|close|>message<|sep|>"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": write_hermes,
    "qwen_coder": write_qwen_coder,
    "llama3_json": write_llama3_json,
    "pythonic": write_pythonic,
    "mistral": write_mistral,
    "deepseek": write_deepseek,
    "gpt_oss": write_gpt_oss,
    "deepseek_dsml": write_dsml,
    "gemma4": write_gemma,
    "glm": write_glm,
    "kimi_k2": write_kimi_k2,
    "kimi_k3": write_kimi_k3,
}
MARKS = [
    *("<tool_call>", "</tool_call>", "</think>", "<think>", "</parameter>", "</function>", "<function=f>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁call▁end｜>", "```", "<|end|>", "<|call|>", "; {"),
    *(
        "</arg_value>",
        "<arg_key>",
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜parameter>",
        "<|tool_call>",
        "<tool_call|>",
    ),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|close|>argument<|sep|>", "<|close|>call<|sep|>"),
    *('"', "'", "\\", "\n", "[", "]", "{", "}", "é", "\U0001f600", "\u2028", '[f(a="', '{"name": "x"}'),
]
# These formats have no escapes, so they cannot write their own marks (the modules say so). Everything else must
# survive.
UNWRITABLE = {
    "qwen_coder": ("</parameter>", "<parameter=", "</function>"),
    "deepseek_dsml": ("</｜DSML｜parameter>",),
    "glm": ("</arg_value>",),
    "kimi_k3": ("<|close|>argument<|sep|>",),
}

_texts = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=6)), max_size=6).map("".join)
_values = st.recursive(
    st.one_of(_texts, st.integers(-(10**12), 10**12), st.booleans(), st.none(), st.floats(-1e9, 1e9)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_texts, inner, max_size=3)),
    max_leaves=6,
)
_typed_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": _texts,
        "count": st.integers(-(10**12), 10**12),
        "share": st.floats(-1e9, 1e9),
        "deep": st.booleans(),
        "items": st.lists(_values, max_size=3),
        "table": st.dictionaries(_texts, _values, max_size=3),
        "either": st.one_of(st.none(), st.integers(0, 9)),
    },
)
_plain_keys = st.from_regex(r"[a-z][a-z0-9_ ]{0,7}", fullmatch=True).map(str.strip)
_plain_values = st.recursive(
    st.one_of(_texts, st.integers(-(10**12), 10**12), st.booleans(), st.none(), st.floats(-1e9, 1e9)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_plain_keys, inner, max_size=3)),
    max_leaves=6,
)
"""Values of which the keys can be written without quotes."""
_free_arguments = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,7}", fullmatch=True), _values, max_size=4)
_SAID = st.sampled_from(["", "I look first.\n", "日本語 🙂\n"])


def writable(family: str, arguments: Arguments) -> bool:
    values = [xml_value(value) for value in arguments.values()]
    drafts = family == "qwen_coder" and any(
        "<function=" in value.partition("</think>")[2] for value in values
    )
    return not drafts and not any(mark in value for value in values for mark in UNWRITABLE.get(family, ()))


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_what_a_family_writes_is_read_back(family: str, data: st.DataObject) -> None:
    kind = {
        "qwen_coder": _typed_arguments, "glm": _typed_arguments,
        "gemma4": st.dictionaries(_plain_keys, _plain_values, max_size=4),
    }.get(family, _free_arguments)  # fmt: skip
    arguments = kind.filter(lambda item: writable(family, item))
    calls = data.draw(st.lists(st.tuples(st.just("f"), arguments), min_size=1, max_size=3))
    said = data.draw(_SAID)
    if family == "gpt_oss" and said:
        text = f"<|channel|>analysis<|message|>{said}<|end|><|start|>assistant{WRITERS[family](calls)}"
    else:
        text = said + WRITERS[family](calls)
    parsed = parser(family).parse(text)
    assert parsed.calls == tuple(ParsedCall(name, values) for name, values in calls)
    assert parsed.text == said.strip()


LS = ParsedCall("f", {"text": "ls"})
R1 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DSML = '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="text" string="true">'
K2 = "<|tool_calls_section_begin|><|tool_call_begin|>"
K3 = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="text" type="string"<|sep|>'


@pytest.mark.parametrize(
    ("family", "text", "said", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "</think>"}}</tool_call>', "",
         [ParsedCall("f", {"text": "</think>"})]),
        ("qwen_coder", "<function=f>\n<parameter=text>\nls\n</parameter>\n</function>\n</tool_call>", "", [LS]),
        ("qwen_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [ParsedCall("f", {})]),
        ("qwen_coder", "<tool_call><function=f><parameter=text>\n\n  a\n\nb\n\n</parameter></function></tool_call>",
         "", [ParsedCall("f", {"text": "\n  a\n\nb\n"})]),
        ("qwen_coder", "<tool_call><function=f><parameter=text>a</parameter> <b></function> x</parameter>"
         "<parameter=count> 7 </parameter></function></tool_call>", "",
         [ParsedCall("f", {"text": "a</parameter> <b></function> x", "count": 7})]),
        # These are what jinja2 prints for values that are neither text nor JSON, and values that fit no type
        # of the schema.
        ("qwen_coder", "<tool_call><function=f><parameter=deep>True</parameter><parameter=either>None</parameter>"
         "<parameter=table>{'a': [1, None]}</parameter><parameter=count>seven</parameter>"
         "<parameter=other>12</parameter></function></tool_call>", "",
         [ParsedCall("f", {"deep": True, "either": None, "table": {"a": [1, None]}, "count": "seven",
                           "other": "12"})]),
        ("llama3_json", '{"name": "f", "parameters": {"text": "ls"}}', "", [LS]),
        ("llama3_json", '{"type": "function", "name": "f", "arguments": {"text": "ls"}};{"name": "f", '
         '"parameters": {}}', "", [LS, ParsedCall("f", {})]),
        ("llama3_json", 'So:\n{"name": "f", "parameters": {"text": "ls"}}\n', "So:", [LS]),
        ("llama3_json", 'The answer:\n{"name": "Ada", "born": 1815}', 'The answer:\n{"name": "Ada", "born": 1815}',
         []),
        ("llama3_json", 'set {"name": "f", "parameters": {}} inline', 'set {"name": "f", "parameters": {}} inline',
         []),
        ("pythonic", "<|python_start|>[f(text='ls')]<|python_end|>", "", [LS]),
        ("pythonic", "f(text='ls') and [see](f(1)) [1, 2]", "f(text='ls') and [see](f(1)) [1, 2]", []),
        ("pythonic", """[f(text='l' "s",), a.b(x=(1, [2]), y={'k': -1.5e3, "n": null}, z=r"\\d", u="\\u00e9\\x41\\q")]""",
         "", [LS, ParsedCall("a.b", {"x": [1, [2]], "y": {"k": -1500.0, "n": None}, "z": "\\d", "u": "éA\\q"})]),
        ("mistral", 'Well.[TOOL_CALLS] [{"name": "f", "arguments": {"text": "ls"}, "id": "a1b2c3d4e"}, '
         '{"name": "f", "arguments": "{}"}]', "Well.", [LS, ParsedCall("f", {})]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"text": "ls"}[TOOL_CALLS]f{"text": "ls"}', "", [LS, LS]),
        ("mistral", '[THINK][TOOL_CALLS]f[ARGS]{}[/THINK]a[TOOL_CALLS]f[ARGS]{"text": "ls"}',
         "[THINK][TOOL_CALLS]f[ARGS]{}[/THINK]a", [LS]),
        ("deepseek", f'a</think>b{R1}f<｜tool▁sep｜>{{"text": "ls"}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f'
         '<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>', "a</think>b",
         [LS, ParsedCall("f", {})]),
        ("deepseek_dsml", 'a<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="text" string="true">ls'
         '</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>b', "ab", [LS]),
        ("deepseek_dsml", '<｜DSML｜function_calls><｜DSML｜invoke name="f"/><｜DSML｜invoke name="f">'
         '</｜DSML｜invoke>', "", [ParsedCall("f", {}), ParsedCall("f", {})]),
        ("deepseek_dsml", 'Write <｜DSML｜invoke name="f"> or <｜DSML｜tool_calls></｜DSML｜tool_calls>.',
         'Write <｜DSML｜invoke name="f"> or <｜DSML｜tool_calls></｜DSML｜tool_calls>.', []),
        ("gemma4", 'a<|tool_call>call:f{ a b:[1, {c: <|"|>"{x}<|"|>}],\n d:True , e:None,}<tool_call|>', "a",
         [ParsedCall("f", {"a b": [1, {"c": '"{x}'}], "d": True, "e": None})]),
        ("gemma4", "<|channel>thought\nf<channel|>four", "<|channel>thought\nf<channel|>four", []),
        ("glm", "<tool_call>f<arg_key>text</arg_key><arg_value> a </arg_value> b\n</arg_value><arg_key>count</arg_key>"
         "<arg_value> 7 </arg_value><arg_key>either</arg_key><arg_value>null</arg_value><arg_key>other</arg_key>"
         "<arg_value>12</arg_value></tool_call>", "",
         [ParsedCall("f", {"text": " a </arg_value> b\n", "count": 7, "either": None, "other": "12"})]),
        ("kimi_k2", 'a<|tool_calls_section_begin|> b <|tool_call_begin|>a.b:12 <|tool_call_argument_begin|> {"text": '
         '"<|tool_call_end|>"} <|tool_call_end|> c <|tool_calls_section_end|>d', "ad",
         [ParsedCall("a.b", {"text": "<|tool_call_end|>"})]),
        ("kimi_k2", "a<|tool_calls_section_begin|>\n<|tool_calls_section_end|>", "a", []),
        ("kimi_k3", "<|open|>response<|sep|>a<|close|>response<|sep|><|close|>message<|sep|>", "a", []),
        ("kimi_k3", '<|open|>call index="1" tool="a&amp;quot;b"<|sep|>\n<|open|>argument key="&quot;" type="string"<|sep|>'
         '<|close|>argument<|sep|> "<|close|>argument<|sep|>\n<|close|>call<|sep|>', "",
         [ParsedCall("a&quot;b", {'"': '<|close|>argument<|sep|> "'})]),
        ("gpt_oss", "plain", "plain", []),
        ("gpt_oss", "<|channel|>analysis<|message|>hm to=functions.f<|end|><|start|>assistant<|channel|>final"
         "<|message|>four", "four", []),
        ("gpt_oss", '<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>commentary '
         'json<|message|>{"text": "ls"}', "hm", [LS]),
        ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"text": "ls"}<|call|>', "", [LS]),
    ],
)  # fmt: skip
def test_well_formed_turns(family: str, text: str, said: str, calls: list[ParsedCall]) -> None:
    parsed = parser(family).parse(text)
    assert list(parsed.calls) == calls
    assert parsed.text == said


@pytest.mark.parametrize(
    ("family", "text", "says"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not a JSON number"),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"text": "ls"}}</tool_call>',
         "'arguments' is missing, and 'parameters' is unknown"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "args": {"text": "ls"}, "id": "a"}]',
         "'arguments' is missing, and 'args' is unknown"),
        ("qwen_coder", "<tool_call>f()</tool_call>", "expected <function=NAME>"),
        ("qwen_coder", "<tool_call><function=></function></tool_call>", "must name a tool"),
        ("qwen_coder", "<tool_call><function=f><parameter=text>ls</function></tool_call>", "'text' is missing"),
        ("qwen_coder", "<tool_call><function=f><parameter=text>ls", "'text' is missing"),
        ("qwen_coder", "<tool_call><function=f>ls</function></tool_call>", "expected <parameter=NAME>"),
        ("qwen_coder", "<tool_call><function=f></function> and", "</tool_call> is missing"),
        ("qwen_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"
         "</tool_call>", "'a' is given twice"),
        ("llama3_json", "<|python_tag|>import os", "not JSON: Expecting value at character 0"),
        ("llama3_json", '{"name": "f", "parameters": {"text": "ls"', "not JSON"),
        ("llama3_json", '{"name": "f"}', "'parameters' is missing"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', "'parameters' must be a JSON object"),
        ("pythonic", "[f('ls')]", "an argument by name (name=value)"),
        ("pythonic", "[f(text=open('x'))]", "expected a literal value"),
        ("pythonic", "[f(text='ls', text='x')]", "'text' is given twice"),
        ("pythonic", "[f(text='ls)]", "a string is not closed"),
        ("pythonic", "[f(text=" + "[" * 200 + "]" * 200 + ")]", "nests deeper than"),
        ("pythonic", "[f(count=" + "9" * 9000 + ")]", "a number is too long"),
        ("pythonic", "<|python_start|>{}", "expected the name of a tool"),
        ("mistral", "[TOOL_CALLS]ls -l", "expected a JSON list"),
        ("mistral", "[TOOL_CALLS][]", "the list of calls is empty"),
        ("mistral", '[TOOL_CALLS][{"arguments": {}}]', "'name' must be"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "not JSON"),
        ("deepseek", R1 + "function<｜tool▁sep｜>f\n```json\n{}\n```", "<｜tool▁call▁end｜> is missing"),
        ("deepseek", R1 + "f\n{}<｜tool▁call▁end｜>", "name and <｜tool▁sep｜>"),
        ("deepseek", R1 + "function<｜tool▁sep｜>f\n{}\n```<｜tool▁call▁end｜>", "code block"),
        ("deepseek_dsml", "<｜DSML｜tool_calls>f()</｜DSML｜tool_calls>", 'expected <｜DSML｜invoke name="NAME">'),
        ("deepseek_dsml", DSML + 'ls</｜DSML｜invoke></｜DSML｜tool_calls>', "of parameter 'text' is missing"),
        ("deepseek_dsml", DSML + 'a\n<｜DSML｜parameter name="b" string="true">c</｜DSML｜parameter></｜DSML｜invoke>',
         "of parameter 'text' is missing"),
        ("deepseek_dsml", DSML + 'a</｜DSML｜parameter><｜DSML｜parameter name="text" string="true">b</｜DSML｜parameter>'
         '</｜DSML｜invoke></｜DSML｜tool_calls>', "'text' is given twice"),
        ("deepseek_dsml", DSML.replace("true", "false") + '1 2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
         "parameter 'text': not JSON: text after the value"),
        ("deepseek_dsml", '<｜DSML｜tool_calls><｜DSML｜invoke name="f">ls</｜DSML｜invoke></｜DSML｜tool_calls>',
         "expected <｜DSML｜parameter"),
        ("gemma4", "<|tool_call>f{}<tool_call|>", "expected call:NAME{"),
        ("gemma4", "<|tool_call>call:f{text:ls}<tool_call|>", "expected a literal value"),
        ("gemma4", '<|tool_call>call:f{text:"ls"}<tool_call|>', 'with <|"|> around a string'),
        ("gemma4", '<|tool_call>call:f{text:<|"|>ls}<tool_call|>', "a string has no closing"),
        ("gemma4", "<|tool_call>call:f{a:1 b:2}<tool_call|>", "expected ',' or '}'"),
        ("gemma4", "<|tool_call>call:f{a:1,a:2}<tool_call|>", "'a' is given twice"),
        ("gemma4", "<|tool_call>call:f{1}<tool_call|>", "expected KEY:VALUE"),
        ("gemma4", "<|tool_call>call:f{} and", "<tool_call|> is missing"),
        ("gemma4", "<|tool_call>call:f{a:" + "[" * 200 + "]" * 200 + "}<tool_call|>", "nests deeper than"),
        ("gemma4", "<|tool_call>call:f{a:" + "9" * 9000 + "}<tool_call|>", "a number is too long"),
        ("glm", '<tool_call>{"name": "f"}</tool_call>', "expected the tool's name"),
        ("glm", "<tool_call>f ls</tool_call>", "expected the tool's name"),
        ("glm", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", "expected <arg_key>NAME</arg_key><arg_value>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "</arg_value> of 'a' is missing"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
         "</arg_value> of 'a' is missing"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>"
         "</tool_call>", "'a' is given twice"),
        ("kimi_k2", "<|tool_calls_section_begin|>f", "expected <|tool_call_begin|>"),
        ("kimi_k2", K2 + "{}<|tool_call_end|><|tool_calls_section_end|>", "expected functions.NAME:NUMBER"),
        ("kimi_k2", K2 + "f:0<|tool_call_argument_begin|>ls<|tool_call_end|>", "not JSON"),
        ("kimi_k2", K2 + "f:0<|tool_call_argument_begin|>{} x<|tool_call_end|>", "<|tool_call_end|> is missing"),
        ("kimi_k2", K2 + ":0<|tool_call_argument_begin|>{}<|tool_call_end|>", "'name' must be"),
        ("kimi_k3", "<|open|>call <|sep|>", 'expected <|open|>call tool="NAME"'),
        ("kimi_k3", K3 + "ls<|close|>call<|sep|>", "of 'text' is missing"),
        ("kimi_k3", K3 + 'a<|open|>argument key="b" type="string"<|sep|>c<|close|>argument<|sep|><|close|>call<|sep|>',
         "of 'text' is missing"),
        ("kimi_k3", K3.replace("string", "number") + "ls<|close|>argument<|sep|><|close|>call<|sep|>",
         "argument 'text': not JSON"),
        ("kimi_k3", K3.replace(' key="text"', "") + "ls<|close|>argument<|sep|><|close|>call<|sep|>", "has no key"),
        ("kimi_k3", '<|open|>call tool="f"<|sep|>ls<|close|>call<|sep|>', "expected <|open|>argument"),
        ("qwen_coder", "<tool_call><function=f>\n<parameter=text>\nls\n<parameter=count>\n2\n</parameter>\n</function>"
         "</tool_call>", "'text' is missing"),
        ("gpt_oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>ls<|call|>", "not JSON"),
        ("gpt_oss", '<|channel|>commentary to=functions.f json{"text": "ls"}', "<|message|> is missing"),
        ("gpt_oss", "<|channel|>commentary to=functions.f json<|message|>{} x<|call|>", "text after the JSON"),
    ],
)  # fmt: skip
def test_malformed_calls_say_why(family: str, text: str, says: str) -> None:
    (only,) = parser(family).parse(text).calls
    assert only.error.startswith("malformed tool call")
    assert says in only.error


@pytest.mark.parametrize(
    "family",
    [
        "hermes",
        "qwen_coder",
        "llama3_json",
        "pythonic",
        "deepseek",
        "deepseek_dsml",
        "gemma4",
        "glm",
        "kimi_k2",
        "kimi_k3",
    ],
)
@pytest.mark.parametrize("opened", [True, False])
def test_calls_in_thoughts_are_no_calls(family: str, opened: bool) -> None:
    one = WRITERS[family]([("f", {"text": "no"})])
    broken = one[: len(one) // 2]
    marks = {
        "gemma4": ("<|channel>", "<channel|>"),
        "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    }
    opening, closing = marks.get(family, ("<think>", "</think>"))
    thought = (opening if opened else "") + f"maybe\n{one}\nor\n{broken}\n{closing}"
    parsed = parser(family).parse(f"{thought}\n{WRITERS[family]([('f', {'text': 'ls'})])}")
    assert list(parsed.calls) == [LS]
    assert parsed.text == thought


# -- any text at all ----------------------------------------------------------------------------------

PIECES = [
    *MARKS,
    *(
        "<parameter=text>",
        "<tool_call>{",
        "[TOOL_CALLS][",
        "[TOOL_CALLS]f",
        "[CALL_ID]",
        "[THINK]",
        "[/THINK]",
    ),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "```json"),
    *(
        "<｜DSML｜tool_calls>",
        DSML,
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "</｜DSML｜tool_calls>",
        "<｜DSML｜invoke name=",
    ),
    *(
        "<tool_call>f",
        "<arg_key>text</arg_key>",
        "<arg_value>",
        "<tool_call>f<arg_key>text</arg_key><arg_value>",
    ),
    *(
        K2,
        K2 + "f:0",
        K2 + "f:0<|tool_call_argument_begin|>{",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
    ),
    *(K3, "<|open|>call ", '<|open|>call a="', "<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|sep|>"),
    *("<|tool_call>call:f{", "<|tool_call>call:f{a:[", "{a:", '<|"|>', "<|channel>", "<channel|>"),
    *("<|start|>", "<|channel|>", "<|channel|>commentary to=functions.f<|message|>", "<|message|>", " to=f"),
    *(
        '\n{"name": "',
        '\n{"name":',
        "\n[f(",
        "\n[f(a=",
        "\n[f(a=" + 3 * "'",
        "(",
        ")",
        "1",
        "-",
        ",",
        "a",
        " ",
        "\0",
    ),
]


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=30)
@given(text=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=40).map("".join))
def test_any_text_parses(family: str, text: str) -> None:
    for item in clean_turn(parser(family).parse(text)).calls:
        assert item.error or item.name
        json.dumps(item.arguments, allow_nan=False).encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_megabyte_of_anything_is_read_in_linear_time(family: str) -> None:
    """The time limit of a test is the bound: one mark read quadratically takes many minutes."""
    reader = parser(family)
    size = 1 << 20
    for piece in PIECES:
        reader.parse(piece * (size // 8 // len(piece)))
    call = WRITERS[family]([("f", {"text": "ls"})])
    long = WRITERS[family]([("f", {"text": "x" * size})])
    assert reader.parse(long).calls == (ParsedCall("f", {"text": "x" * size}),)
    separator = "<|start|>assistant" if family == "gpt_oss" else "\n"
    assert len(reader.parse(separator.join([call] * 2000)).calls) == 2000


@pytest.mark.attack(
    "the policy offers itself a tool whose schema is none, so that reading its own call fails as if the "
    "backend had, and the rollout is tried again without a reward",
    boundary="sandbox",
    surface="calls of the gateway",
    stopped_by="where a schema is no JSON schema, the arguments are texts",
)
@pytest.mark.parametrize(
    "rule",
    [
        True,
        None,
        7,
        [],
        "x",
        {"type": [{}, "nope", None]},
        {"anyOf": 3},
        {"oneOf": [True, None, {"type": 1}]},
    ],
    ids=repr,
)
def test_a_schema_may_be_anything(rule: object) -> None:
    family = MODELS["qwen3_coder"]
    assert family.parser is not None
    for properties in ({"command": rule}, rule):
        made: Any = Registry().load(TOOL_PARSERS, family.parser)()
        made.configure(family.source, {"f": {"type": "object", "properties": properties}})
        (call,) = made.parse(family.turn("hi", [("f", {"command": "12"})], None)).calls
        assert (call.arguments, call.error) == ({"command": "12"}, None)


def test_numbers_that_json_cannot_write_become_text() -> None:
    (only,) = clean_turn(
        parser("hermes").parse(write_hermes([("f", {})]).replace("{}", '{"n": 1e999}'))
    ).calls
    assert only.arguments == {"n": "inf"}
    assert not math.isfinite(float(only.arguments["n"]))


# -- choosing by the template -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "gpt_oss"),
        ("{{ '<｜tool▁calls▁begin｜>' }} </think>", "deepseek"),
        ("{{ '<｜DSML｜tool_calls>' }} </think>", "deepseek_dsml"),
        ("{{ '<|tool_call>call:' }} {{ '<tool_call|>' }} {{ '<|channel>' }}", "gemma4"),
        ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value> </think>", "glm"),
        ("{{ '<|tool_calls_section_begin|>' }} </think>", "kimi_k2"),
        (
            "{% if tools -%}\n{{ '<|im_system|>tool_declare<|im_middle|>' -}}\n{{- tools | tojson -}}",
            "kimi_k2",
        ),
        ("{{ '<|open|>' }} {{ '<|close|>' }} {{ '<|sep|>' }}", "kimi_k3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>\\n<function=x>\\n<parameter=y>", "qwen_coder"),
        ("[func_name1(params_name1=params_value1)] <|python_start|>", "pythonic"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("""{{ '<tool_call>\\n{"name": <name>, "arguments": <object>}' }} </think>""", "hermes"),
        (r"""{{ "<tool_call>\n{\"name\": <name>, \"arguments\": <object>}" }}""", "hermes"),
        ("{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}", "hermes"),
    ],
)
async def test_a_template_names_its_parser(template: str, name: str) -> None:
    assert choose(template) == name
    used, parser = await AutoParser().for_model(ChatModel("m", Path(), template), SCHEMAS, Readers())
    assert used == name
    assert isinstance(parser, ToolCallParser)
    assert parser.parse(WRITERS[name]([("f", {"text": "ls"})])).calls == (LS,)


@pytest.mark.parametrize("template", ["", "{{ '<tool_call>' }}"])
def test_a_template_without_the_marks_of_a_format_names_none(template: str) -> None:
    assert choose(template) == ""


@pytest.mark.parametrize("family", [one for one in MODELS.values() if one.parser], ids=lambda one: one.name)
def test_whole_templates_name_their_parsers(family: Family) -> None:
    """A template may have none of the usual marks, as Llama's without the tools of Meta."""
    found = choose(family.source)
    assert Registry().load(TOOL_PARSERS, found) is Registry().load(TOOL_PARSERS, family.parser or "")


def test_every_family_is_installed() -> None:
    assert {*FAMILIES, "auto", "qwen3_coder", "llama4_pythonic"} <= set(installed(TOOL_PARSERS))
