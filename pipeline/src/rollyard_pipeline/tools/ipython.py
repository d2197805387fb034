"""The tool `ipython {code}`, which gives each rollout one persistent IPython kernel."""

from __future__ import annotations

from typing import Any, ClassVar

from rollyard_sandbox.errors import CommandTooLarge, IPythonUnavailable

from rollyard_pipeline.tools.base import Tool, ToolContext, ToolResult, refusal


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
