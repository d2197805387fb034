"""What a tool-call parser gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call; with `error` set it is malformed, and the error is what the model gets to see."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """An assistant turn's text outside its calls, and the calls in order."""

    text: str
    calls: tuple[ParsedCall, ...] = ()


class ToolCallParser(Protocol):
    """Reads a turn's text. Total: malformed calls become `ParsedCall.error`, never an exception."""

    def parse(self, text: str) -> ParsedTurn: ...
