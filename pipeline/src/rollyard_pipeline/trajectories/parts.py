"""The parts of a sampled turn: its thought, its answer, and its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard_crds.trajectory import Thought

from rollyard_pipeline.chat.harmony import split_channels
from rollyard_pipeline.tool_parsers.base import ParsedTurn, TokenParser, ToolCallParser
from rollyard_pipeline.trajectories.episode import clean_turn


@dataclass(frozen=True, slots=True)
class TurnParts:
    """What a turn consists of."""

    parsed: ParsedTurn
    """The calls, and the text without them, which has the thought. It is what the record keeps."""
    thought: str
    """The thought, without the marks and the whitespace around it."""
    answer: str
    """The text without thought and calls, and without whitespace around it."""


async def turn_parts(
    parser: ToolCallParser | TokenParser | None,
    text: str,
    thought: Thought | None,
    channels: bool,
    ids: Sequence[int],
    prompt_ids: Sequence[int],
) -> TurnParts:
    """Return the parts of a turn. Calls in its thought do not count.

    Args:
        parser: What reads the calls, or None if no tool was offered.
        text: The text of the turn without its end-of-turn token.
        thought: Where the thought is in `text`, or None if all of it is the answer.
        channels: Whether the turn consists of messages in channels.
        ids: The sampled ids, with the end-of-turn token.
        prompt_ids: The ids after which they were sampled.
    """
    # Messages in channels may be calls wherever they stand, and their parser knows a thought's channel.
    start = thought.answer if thought is not None and not channels else 0
    shown = text[thought.start : thought.end] if thought is not None else ""
    answer = text[start:]
    if channels:
        parts = split_channels(text, str, False)
        shown, answer = parts.get("thinking", ""), parts["content"]
    parsed = ParsedTurn(text.strip())
    if isinstance(parser, ToolCallParser):
        turn = clean_turn(parser.parse(text[start:]))
        parsed = ParsedTurn((text[:start] + turn.text).strip(), turn.calls)
        answer = answer if channels else turn.text
    elif parser is not None and start < len(text):
        read = await parser.parse_ids(ids, prompt_ids)
        if read is not None:
            turn = clean_turn(read)
            before = text[:start] if start else turn.thought and f"{turn.thought}\n\n"
            parsed = ParsedTurn((before + turn.text).strip(), turn.calls)
            answer, shown = turn.text, shown or turn.thought
    return TurnParts(parsed, shown.strip(), answer.strip())
