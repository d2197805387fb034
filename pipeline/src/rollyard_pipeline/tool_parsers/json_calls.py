"""The parsers of formats in which the arguments of a call are JSON.

A value may contain a closing mark as text, so the JSON itself determines where it ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers.calls import (
    NAME_LIMIT,
    MarkedParser,
    NotAValue,
    call_of,
    json_at,
    malformed,
    named_call,
    recover,
    skip_space,
)
from rollyard_pipeline.tool_parsers.instructions import (
    DEEPSEEK,
    HERMES,
    LLAMA_JSON,
    MISTRAL,
    Tools,
    described,
    json_text,
)


def _object(call: ParsedCall, key: str) -> str:
    """Return a call as a JSON object that has its arguments under `key`."""
    return json_text({"name": call.name, key: call.arguments})


class HermesParser(MarkedParser):
    """Finds the calls of Qwen and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    opening = "<tool_call>"
    begins = (opening,)
    _CLOSE: Final = "</tool_call>"

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the call that begins with `mark`, and the index after it."""
        problem = f"text between the JSON and {self._CLOSE}"
        after = mark.end()
        try:
            value, end = json_at(text, after)
            after = skip_space(text, end)
            if text.startswith(self._CLOSE, after):
                return [named_call(value)], after + len(self._CLOSE)
        except NotAValue as error:
            problem = str(error)
        closed = text.find(self._CLOSE, after)
        if closed < 0:
            return [malformed(f"{self._CLOSE} is missing")], len(text)
        return [malformed(problem)], closed + len(self._CLOSE)

    def instructions(self, tools: Tools) -> str:
        """Return what the system message says of the tools and the format, in Qwen's words."""
        return described(HERMES, tools)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls of one turn as the model would write them."""
        return "\n".join(f"{self.opening}\n{_object(call, 'arguments')}\n{self._CLOSE}" for call in calls)


class LlamaJsonParser(MarkedParser):
    """Finds Llama 3's calls: `<|python_tag|>{"name": …, "parameters": {…}}`, several separated by `;`.

    The mark is optional (Llama 3.2 omits it; Llama 4 writes `<|python_start|>`). Without it, an object is a
    call only if it begins a line and has a name and parameters. Any other object is an answer in JSON.
    """

    opening = (
        r"(?P<mark><\|python_(?:tag|start)\|>)"
        r'|^[ \t]*(?=\{\s*"(?:name|type|function|parameters|arguments)"\s*:)'
    )
    begins = ("<|python_", "{")
    _KEYS: Final = ("parameters", "arguments")
    _END: Final = re.compile(r"\s*(?:<\|python_end\|>|<\|eom_id\|>|<\|eot_id\|>)")
    _NEXT: Final = re.compile(r"\s*;\s*(?=\{)")

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the calls that begin with `mark`, and the index after them."""
        calls: list[ParsedCall] = []
        at = mark.end()
        marked = mark["mark"] is not None
        while True:
            call, at = self._call(text, at, marked=marked or bool(calls))
            if call is None:
                return calls, at
            calls.append(call)
            following = self._NEXT.match(text, at)
            if call.error is not None or following is None:
                break
            at = following.end()
        ended = self._END.match(text, at)
        return calls, ended.end() if ended is not None else at

    def _call(self, text: str, at: int, *, marked: bool) -> tuple[ParsedCall | None, int]:
        """Return the call at `at` and where it ends. The call is None if the object is text."""
        try:
            value, end = json_at(text, at)
        except NotAValue as error:
            line = text.find("\n", error.at)
            return malformed(str(error)), len(text) if line < 0 else line
        if not marked and (not isinstance(value, dict) or "name" not in value):
            return None, end
        if not marked and not any(key in value for key in self._KEYS):
            # An answer in JSON may have a name. An object that has only a name is a call without the rest.
            if set(value) - {"name", "type"}:
                return None, end
            return malformed("'parameters' is missing", str(value["name"])), end
        return named_call(value, self._KEYS), end

    def instructions(self, tools: Tools) -> str:
        """Return what the system message says of the tools and the format, in Llama 3.1's words."""
        return described(LLAMA_JSON, tools, "\n\n")

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls of one turn as the model would write them."""
        return "; ".join(_object(call, "parameters") for call in calls)


class MistralParser(MarkedParser):
    """Finds Mistral's calls: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or a newer form.

    Since the tokenizers of version 11 it is `[TOOL_CALLS]name[ARGS]{…}`, once for each call (`[CALL_ID]…` may
    precede `[ARGS]`). The text of `[THINK]…[/THINK]` is a thought.
    """

    opening = r"\[TOOL_CALLS\]"
    thought = ("[THINK]", "[/THINK]")
    begins = ("[TOOL_CALLS]",)
    _HEAD: Final = re.compile(
        rf"\s*+(?P<name>[\w.:/-]{{1,{NAME_LIMIT}}}+)\s*+"
        r"(?:\[CALL_ID\]\s*+\w{0,64}+\s*+)?(?:\[ARGS\]|(?=\{))"
    )

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the calls that begin with `mark`, and the index after them."""
        start = skip_space(text, mark.end())
        is_json = text[start : start + 1] in ("[", "{")
        head = None if is_json else self._HEAD.match(text, start)
        try:
            if head is not None:
                arguments, end = json_at(text, head.end())
                return [call_of(head["name"], arguments)], end
            if not is_json:
                raise NotAValue("expected a JSON list of calls, or name[ARGS]{…}", start)
            value, end = json_at(text, start)
        except NotAValue as error:
            following = text.find(mark[0], max(error.at, mark.end()))
            call = malformed(str(error), head["name"] if head is not None else "")
            return [call], len(text) if following < 0 else following
        items = value if isinstance(value, list) else [value]
        if not items:
            return [malformed("the list of calls is empty")], end
        return [named_call(item) for item in items], end

    def instructions(self, tools: Tools) -> str:
        """Return what the system message says of the tools and the format."""
        return described(MISTRAL, tools, ", ")

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls of one turn as the model would write them, in the older form."""
        return f"[TOOL_CALLS][{', '.join(_object(call, 'arguments') for call in calls)}]"


class DeepSeekParser(MarkedParser):
    """Finds DeepSeek's calls, one or more between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

    R1 and V3 write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a JSON code block and
    `<｜tool▁call▁end｜>`; V3.1 writes `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
    """

    opening = "<｜tool▁call▁begin｜>"
    begins = ("<｜",)
    _SEPARATOR: Final = "<｜tool▁sep｜>"
    _END: Final = "<｜tool▁call▁end｜>"
    _HEAD: Final = re.compile(
        rf"\s*+(?P<first>[^<\n]{{0,{NAME_LIMIT}}}+){_SEPARATOR}"
        rf"(?:\s*+(?P<second>[^\s`{{<][^\n`{{<]{{0,{NAME_LIMIT}}}+))?\s*+(?P<fence>```(?:json)?)?"
    )
    _TAIL: Final = re.compile(rf"\s*+(?P<fence>```)?\s*+{_END}")
    _RESUME: Final = re.compile(f"{_END}|(?={opening})")
    _FRAME: Final = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>|<｜end▁of▁sentence｜>")

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        parsed = super().parse(text)
        return self.unframed(parsed, self._FRAME) if parsed.calls else parsed

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the call that begins with `mark`, and the index after it."""
        head = self._HEAD.match(text, mark.end())
        if head is None:
            problem = f"expected the tool's name and {self._SEPARATOR}"
            return [malformed(problem)], recover(self._RESUME, text, mark.end())
        # V3.1 has the name before the separator. The others have 'function' there and the name after it.
        name = (head["second"] or head["first"]).strip()
        try:
            value, end = json_at(text, head.end())
        except NotAValue as error:
            return [malformed(str(error), name)], recover(self._RESUME, text, mark.end())
        tail = self._TAIL.match(text, end)
        if tail is None:
            problem = f"{self._END} is missing after the JSON"
            return [malformed(problem, name)], recover(self._RESUME, text, end)
        if (tail["fence"] is None) != (head["fence"] is None):
            return [malformed("the JSON's code block is not opened or not closed", name)], tail.end()
        return [call_of(name, value)], tail.end()

    def instructions(self, tools: Tools) -> str:
        """Return what the system message says of the tools and the format, in V3.1's words."""
        return described(DEEPSEEK, tools, "\n\n")

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls of one turn as V3.1 would write them."""
        each = (
            f"{self.opening}{call.name}{self._SEPARATOR}{json_text(call.arguments)}{self._END}"
            for call in calls
        )
        return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


class KimiParser(MarkedParser):
    """Finds Kimi K2's calls, in one section of a turn. Text in the section outside calls is dropped.

        <|tool_calls_section_begin|>
        <|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls -l"}<|tool_call_end|>
        <|tool_calls_section_end|>

    The name of the tool stands in the call's id, between `functions.` and the number of the call.
    """

    opening = r"<\|tool_calls_section_begin\|>"
    begins = ("<|tool_calls_section_begin|>",)
    _BEGIN: Final = "<|tool_call_begin|>"
    _ARGUMENTS: Final = "<|tool_call_argument_begin|>"
    _END: Final = "<|tool_call_end|>"
    _NEXT: Final = re.compile(rf"{re.escape(_BEGIN)}|(?P<ends><\|tool_calls_section_end\|>)")
    _HEAD: Final = re.compile(rf"\s*+(?P<id>[^\s<]{{1,{NAME_LIMIT + 32}}}+)\s*+{re.escape(_ARGUMENTS)}")
    _ID: Final = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d++)?")
    _RESUME: Final = re.compile(rf"{re.escape(_END)}|(?={_NEXT.pattern})")
    _EMPTY: Final = re.compile(rf"{opening}\s*+<\|tool_calls_section_end\|>")

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        return self.unframed(super().parse(text), self._EMPTY)

    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the calls of the section that begins with `mark`, and the index after it."""
        calls: list[ParsedCall] = []
        at = mark.end()
        while (following := self._NEXT.search(text, at)) is not None:
            if following["ends"]:
                return calls, following.end()
            call, at = self._call(text, following.end())
            calls.append(call)
        return calls or [malformed(f"expected {self._BEGIN} after {mark[0]}")], len(text)

    def _call(self, text: str, at: int) -> tuple[ParsedCall, int]:
        """Return the call whose id begins at `at`, and the index after it."""
        head = self._HEAD.match(text, at)
        if head is None:
            problem = f"expected functions.NAME:NUMBER and {self._ARGUMENTS}"
            return malformed(problem), recover(self._RESUME, text, at)
        match = self._ID.fullmatch(head["id"])
        name = match["name"] if match is not None else ""
        try:
            value, end = json_at(text, head.end())
        except NotAValue as error:
            return malformed(str(error), name), recover(self._RESUME, text, head.end())
        after = skip_space(text, end)
        if not text.startswith(self._END, after):
            problem = f"{self._END} is missing after the JSON"
            return malformed(problem, name), recover(self._RESUME, text, end)
        return call_of(name, value), after + len(self._END)


