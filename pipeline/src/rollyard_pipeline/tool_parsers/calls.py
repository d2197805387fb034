"""What the parsers share: a pass over a turn's text, JSON within it, the form of a call, and errors."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NoReturn

from rollyard_crds.trajectory import MALFORMED_CALL

from rollyard_pipeline.errors import WorkerError
from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn, Schemas

NAME_LIMIT: Final = 128
"""The maximum length of a tool's name in characters."""
THINK: Final = ("<think>", "</think>")
_FIRST_WINDOW: Final = 4096  # characters
_CUT: Final = 64
"""The distance in characters within which an error may come from the cut at the end of a window.

The longest token is shorter.
"""
_SPACE: Final = re.compile(r"[ \t\r\n]*+")


class NotAValue(WorkerError, ValueError):
    """There is no JSON value, or no literal of the model's format, where one was expected.

    The message explains why, and `at` is the index in the text.
    """

    reason = "NotAValue"

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.at = at


def malformed(why: str, name: str = "") -> ParsedCall:
    """Return a call that cannot be run, with the message that the model sees."""
    return ParsedCall(name if len(name) <= NAME_LIMIT else "", error=f"{MALFORMED_CALL}{why}")


def skip_space(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is not JSON whitespace."""
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at `at`, after whitespace, and the index where it ends.

    Raw newlines in strings are accepted, because models write them. NaN and Infinity are not.

    Raises:
        NotAValue: There is no value, or it is nested too deeply.
    """
    start = skip_space(text, at)
    window = _FIRST_WINDOW
    while True:
        # Parsing the whole text would be slow, because an error counts the lines up to its position.
        piece = text[start : start + window]
        whole = start + window >= len(text)
        try:
            value, end = _DECODER.raw_decode(piece)
        except RecursionError as error:
            # The previous window was JSON up to its cut, so nothing in it is parsed again.
            read = 0 if window == _FIRST_WINDOW else window // 2 - _CUT
            raise NotAValue("not JSON: too deep", start + read) from error
        except json.JSONDecodeError as error:
            if whole or not (error.pos > window - _CUT or error.msg.startswith("Unterminated string")):
                why = f"not JSON: {error.msg} at character {error.pos}"
                raise NotAValue(why, start + error.pos) from error
        except ValueError as error:  # The number has too many digits, or is not JSON.
            raise NotAValue(f"not JSON: {error}", start) from error
        else:
            if whole or end < len(piece):
                return value, start + end
        window *= 2


def json_value(text: str) -> Any:
    """Return the JSON value that a text consists of, except for whitespace around it.

    Raises:
        NotAValue: The text is anything else.
    """
    value, end = json_at(text, 0)
    if skip_space(text, end) < len(text):
        raise NotAValue(f"not JSON: text after the value at character {end}", end)
    return value


def recover(resume: re.Pattern[str], text: str, at: int) -> int:
    """Return where to continue after a malformed call: at the end of the first match of `resume`, if any.

    The pattern matches the end of a call, and looks ahead to the beginning of another one or the end of the
    block.
    """
    mark = resume.search(text, at)
    return len(text) if mark is None else mark.end()


def named_call(value: object, keys: Sequence[str] = ("arguments",)) -> ParsedCall:
    """Return the call of an object with `name` and arguments (under the first of `keys` that it has).

    An object without arguments calls a tool that needs none, unless it has them under a name that is unknown.
    """
    if not isinstance(value, dict):
        return malformed(f"expected a JSON object with 'name' and '{keys[0]}'")
    key = next((key for key in keys if key in value), keys[0])
    call = call_of(value.get("name"), value.get(key, {}), key)
    unknown = sorted(value.keys() - {"name", "type", "id", key})
    if call.error is None and key not in value and unknown:
        return malformed(f"'{key}' is missing, and '{unknown[0]:.64}' is unknown", call.name)
    return call


def call_of(name: object, arguments: object, key: str = "arguments") -> ParsedCall:
    """Return a call if `name` is a tool's name and `arguments` is an object, else a malformed call."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LIMIT:
        return malformed("'name' must be the name of a tool")
    if isinstance(arguments, str):  # Some models quote the object a second time.
        try:
            arguments = json_value(arguments)
        except NotAValue:
            arguments = None
    if not isinstance(arguments, dict):
        return malformed(f"'{key}' must be a JSON object", name)
    return ParsedCall(name, arguments)


def _with_text(call: ParsedCall, text: str) -> ParsedCall:
    return call if call.error is None else replace(call, written=text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER: Final = json.JSONDecoder(strict=False, parse_constant=_no_constant)


class MarkedParser(ABC):
    """Parses turns in which calls stand between marks, in time linear in the text.

    A thought is the text between the thinking marks, or the text before a closing mark without an opening one
    (some templates open the thought in the prompt). Calls in thoughts do not count. A closing mark within a
    well-formed call is a part of its arguments.
    """

    opening: ClassVar[str]
    """The pattern for where calls begin."""
    thought: ClassVar[tuple[str, str]] = THINK
    """The opening and the closing mark of thoughts."""
    begins: ClassVar[tuple[str, ...]] = ()
    """Texts with one of which whatever is not part of a turn's text begins. It is empty if unknown."""

    def __init__(self) -> None:
        marks = "|".join(re.escape(mark) for mark in self.thought)
        self._marks = re.compile(f"(?P<thought>{marks})|(?:{self.opening})", re.MULTILINE)
        self._schemas: Schemas = {}

    @abstractmethod
    def read(self, text: str, mark: re.Match[str]) -> tuple[Sequence[ParsedCall], int]:
        """Return the calls that begin with a match of `opening`, and the index where they end.

        The index lies after the match. If there are no calls, the match was text after all.
        """

    def configure(self, template: str, schemas: Schemas) -> None:
        """Store the schemas, which determine the types of values that are written as plain text."""
        self._schemas = schemas

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them, thoughts included."""
        opened, closed = self.thought
        outside: list[str] = []
        calls: list[ParsedCall] = []
        at = thoughts_end = 0
        while (mark := self._marks.search(text, at)) is not None:
            if mark["thought"] == opened:
                end = text.find(closed, mark.end())
                if end < 0:
                    break
                end += len(closed)
                outside.append(text[at:end])
                at = end
                continue
            parsed: Sequence[ParsedCall] = ()
            thought, end = mark.start() if mark["thought"] else -1, mark.end()
            if not mark["thought"]:
                parsed, end = self.read(text, mark)
                if any(call.error for call in parsed):
                    # The last mark is used, so no part of the text is read more than twice.
                    thought = text.rfind(closed, mark.end(), end)
            if thought >= 0:  # What looked like calls before was a part of the thought that ends here.
                calls.clear()
                outside.clear()
                end = thoughts_end = thought + len(closed)
            else:
                calls += (_with_text(call, text[mark.start() : end]) for call in parsed)
                outside.append(text[at : mark.start() if parsed else end])
            at = end
        outside.append(text[at:])
        return ParsedTurn((text[:thoughts_end] + "".join(outside)).strip(), tuple(calls))

    def unframed(self, parsed: ParsedTurn, frame: re.Pattern[str]) -> ParsedTurn:
        """Return a turn without the marks of a format in its text, except for those in a thought."""
        thought, mark, answer = parsed.text.rpartition(self.thought[1])
        return ParsedTurn((thought + mark + frame.sub("", answer)).strip(), parsed.calls)
