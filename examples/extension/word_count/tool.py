"""The tool `words`."""

from typing import Any, ClassVar

from rollyard_pipeline.tools import Tool, ToolContext, ToolResult


class WordsTool(Tool):
    name = "words"
    description = "Count the words of a file."
    parameters: ClassVar = {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    }

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        command = ["wc", "-w", "--", arguments["path"]]
        return await ctx.ran(await ctx.sandbox.run(command, timeout=ctx.timeout))