class GptOssParser:
    """Parses the harmony format of gpt-oss: a turn is one or more messages, each with a channel.

        <|channel|>analysis<|message|>…<|end|>
        <|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{…}<|call|>

    A call is a message with a recipient (`to=`), which may precede or follow the channel. The last message's
    ending mark is the turn's end-of-turn token and is not in its text. Calls in the text of the channel
    `analysis` do not count.
    """

    _START: Final = "<|start|>"
    _MESSAGE: Final = "<|message|>"
    _HEADER_END: Final = re.compile(r"<\|(?:message|start|end|call|return)\|>")
    _ENDS: Final = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
    _CHANNEL: Final = re.compile(r"<\|channel\|>\s*(?P<name>\w+)")
    _RECIPIENT: Final = re.compile(r"(?:^|\s|(?<=\|>))to=(?P<name>[^\s<]+)")
    _MARK: Final = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
    _HEADER_LIMIT: Final = 1024  # characters
    _PEOPLE: Final = frozenset({"assistant", "user", "all"})
    """Recipients that are not tools."""

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        if self._MARK.search(text) is None:
            return ParsedTurn(text.strip())
        contents: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
        calls: list[ParsedCall] = []
        at = 0
        while at < len(text):
            at = self._message(text, at, contents, calls)
        # A template shows the thought before a call, but no thought before an answer.
        channels = ("analysis", "commentary", "final") if calls else ("commentary", "final")
        parts = [part.strip() for channel in channels for part in contents[channel]]
        return ParsedTurn("\n\n".join(part for part in parts if part), tuple(calls))

    def _message(self, text: str, at: int, contents: dict[str, list[str]], calls: list[ParsedCall]) -> int:
        """Read the message at `at` into `contents` or `calls`, and return the index after it."""
        if text.startswith(self._START, at):
            at += len(self._START)
        mark = self._HEADER_END.search(text, at)
        header = text[at : mark.start() if mark is not None else len(text)]
        recipient = self._RECIPIENT.search(header[: self._HEADER_LIMIT])
        name = recipient["name"].removeprefix("functions.") if recipient is not None else None
        if recipient is not None and recipient["name"] in self._PEOPLE:
            name = None
        if mark is None or mark[0] != self._MESSAGE:
            if name is not None and "<|channel|>" in header:
                calls.append(malformed(f"{self._MESSAGE} is missing before the arguments", name))
            else:
                contents["final"].append(self._MARK.sub("", header))
            if mark is None:
                return len(text)
            return mark.start() if mark[0] == self._START else mark.end()
        if name is not None:
            return self._call(text, mark.end(), name, calls)
        channel = self._CHANNEL.search(header[: self._HEADER_LIMIT])
        end = self._ENDS.search(text, mark.end())
        content = text[mark.end() : end.start() if end is not None else len(text)]
        contents.get(channel["name"] if channel is not None else "", contents["final"]).append(content)
        return end.end() if end is not None else len(text)

    def _call(self, text: str, at: int, name: str, calls: list[ParsedCall]) -> int:
        """Read the call of `name` whose arguments begin at `at`, and return the index after its message."""
        if not 1 <= len(name) <= NAME_LIMIT:
            call, after = malformed("'to=' must name a tool: to=functions.NAME"), at
        else:
            try:
                value, after = json_at(text, at)
                call = call_of(name, value)
            except NotAValue as error:
                call, after = malformed(str(error), name), at
        end = self._ENDS.search(text, after)
        stop = end.start() if end is not None else len(text)
        if call.error is None and skip_space(text, after) < stop:
            call = malformed("text after the JSON of the arguments", name)
        calls.append(call)
        return end.end() if end is not None else len(text)
