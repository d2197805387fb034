"""The reply that a harness gets for a sampled turn."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from rollyard_crds.trajectory import Thought

from rollyard_pipeline.chat.tokenizer import ChatTokenizer
from rollyard_pipeline.gateway.calls import Finish, ModelReply, Opening, ReplyCall, Usage
from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.trajectories.parts import TurnParts
from rollyard_pipeline.trajectories.recorder import Sample

_UNNAMED = "unknown"
"""The name of a malformed call that names no tool."""


def opening_of(created: float, model: str, prompt_tokens: int) -> Opening:
    """Return what is known of a reply before it is sampled, with a new id."""
    return Opening(secrets.token_hex(12), int(created), model, prompt_tokens)


def reply_of(
    opening: Opening,
    sample: Sample,
    text: str,
    thought: Thought | None,
    parts: TurnParts,
    tokenizer: ChatTokenizer,
) -> ModelReply:
    """Return the reply for a sampled turn.

    Args:
        opening: What was known of it before.
        sample: What was sampled.
        text: The text of the turn without its end-of-turn token.
        thought: Where the thought is in `text`, or None.
        parts: The parts of the turn.
        tokenizer: The model's tokenizer.
    """
    calls = tuple(_call(call, text[thought.answer :] if thought else text) for call in parts.parsed.calls)
    finish: Finish = "length" if sample.finish_reason == "length" else "tool_calls" if calls else "stop"
    usage = Usage(
        prompt=opening.prompt_tokens,
        sampled=len(sample.token_ids),
        thought=_thought_tokens(sample.token_ids, text, thought, tokenizer),
    )
    return ModelReply(
        opening.id,
        opening.created,
        opening.model,
        text=parts.answer,
        thought=parts.thought,
        calls=calls,
        finish=finish,
        usage=usage,
    )


def _call(call: ParsedCall, text: str) -> ReplyCall:
    number = f"call_{secrets.token_hex(12)}"
    if call.error is not None:
        return ReplyCall(number, call.name or _UNNAMED, (call.written or text).strip(), call.error)
    return ReplyCall(number, call.name, json.dumps(call.arguments, ensure_ascii=False))


def _thought_tokens(ids: Sequence[int], text: str, thought: Thought | None, tokenizer: ChatTokenizer) -> int:
    """Return how many ids are a thought. It is an estimate if its closing mark is not a token."""
    if thought is None or thought.end <= thought.start:
        return 0
    if not thought.closed:
        return len(ids)
    closing = tokenizer.token_id(text[thought.end : thought.answer].strip())
    if closing is not None and closing in ids:
        return ids.index(closing)
    return round(len(ids) * (thought.end - thought.start) / max(1, len(text)))
