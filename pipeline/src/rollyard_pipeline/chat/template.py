"""Chat templates: jinja2, sandboxed, with the helpers that models' templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollyard_pipeline.errors import TemplateError


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: marks assistant text for training; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which would reach the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled template.

    Args:
        source: the jinja2 text.
        variables: what every rendering sees (`bos_token`, `eos_token`, …).

    Raises:
        TemplateError: the source has a syntax error.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
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
    ) -> str:
        """The conversation as text, ending where the assistant goes on.

        `now` is what `strftime_now` formats; pass one moment per rollout, or a template
        that prints the date would rewrite history at midnight.

        Raises:
            TemplateError: the template refuses the conversation, or fails.
        """
        moment = now or datetime.now()
        clock: Callable[[str], str] = moment.strftime
        try:
            return self._template.render(
                **self._variables,
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=clock,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateError(f"the chat template refuses the conversation: {error}") from error
