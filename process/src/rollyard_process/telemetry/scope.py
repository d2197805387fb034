"""The rollout that the current task works on, for log lines and spans.

It is a context variable: each task of asyncio has its own value, and inherits that of the task that made it.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field

from rollyard_process.telemetry.identity import span_id, stage_span_id, trace_id, traceparent
from rollyard_process.telemetry.spans import SpanSink, TraceSpan, Value


@dataclass(slots=True, eq=False)
class RolloutScope:
    """One rollout under one lease, and where its spans go."""

    namespace: str
    job: str
    rollout: str
    stage: str
    token: int
    """The fencing token of the lease."""
    attempt: int
    """The number of failures so far in this stage."""
    sink: SpanSink | None = None
    """Where spans go. It is None if nothing is traced, or this rollout is not sampled."""
    trace: str = field(init=False)
    span: str = field(init=False)
    """The id of the span of the stage. The control plane sends this span when the stage has ended."""
    _children: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.trace = trace_id(self.rollout)
        self.span = stage_span_id(self.rollout, self.stage, self.token)

    def child(self) -> str:
        """Return an id for a further span below the stage, which no other span has."""
        self._children += 1
        return span_id(self.span, str(self._children))

    def below(self, span: str) -> RolloutScope:
        """Return a scope of the same rollout whose further spans are children of the span `span`."""
        scope = copy.copy(self)
        scope.span, scope._children = span, 0
        return scope

    def traceparent(self, span: str) -> str:
        """Return the header `traceparent` of requests within a span of this rollout."""
        return traceparent(self.trace, span, self.sink is not None)

    def add(
        self,
        name: str,
        seconds: float,
        attributes: Mapping[str, Value],
        *,
        id: str | None = None,
        parent: str | None = None,
        ago: float = 0.0,
        client: bool = False,
        error: str = "",
    ) -> None:
        """Add a span that has ended, if the rollout is traced.

        Args:
            name: The name of the span.
            seconds: How long it took, in seconds.
            attributes: The attributes of the span.
            id: The id of the span; the default is that of a further child.
            parent: The id of its parent; the default is that of the stage.
            ago: How long ago it ended, in seconds.
            client: Whether it is a request to another server.
            error: The type of its error, or "".
        """
        if self.sink is None:
            return
        end = time.time() - ago
        self.sink.add(
            TraceSpan(
                trace=self.trace,
                id=self.child() if id is None else id,
                parent=self.span if parent is None else parent,
                name=name,
                start=end - max(0.0, seconds),
                end=end,
                attributes=attributes,
                client=client,
                error=error,
            )
        )


_CURRENT: ContextVar[RolloutScope | None] = ContextVar("rollyard_rollout", default=None)


def current() -> RolloutScope | None:
    """Return the rollout that the current task works on, or None."""
    return _CURRENT.get()


def outside() -> Context:
    """Return a copy of the current context without a rollout, for a task that outlives the rollout's."""
    context = copy_context()
    context.run(_CURRENT.set, None)
    return context


@contextlib.contextmanager
def entered(scope: RolloutScope | None) -> Iterator[None]:
    """Make a rollout the current one within the block."""
    before = _CURRENT.set(scope)
    try:
        yield
    finally:
        _CURRENT.reset(before)
