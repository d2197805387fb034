"""The span of one tool call."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final

from rollyard_process.telemetry import conventions as names
from rollyard_process.telemetry.scope import current
from rollyard_process.telemetry.spans import Value

TOOL_ERROR: Final = "ToolError"
"""The error of a call whose observation is an error, such as one with malformed arguments."""


class ToolSpan:
    """A block that runs one tool call. Its span is added when the block ends.

    Nothing that the policy has written is part of the span: neither arguments nor output, nor the name of a
    tool that does not exist.

    Args:
        tool: The name of the tool, or "" if there is no such tool.
    """

    def __init__(self, tool: str) -> None:
        self._tool = tool or names.UNKNOWN_TOOL
        self._began = time.monotonic()
        self.seconds = 0.0
        """How long the call took, in seconds. It is valid after the block."""
        self.failed = False
        """Whether the observation is an error."""

    def __enter__(self) -> ToolSpan:
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.monotonic() - self._began
        scope = current()
        if scope is None or scope.sink is None:
            return
        failure = kind.__name__ if kind is not None else TOOL_ERROR if self.failed else ""
        attributes: dict[str, Value] = {
            names.OPERATION: names.EXECUTE_TOOL,
            names.CONVERSATION: scope.rollout,
            names.TOOL: self._tool,
        }
        if failure:
            attributes[names.ERROR_TYPE] = failure
        title = f"{names.EXECUTE_TOOL} {self._tool}"
        scope.add(title, self.seconds, attributes, error=failure)
