"""The parsers of formats in which the arguments of a call are elements, with an opening and a closing tag.

Values are not escaped, and all of their whitespace is data. A value therefore ends at the first closing tag
that is followed by another argument or by the end of the call, and it cannot contain a whole opening tag of
an argument: the closing tag before that one is missing, or the call is a draft in a thought.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import (
    NAME_LIMIT,
    THINK,
    MarkedParser,
    NotAValue,
    json_value,
    malformed,
    recover,
    skip_space,
)
from rollyard_pipeline.tool_parsers.instructions import GLM, QWEN_CODER, Tools, described, json_text
from rollyard_pipeline.tool_parsers.literal_calls import literal_at, skip_blank


class ElementParser(MarkedParser):
    """The base of these parsers, which reads the arguments of a call."""

    noun: ClassVar[str] = "argument"
    """What the format calls an argument, for messages."""
    unclosed: ClassVar[str]
    """The message for a value whose closing tag is missing, with `{}` for its key."""
    expected: ClassVar[str]
    """What stands within a call, for messages."""
    argument: ClassVar[re.Pattern[str]]
    """The opening tag of an argument, which may have a group `key`."""
    value_end: ClassVar[re.Pattern[str]]
    """The closing tag of an argument, or nothing where it is missing."""
    call_end: ClassVar[re.Pattern[str]]
    resume: ClassVar[re.Pattern[str]]
    """Where to continue after a malformed call: see `recover`."""
    resumes_always: ClassVar[bool] = False
    """Whether to continue there, instead of after the value, even if a value contains another argument."""

    def key(self, argument: re.Match[str]) -> str:
        """Return the key of an argument."""
        return argument["key"].strip()

    def value(self, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value of an argument of the tool `name`, which is written as `text`.

        The tool's JSON schema determines its type. Without a schema, or with one that says nothing of it, the
        value is a string.

        Raises:
            NotAValue: The text is not a value.
        """
        # Calls that the policy makes by itself may offer tools with any schema.
        properties = self._schemas.get(name, {}).get("properties")
        rule = properties.get(self.key(argument)) if isinstance(properties, dict) else None
        return typed(text, rule if isinstance(rule, dict) else {})

    def swallowed(self, text: str) -> bool:
        """Return whether the text of a value contains what should follow a value."""
        return self.argument.search(text) is not None

    def call(self, text: str, at: int, name: str) -> tuple[ParsedCall, int]:
        """Return the call of `name` whose arguments begin at `at`, and the index after it."""
        arguments: dict[str, Any] = {}
        while (argument := self.argument.match(text, skip_space(text, at))) is not None:
            key = self.key(argument)
            unclosed = self.unclosed.format(key)
            end = self.value_end.search(text, argument.end())
            if end is None:
                return malformed(unclosed, name), len(text)
            value, problem = text[argument.end() : end.start()], ""
            if not end[0]:
                problem = unclosed
            elif self.swallowed(value):
                if not self.resumes_always:
                    return malformed(unclosed, name), end.end()
                problem = unclosed
            elif key in arguments:
                problem = f"{self.noun} '{key}' is given twice"
            else:
                try:
                    arguments[key] = self.value(name, argument, value)
                except NotAValue as error:
                    problem = f"{self.noun} '{key}': {error}" if key else str(error)
            at = end.end()
            if problem:
                return malformed(problem, name), recover(self.resume, text, at)
        closed = self.call_end.match(text, at)
        if closed is None:
            return malformed(f"expected {self.expected}", name), recover(self.resume, text, at)
        return ParsedCall(name, arguments), closed.end()


