"""The parser `renderers`, which reads a turn's token ids with the library of this name.

It knows formats for which there is no parser here, such as MiniMax M2's. Because it searches for marks by
their ids, a mark that ordinary tokens spell is text. It works in a process of its own (see
`renderers_process`), which is ended if a turn takes too long.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollyard_pipeline.child_processes import ChildProcesses
from rollyard_pipeline.errors import ChildTimeout, NoToolParser
from rollyard_pipeline.tool_parsers.base import ChatModel, ParsedCall, ParsedTurn, Schemas
from rollyard_pipeline.tool_parsers.calls import call_of, malformed

_SECONDS: Final = 10.0
"""The limit of one turn in seconds. Usual turns need a few milliseconds."""
_KEPT: Final = 4
"""The number of models whose processes a worker keeps. Each process needs about 90 MB."""
_PROMPT_IDS: Final = 1024
"""The ids at the end of a prompt that are sent. They show whether it has opened a thought."""

# The first row is taken whose mark occurs in the template's source.
_MARKS: Final = (
    ("<minimax:tool_call>", "minimax-m2"),
    ("<｜hy_Assistant", "hy3"),
    ("<|content_invoke_tool_json|>", "inkling"),
)
_PROBLEMS: Final[Mapping[str, str]] = {
    "invalid_json": "the arguments are not JSON",
    "unclosed_block": "its closing mark is missing",
    "missing_name": "it names no tool",
    "malformed_structure": "it lacks a part of the format",
}


class Readers:
    """The processes that read turns, which a worker keeps for the tokenizers and models that were used last.

    Args:
        seconds: The limit of one turn in seconds.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self.seconds = seconds
        self._children: dict[tuple[str, ...], ChildProcesses] = {}

    async def of(self, *arguments: str) -> ChildProcesses:
        """Return the processes with these arguments, which are started when they are needed."""
        children = self._children.pop(arguments, None)
        if children is None:
            children = ChildProcesses(
                "rollyard_pipeline.tool_parsers.renderers_process",
                *arguments,
                what="the reader of tool calls",
                failed="ToolParserFailed",
                timeout="ToolParserTimeout",
            )
        self._children[arguments] = children
        if len(self._children) > _KEPT:
            await self._children.pop(next(iter(self._children))).close()
        return children

    async def close(self) -> None:
        """End every process."""
        for children in self._children.values():
            await children.close()


def is_installed() -> bool:
    """Return whether the library is installed. It is not imported."""
    return importlib.util.find_spec("renderers") is not None


class RenderersParser:
    """The entry point `renderers`. `for_model` returns the parser."""

    async def for_model(self, model: ChatModel, schemas: Schemas, readers: Readers) -> tuple[str, TurnParser]:
        """Return the name of the library's renderer for a model, with its version, and the parser.

        Raises:
            NoToolParser: The library is not installed, or has no renderer for the model.
            ChildFailed: The process cannot be started.
        """
        if not is_installed():
            raise NoToolParser("the parser 'renderers' needs a library: pip install 'rollyard[renderers]'")
        of_template = next((name for mark, name in _MARKS if mark in model.template), "")
        children = await readers.of(str(model.tokenizer), model.name, of_template)
        about = await children.greeting()
        if "problem" in about:
            raise NoToolParser(
                f"the library renderers cannot read turns of '{model.name}': {about['problem']}"
            )
        if not about["renderer"]:
            raise NoToolParser(f"the library renderers has no renderer for '{model.name}'")
        used = f"renderers/{about['version']}:{about['renderer']}"
        return used, TurnParser(children, schemas, readers.seconds)


class TurnParser:
    """Parses turns of one rollout.

    Args:
        children: The processes that read them.
        schemas: The JSON schema of each offered tool's arguments.
        seconds: The limit of one turn in seconds.
    """

    def __init__(self, children: ChildProcesses, schemas: Schemas, seconds: float) -> None:
        self._children = children
        self._seconds = seconds
        self._tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in schemas.items()
        ]

    async def parse_ids(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedTurn | None:
        """Return the calls of a turn and its text without them, or None if it has no call.

        A turn that the library cannot read in time, or that ends its process, is one malformed call.

        Raises:
            ChildFailed: The processes cannot be started, or die whatever the turn is.
        """
        nothing = {"ids": [], "prompt_ids": [], "tools": self._tools}
        request = {**nothing, "ids": list(ids), "prompt_ids": list(prompt_ids[-_PROMPT_IDS:])}
        try:
            answer = await self._children.ask_or_blame(request, self._seconds, nothing)
        except ChildTimeout:
            answer = {"error": f"it cannot be read within {self._seconds:g} s"}
        if answer is None:
            answer = {"error": "it cannot be read"}
        if not answer:
            return None
        if "error" in answer:
            return ParsedTurn("", (malformed(str(answer["error"])),))
        return ParsedTurn(
            answer["text"].strip(), tuple(_call(call) for call in answer["calls"]), answer["thought"].strip()
        )


def _call(fields: Mapping[str, Any]) -> ParsedCall:
    name, arguments, status = fields["name"], fields["arguments"], fields["status"]
    # A value of another type than the schema's, or an unknown tool, has a better message from the agent.
    readable = status in ("ok", "unknown_tool") or (status == "invalid_json" and isinstance(arguments, dict))
    if readable:
        return call_of(name, {} if arguments is None else arguments)
    return malformed(_PROBLEMS.get(status, status), name if isinstance(name, str) else "")
