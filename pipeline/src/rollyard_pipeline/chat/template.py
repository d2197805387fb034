"""Chat templates: sandboxed jinja2 with the helper functions that models' templates expect."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollyard_pipeline.errors import TemplateError

_FAILURES: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# What is rendered to find out what a template shows.
_TOOL_NAME: Final = "probe_of_a_tool"
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}},
    },
}
_SYSTEM: Final = {"role": "system", "content": "probe_of_a_system_message"}
_USER: Final = {"role": "user", "content": "a"}
_ARGUMENTS: Final = {"a": "probe_of_an_argument"}
_RESULT: Final = {
    "role": "tool",
    "content": "probe_of_a_result",
    "name": _TOOL_NAME,
    "tool_call_id": "000000000",
}
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training. It is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a fast path to fields of messages, where a template spends most of its time."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which would reach the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled template.

    Args:
        source: The jinja2 text.
        variables: The variables that every rendering sees (`bos_token`, `eos_token`, …).

    Raises:
        TemplateError: The source has a syntax error.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template has a syntax error in line {error.lineno}: {error}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text, which ends where the assistant is to continue.

        `now` is the time that `strftime_now` formats. Pass the same time for a whole rollout, because a
        template that prints the date would otherwise rewrite history at midnight. `variables` are further
        variables of the template (`enable_thinking`). They take precedence over the tokenizer's own.

        Raises:
            TemplateError: The template refuses the conversation, or fails.
        """
        moment = now or datetime.now()
        clock: Callable[[str], str] = moment.strftime
        try:
            return self._template.render(
                {
                    **self._variables,
                    "documents": None,
                    **(variables or {}),
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                    "strftime_now": clock,
                }
            )
        except _FAILURES as error:
            raise TemplateError(f"the chat template refuses the conversation: {error}") from error

    @functools.cached_property
    def content_prefix(self) -> str:
        """Return what the template puts between the generation prompt and an assistant's content.

        It is usually empty. gpt-oss's template names a channel there, which the model samples by itself.
        """
        opening = [{"role": "user", "content": "a"}]
        conversation = [*opening, {"role": "assistant", "content": "probe"}, {"role": "user", "content": "b"}]
        now = datetime(2000, 1, 1)
        try:
            before, after = self.render(opening, now=now), self.render(conversation, now=now)
        except TemplateError:
            return ""
        prefix, probe, _ = after.removeprefix(before).partition("probe")
        return prefix if probe and after.startswith(before) else ""

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Return whether the model sees the tools that it is offered."""
        return any(
            _TOOL_NAME in self._probed(messages, tools=[_TOOL]) for messages in ([_USER], [_SYSTEM, _USER])
        )

    @functools.cached_property
    def shows_calls(self) -> bool:
        """Return whether the model sees its earlier calls and their results as such."""
        arguments: Any
        for arguments, content in itertools.product((_ARGUMENTS, json.dumps(_ARGUMENTS)), ("", None)):
            call = {"name": _TOOL_NAME, "arguments": arguments}
            calls = [{"type": "function", "id": "000000000", "function": call}]
            said = {"role": "assistant", "content": content, "tool_calls": calls}
            text = self._probed([_USER, said, _RESULT])
            if _ARGUMENTS["a"] in text and _RESULT["content"] in text:
                return True
        return False

    @functools.cached_property
    def takes_system(self) -> bool:
        """Return whether the model sees a system message."""
        return _SYSTEM["content"] in self._probed([_SYSTEM, _USER])

    def _probed(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return a rendering, or "" if the template refuses it."""
        try:
            return self.render(messages, tools=tools, now=datetime(2000, 1, 1))
        except TemplateError:
            return ""

    @functools.cached_property
    def has_late_system(self) -> bool:
        """Return whether the template shows a system message where it stands after other messages."""
        users = [{"role": "user", "content": name} for name in ("first", "latest")]
        messages = [users[0], {"role": "assistant", "content": "a"}, users[1]]
        try:
            text = self.render([*messages, {"role": "system", "content": "probe"}], now=datetime(2000, 1, 1))
        except TemplateError:
            return False
        return "probe" in text.partition("latest")[2]
