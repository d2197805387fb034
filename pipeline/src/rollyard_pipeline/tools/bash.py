"""The tool `bash {command}`, which gives each rollout one persistent shell."""

from __future__ import annotations

from typing import Any, ClassVar

from rollyard_sandbox.errors import CommandTooLarge

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