class GlmParser(ElementParser):
    """Finds the calls of GLM 4.5 and later, which GLM 4.7 and 5 write without the newlines.

    <tool_call>bash
    <arg_key>command</arg_key>
    <arg_value>ls -l</arg_value>
    </tool_call>
    """

    opening = "<tool_call>"
    begins = (opening,)
    unclosed = "</arg_value> of '{}' is missing"
    expected = "<arg_key>NAME</arg_key><arg_value>VALUE</arg_value> or </tool_call>"
    argument = re.compile(r"<arg_key>(?P<key>[^<>\n]{1,256}+)</arg_key>\s*+<arg_value>")
    value_end = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>))")
    call_end = re.compile(r"\s*+</tool_call>")
    resume = re.compile("</tool_call>")
    _NAME: Final = re.compile(rf'\s*+(?P<name>[^\s<>{{}}"]{{1,{NAME_LIMIT}}}+)(?=\s*+<)')

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the call that begins with `mark`, and the index after it."""
        head = self._NAME.match(text, mark.end())
        if head is None:
            problem = f"expected the tool's name after {mark[0]}"
            return [malformed(problem)], recover(self.resume, text, mark.end())
        call, at = self.call(text, head.end(), head["name"])
        return [call], at

    def instructions(self, tools: Tools) -> str:
        """Return what the system message says of the tools and the format, in GLM's words."""
        return described(GLM, tools)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls of one turn as the model would write them."""

        def one(call: ParsedCall) -> str:
            arguments = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{_written(value)}</arg_value>\n"
                for key, value in call.arguments.items()
            )
            return f"<tool_call>{call.name}\n{arguments}</tool_call>"

        return "\n".join(map(one, calls))


class QwenCoderParser(ElementParser):
    """Finds the calls of Qwen3-coder and later Qwen models.

        <tool_call>
        <function=bash>
        <parameter=command>
        ls -l
        </parameter>
        </function>
        </tool_call>

    A call ends at `</function></tool_call>`. A value cannot contain `</think>` followed by `<function=`,
    which is a draft in a thought, nor `<parameter=KEY>` at the beginning of a line. One newline at the start
    of a value and one at its end belong to the template.
    """

    # The opening <tool_call> may be missing, because these models sometimes omit it.
    opening = r"<tool_call>|(?=<function=[^<>\n]{1,128}>\s*(?:<parameter=|</function>))"
    begins = ("<tool_call>", "<function=")
    noun = "parameter"
    unclosed = "</parameter> of '{}' is missing"
    expected = "<parameter=NAME> or </function>"
    argument = re.compile(r"\s*+<parameter=(?P<key>[^<>\n]++)>")
    value_end = re.compile(r"</parameter>(?=\s*+(?:<parameter=|</function>))|(?=</function>\s*+</tool_call>)")
    call_end = re.compile(r"\s*+</function>")
    resume = re.compile(r"</tool_call>|</function>(?:\s*+</tool_call>)?+")
    _FUNCTION: Final = re.compile(r"\s*+<function=(?P<name>[^<>\n]*+)>")
    _END: Final = re.compile(r"\s*+</tool_call>")
    _NEXT: Final = re.compile(r"^<parameter=[^<>\n]++>", re.MULTILINE)

    def value(self, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value without the newlines of the template, in the type that the schema names."""
        return super().value(name, argument, text.removeprefix("\n").removesuffix("\n"))

    def swallowed(self, text: str) -> bool:
        """Return whether a value contains the next parameter, or a call after a thought with this draft."""
        return "<function=" in text.partition(THINK[1])[2] or self._NEXT.search(text) is not None

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the call that begins with `mark`, and the index after it."""
        function = self._FUNCTION.match(text, mark.end())
        if function is None:
            problem = "expected <function=NAME> after <tool_call>"
            return [malformed(problem)], recover(self.resume, text, mark.end())
        name = function["name"].strip()
        if not 1 <= len(name) <= NAME_LIMIT:
            problem = "<function=NAME> must name a tool"
            return [malformed(problem)], recover(self.resume, text, function.end())
        call, at = self.call(text, function.end(), name)
        ended = self._END.match(text, at) if call.error is None else None
        if call.error is None and ended is None and mark[0]:
            return [malformed("</tool_call> is missing after </function>", name)], at
        return [call], at if ended is None else ended.end()

    def instructions(self, tools: Tools) -> str:
        """Return what the system message says of the tools and the format, in Qwen3-Coder's words."""
        return described(QWEN_CODER, tools)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls of one turn as the model would write them."""

        def one(call: ParsedCall) -> str:
            parameters = "".join(
                f"<parameter={key}>\n{_written(value)}\n</parameter>\n"
                for key, value in call.arguments.items()
            )
            return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"

        return "\n".join(map(one, calls))


class DsmlParser(ElementParser):
    """Finds DeepSeek's calls since V3.2, in elements whose names begin with `｜DSML｜`.

        <｜DSML｜tool_calls>
        <｜DSML｜invoke name="bash">
        <｜DSML｜parameter name="command" string="true">ls -l</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜tool_calls>

    V3.2 calls the outer element `function_calls`. V4.1 calls it `calls` and writes a space after `｜DSML｜`.
    With `string="true"`, a value is plain text. Otherwise it is JSON.
    """

    _TAG: Final = "<｜DSML｜ ?"
    _END_TAG: Final = "</｜DSML｜ ?"
    _BLOCK: Final = "(?:function_|tool_)?calls>"
    opening = f"{_TAG}{_BLOCK}"
    begins = ("<｜DSML｜",)
    noun = "parameter"
    unclosed = "the closing tag of parameter '{}' is missing"
    expected = '<｜DSML｜parameter name="NAME" string="true|false"> or </｜DSML｜invoke>'
    argument = re.compile(
        rf'{_TAG}parameter name="(?P<key>[^"\n]{{1,256}}+)" string="(?:(?P<string>true)|false)">'
    )
    value_end = re.compile(rf"{_END_TAG}parameter>(?=\s*+(?:{_TAG}parameter name=|{_END_TAG}invoke>))")
    call_end = re.compile(rf"\s*+{_END_TAG}invoke>")
    resume = re.compile(rf"{_END_TAG}invoke>|(?={_TAG}invoke |{_END_TAG}{_BLOCK})")
    resumes_always = True
    _INVOKE: Final = re.compile(
        rf'\s*+{_TAG}invoke name="(?P<name>[^"<>\n]{{1,{NAME_LIMIT}}}+)"\s*+(?:>|(?P<empty>/>))'
    )
    _BLOCK_END: Final = re.compile(rf"\s*+{_END_TAG}{_BLOCK}")
    _NEXT_BLOCK: Final = re.compile(f"{_END_TAG}{_BLOCK}|(?={_TAG}{_BLOCK})")

    def key(self, argument: re.Match[str]) -> str:
        """Return the key of an argument, as it is written."""
        return argument["key"]

    def value(self, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value as a string, or as the JSON that it is."""
        return text if argument["string"] else json_value(text)

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the calls of the block that begins with `mark`, and the index after it."""
        calls: list[ParsedCall] = []
        at = mark.end()
        while (invoke := self._INVOKE.match(text, at)) is not None:
            call, at = ParsedCall(invoke["name"]), invoke.end()
            if invoke["empty"] is None:
                call, at = self.call(text, at, invoke["name"])
            calls.append(call)
        ended = self._BLOCK_END.match(text, at)
        if ended is not None:
            return calls, ended.end()
        if not calls or skip_space(text, at) < len(text):
            calls.append(malformed('expected <｜DSML｜invoke name="NAME"> or the end of the calls'))
            at = recover(self._NEXT_BLOCK, text, at)
        return calls, at


class XtmlParser(ElementParser):
    """Finds the calls of Kimi K3, whose turns consist of elements. The text is everything except the calls.

        <|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>
        <|open|>call tool="bash" index="1"<|sep|>
        <|open|>argument key="command" type="string"<|sep|>ls -l<|close|>argument<|sep|>
        <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>

    A value of the type `string` is plain text. Other values are JSON.
    """

    _ATTRIBUTES: Final = r'(?P<attributes>(?:\s++\w{1,32}+="[^"]{0,512}+")*+)\s*+<\|sep\|>'
    opening = r"<\|open\|>call(?=\s)"
    begins = ("<|open|>", "<|close|>")
    thought = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    unclosed = "<|close|>argument<|sep|> of '{}' is missing"
    expected = '<|open|>argument key="NAME" type="TYPE"<|sep|> or <|close|>call<|sep|>'
    argument = re.compile(rf"<\|open\|>argument{_ATTRIBUTES}")
    value_end = re.compile(
        r"<\|close\|>argument<\|sep\|>(?=\s*+(?:<\|open\|>argument\s|<\|close\|>call<\|sep\|>))"
    )
    call_end = re.compile(r"\s*+<\|close\|>call<\|sep\|>")
    resume = re.compile(r"<\|close\|>call<\|sep\|>|(?=<\|open\|>call\s)")
    _HEAD: Final = re.compile(_ATTRIBUTES)
    _ATTRIBUTE: Final = re.compile(r'(?P<key>\w++)="(?P<value>[^"]*+)"')
    _FRAME: Final = re.compile(r"<\|(?:open|close)\|>(?:response|tools|message)(?: [^<\n]{0,256}+)?<\|sep\|>")

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        return self.unframed(super().parse(text), self._FRAME)

    def key(self, argument: re.Match[str]) -> str:
        """Return the key of an argument, or "" if it has none."""
        return self._attributes(argument).get("key", "")

    def value(self, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value as a string, or as the JSON that it is."""
        attributes = self._attributes(argument)
        if not attributes.get("key"):
            raise NotAValue('an argument has no key="NAME"', 0)
        return text if attributes.get("type") == "string" else json_value(text)

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the call that begins with `mark`, and the index after it."""
        head = self._HEAD.match(text, mark.end())
        name = self._attributes(head).get("tool", "") if head is not None else ""
        if head is None or not 1 <= len(name) <= NAME_LIMIT:
            problem = 'expected <|open|>call tool="NAME" index="NUMBER"<|sep|>'
            return [malformed(problem)], recover(self.resume, text, mark.end())
        call, at = self.call(text, head.end(), name)
        return [call], at

    def _attributes(self, tag: re.Match[str]) -> dict[str, str]:
        """Return the attributes of an opening tag, with `&quot;` and `&amp;` replaced."""
        return {
            attribute["key"]: attribute["value"].replace("&quot;", '"').replace("&amp;", "&")
            for attribute in self._ATTRIBUTE.finditer(tag["attributes"])
        }


def _written(value: Any) -> str:
    """Return a value as the formats write it that know its type from a schema."""
    return value if isinstance(value, str) else json_text(value)


def typed(value: str, rule: Mapping[str, Any]) -> Any:
    """Return `value` as a type that the JSON schema `rule` allows, or the text itself if none fits."""
    kinds = _kinds(rule)
    if not kinds or kinds == {"string"}:
        return value
    word = value.strip()
    if "null" in kinds and word.lower() in ("null", "none", ""):
        return None
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if kinds & {"integer", "number"} and (number := _number(word)) is not None:
        # 3.0 is an integer by the rules of JSON schema.
        if isinstance(number, int) or "number" in kinds:
            return number
        if number.is_integer():
            return int(number)
    if kinds & {"array", "object"}:
        structure = _structure(word)
        if (isinstance(structure, list) and "array" in kinds) or (
            isinstance(structure, dict) and "object" in kinds
        ):
            return structure
    return value


def _kinds(rule: Mapping[str, Any]) -> set[str]:
    kind = rule.get("type")
    kinds = {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
    for options in (rule.get("anyOf"), rule.get("oneOf")):
        for option in options if isinstance(options, list) else ():
            if isinstance(option, dict):
                kinds |= _kinds(option)
    return kinds


def _number(word: str) -> int | float | None:
    try:
        value = json_value(word)
    except NotAValue:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _structure(word: str) -> Any:
    """Return a list or an object that is written in JSON or in Python.

    Models write Python because they copy what templates print.
    """
    with suppress(NotAValue):
        return json_value(word)
    try:
        value, end = literal_at(word, 0)
    except NotAValue:
        return None
    return value if skip_blank(word, end) == len(word) else None
