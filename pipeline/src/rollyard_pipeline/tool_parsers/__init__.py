"""Tool-call parsers, which find the calls in a model's text. Entry points of `rollyard.tool_parsers`."""

from rollyard_pipeline.tool_parsers.base import ConfigurableParser, ParsedCall, ParsedTurn, ToolCallParser

__all__ = ["ConfigurableParser", "ParsedCall", "ParsedTurn", "ToolCallParser"]
