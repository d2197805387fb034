"""The tool `submit {answer}`, which ends the episode."""

from __future__ import annotations

from typing import Any, ClassVar

from rollyard_pipeline.tools.base import Tool, ToolContext, ToolResult, refusal

_MAX_ANSWER_BYTES = 64 * 1024  # An environment variable of the test script must be able to hold it.


class SubmitTool(Tool):
    """Submits the final answer. A shell test script reads it as `$ROLLYARD_ANSWER`."""

    name = "submit"
    description = "Submit the final answer and end the task."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final answer."}},
        "required": ["answer"],
    }
    needs_sandbox = False

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Submit the answer, which ends the episode."""
        answer: str = arguments["answer"]
        size = len(answer.encode(errors="replace"))
        if size > _MAX_ANSWER_BYTES:
            return refusal(f"the answer has {size} bytes, at most {_MAX_ANSWER_BYTES} are allowed")
        if "\0" in answer:
            return refusal("the answer holds a NUL character")
        return ToolResult("submitted", answer=answer)
