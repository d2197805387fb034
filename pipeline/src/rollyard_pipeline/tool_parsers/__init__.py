"""Tool-call parsers: what calls a model's text makes. Entry points of `rollyard.tool_parsers`."""

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn, ToolCallParser

__all__ = ["ParsedCall", "ParsedTurn", "ToolCallParser"]
