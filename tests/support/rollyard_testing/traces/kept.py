"""A sink of spans that keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollyard_process.telemetry.spans import TraceSpan


@dataclass(slots=True)
class Kept:
    """The spans that were added, in order."""

    spans: list[TraceSpan] = field(default_factory=list)

    def add(self, span: TraceSpan) -> None:
        """Keep a span."""
        self.spans.append(span)
