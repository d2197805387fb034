"""Tools that agents offer to the model. Entry points of `rollyard.tools`."""

from rollyard_pipeline.tools.base import Tool, ToolContext, ToolResult

__all__ = ["Tool", "ToolContext", "ToolResult"]
