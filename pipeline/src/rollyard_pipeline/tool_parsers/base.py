"""The result of a tool-call parser, and the configuration of a parser before its first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each offered tool's arguments (an object with `properties`), by the tool's name."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call. If `error` is set, the call is malformed, and the model sees the error."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    written: str = field(default="", compare=False, repr=False)
    """The text of a malformed call, or of the group of calls with it. It is empty if the parser has none."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """An assistant turn's text outside its calls, and the calls in order."""

    text: str
    calls: tuple[ParsedCall, ...] = ()
    thought: str = ""
    """The thought that the parser has taken out of `text`. Most parsers leave it there."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What a parser may depend on."""

    name: str
    """The name of the model, as its pool has it."""
    tokenizer: Path
    """The folder of its tokenizer."""
    template: str
    """The jinja2 source of its chat template."""


@runtime_checkable
class ToolCallParser(Protocol):
    """Parses a turn's text. Malformed calls become `ParsedCall.error`, never an exception."""

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls of one turn, and its text without them."""
        ...


@runtime_checkable
class ConfigurableParser(Protocol):
    """A parser that depends on the model's chat template or the offered tools. The method is optional."""

    def configure(self, template: str, schemas: Schemas) -> None:
        """Configure the parser with the template's jinja2 source and the tools' schemas.

        This is called once, before the first `parse`.
        """
        ...


@runtime_checkable
class ExplainingParser(Protocol):
    """A parser that can explain its format to a model whose chat template knows no tools.

    The methods are optional. Without them, the parser fits only templates that know tools.
    """

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return what the system message says of the tools and of the format of calls.

        Args:
            tools: The offered tools, in OpenAI's form (`{"type": "function", "function": {…}}`).
        """
        ...

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls of one turn as the model would write them. `parse` reads the same calls."""
        ...


class TokenParser(Protocol):
    """Parses a turn's token ids instead of its text."""

    async def parse_ids(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedTurn | None:
        """Return the calls of one turn and its text without them, or None if it has no call.

        Args:
            ids: The sampled ids, with the end-of-turn token.
            prompt_ids: The ids after which they were sampled.
        """
        ...
