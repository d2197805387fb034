"""Tool-call parsers: what calls a model's text makes. Entry points of `rollyard.tool_parsers`."""

from rollyard_pipeline.tool_parsers.base import ConfigurableParser, ParsedCall, ParsedTurn, ToolCallParser

__all__ = ["ConfigurableParser", "ParsedCall", "ParsedTurn", "ToolCallParser"]
