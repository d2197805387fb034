"""The tools `bash {command}`, `ipython {code}` and `submit {answer}`; `edit` has a module of its own."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from rollyard_sandbox.errors import CommandTooLarge, IPythonUnavailable

from rollyard_pipeline.tools.base import Tool, ToolContext, ToolResult, refusal


class BashTool(Tool):
    """Runs a command in the rollout's shell. Variables and the working folder persist between calls."""

    name = "bash"
    description = "Run a command in a persistent bash session and get its output."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command to run."}},
        "required": ["command"],
    }

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Run the command in the rollout's shell and show its output."""
        try:
            result = await ctx.sandbox.bash(
                arguments["command"], timeout=ctx.timeout, max_output=ctx.max_output_bytes
            )
        except CommandTooLarge as error:
            return refusal(str(error))
        return await ctx.ran(result)


class IPythonTool(Tool):
    """Runs code in the rollout's kernel. Names persist between calls."""

    name = "ipython"
    description = "Run Python code in a persistent IPython session and get its output."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
    }

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Run the code in the rollout's IPython kernel and show its output."""
        try:
            result = await ctx.sandbox.ipython(
                arguments["code"], timeout=ctx.timeout, max_output=ctx.max_output_bytes
            )
        except (CommandTooLarge, IPythonUnavailable) as error:
            return refusal(str(error))
        return await ctx.ran(result)


_MAX_ANSWER_BYTES: Final = 64 * 1024  # An environment variable of the test script must be able to hold it.


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
