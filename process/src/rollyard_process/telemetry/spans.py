"""Spans as every process makes them, before an exporter converts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

Value = str | int | float | bool | tuple[str, ...]
"""The value of an attribute."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One operation of a rollout, which has ended."""

    trace: str
    """The id of the trace: 32 hexadecimal digits."""
    id: str
    """The id of the span: 16 hexadecimal digits."""
    parent: str
    """The id of the parent, or "" for the root of a trace."""
    name: str
    start: float
    """When it began, in seconds since the epoch."""
    end: float
    """When it ended, in seconds since the epoch."""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    client: bool = False
    """Whether it is a request to another server."""
    error: str = ""
    """The type or reason of the error with which it ended, or "" if it ended well."""


class SpanSink(Protocol):
    """A component that takes spans. It neither blocks nor fails."""

    def add(self, span: TraceSpan) -> None:
        """Take a span, or drop it and count it."""
