"""Pieces of an ended rollout's record: its head, messages and tokens, and where two records differ."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from rollyard_process.telemetry.identity import trace_id
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps, loads
from rollyard_api.core.problems import NotFound
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.rows import JobRow
from rollyard_api.storage.schema import rollouts
from rollyard_api.storage.view_tables import ended_rollouts
from rollyard_api.trajectories import traces
from rollyard_api.views.rollout.records import CompactRecord, RecordedConversation, row_of

T = TypeVar("T")

MAX_TURNS: Final = 2000
"""The number of turns that are shown, of all conversations together."""
_ROW: Final = sa.select(*rollouts.c["end_seq", "group_no", "sample", "since", "timings"])


def brief(conn: Connection, job: JobRow, record: CompactRecord) -> dict[str, Any]:
    """Return a record's head with the sizes of what is left out, its spans and its neighbours.

    The spans are the name, begin and end of each state, in seconds since the epoch. The neighbours are the
    ids of the samples of its group by number, and of the failed rollouts of the job in the order of their
    ends, or None where there is no other.

    Raises:
        NotFound: The rollout has been removed.
    """
    head = dict(record.head)
    row = row_of(conn, job, head["id"], _ROW)
    room = MAX_TURNS
    parts = []
    for conversation in record.conversations.values():
        turns = [_without_arguments(turn) for turn in conversation.turns[:room]]
        room -= len(turns)
        parts.append(
            {
                **conversation.head,
                "turns": turns,
                "turns_total": len(conversation.turns),
                "messages": len(conversation.messages),
            }
        )
    own, *branches = parts
    if branches:
        head["branches"] = branches
    return {
        **head,
        **own,
        "segments": [
            {
                "prompt": len(segment.prompt_ids),
                "response": len(segment.response_ids),
                "sampled": segment.sizes.sampled_tokens,
            }
            for segment in record.segments
        ],
        "spans": traces.spans(loads(row.timings), row.since),
        "neighbours": _neighbours(conn, job.id, row),
        "trace_id": trace_id(head["id"]),
    }


def _without_arguments(turn: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {name: value for name, value in call.items() if name != "arguments"}
        for call in turn.get("tool_calls") or ()
    ]
    return {**turn, "tool_calls": calls}


def conversation_of(record: CompactRecord, number: int | None) -> RecordedConversation:
    """Return the conversation of a record with this number, or the rollout's own one for None.

    Raises:
        NotFound: The record has no such conversation.
    """
    if number is None:
        return record.own
    conversation = record.conversations.get(number)
    if conversation is None:
        raise NotFound(f"the record has no conversation with number {number}", reason="PieceNotFound")
    return conversation


def _neighbours(conn: Connection, job_id: int, row: Any) -> dict[str, str | None]:
    group = sa.select(rollouts.c.id).where(rollouts.c.job_id == job_id, rollouts.c.group_no == row.group_no)
    t = ended_rollouts.c
    failed = sa.select(t.id).where(t.job_id == job_id, t.state == RolloutState.FAILED)
    neighbours = {}
    for name, query, column, value in (
        ("sample", group, rollouts.c.sample, row.sample),
        ("failed", failed, t.end_seq, row.end_seq),
    ):
        before, after = query.where(column < value), query.where(column > value)
        neighbours[f"{name}_before"] = conn.scalar(before.order_by(column.desc()).limit(1))
        neighbours[f"{name}_after"] = conn.scalar(after.order_by(column).limit(1))
    return neighbours


MAX_MESSAGES: Final = 200
MAX_CHARACTERS: Final = 200_000
"""The number of characters of one text in an answer."""
MAX_ANSWER: Final = 4 << 20
"""The number of characters of all texts in an answer. Further messages come with the next range."""
MAX_CALLS: Final = 64
"""The number of tool calls of one message that are shown."""


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Content in parts is one text, with JSON for parts that are not text."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part["text"])
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else dumps(part).decode()
            for part in content
        )
    return dumps(content).decode()


def messages(conversation: RecordedConversation, start: int, limit: int, most: int) -> dict[str, Any]:
    """Return {start, total, items} with at most `limit` messages of at most `most` characters each."""
    items: list[dict[str, Any]] = []
    room = MAX_ANSWER
    for number in range(start, min(start + limit, len(conversation.messages))):
        item = _item(conversation, number, most)
        room -= (
            len(item["content"])
            + len(item["reasoning_content"])
            + sum(len(call["arguments"]) for call in item["tool_calls"])
        )
        if items and room < 0:
            break
        items.append(item)
    return {"start": start, "total": len(conversation.messages), "items": items}


def _item(conversation: RecordedConversation, number: int, most: int) -> dict[str, Any]:
    message = conversation.messages[number]
    text = text_of(message)
    turn = conversation.turn_of.get(number)
    return {
        "no": number,
        "role": message.get("role", ""),
        "name": message.get("name") or "",
        "content": text[:most],
        "characters": len(text),
        "cut": len(text) > most,
        "reasoning_content": str(message.get("reasoning_content") or "")[:most],
        "tool_calls": _calls(conversation, message, turn, most),
        "tool_call_id": message.get("tool_call_id"),
        "turn": turn,
    }


def _calls(
    conversation: RecordedConversation, message: Mapping[str, Any], turn: int | None, most: int
) -> list[dict[str, Any]]:
    """Return the calls of the turn that produced a message, or those that the message itself has."""
    parsed: list[tuple[str, Any, Mapping[str, Any]]] = []
    if turn is not None:
        calls = conversation.turns[turn].get("tool_calls") or ()
        parsed = [(call.get("name", ""), call.get("arguments"), call) for call in calls]
    else:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                parsed.append((str(function.get("name", "")), function.get("arguments"), {}))
    return [
        {
            "name": name,
            "arguments": text[:most],
            "cut": len(text) > most,
            "error": call.get("error"),
            "seconds": call.get("seconds", 0.0),
        }
        for name, arguments, call in parsed[:MAX_CALLS]
        for text in [arguments if isinstance(arguments, str) else dumps(arguments).decode()]
    ]


def message_text(conversation: RecordedConversation, number: int, offset: int, limit: int) -> dict[str, Any]:
    """Return {text, offset, characters} of a part of one message's text.

    Raises:
        NotFound: The conversation has no such message.
    """
    text = text_of(_one_of(conversation.messages, number, "message"))
    return {"text": text[offset : offset + limit], "offset": offset, "characters": len(text)}


def _one_of(parts: Sequence[T], number: int, noun: str) -> T:
    if number >= len(parts):
        raise NotFound(
            f"the record has {len(parts)} {noun}s, and none with number {number}",
            reason="PieceNotFound",
        )
    return parts[number]


MAX_TOKENS: Final = 20_000
"""The number of tokens in one answer."""
STEP: Final = 20
"""A byte v from 1 to 255 stands for a log-probability of about -(v - 1) / STEP nats, so the lowest is -12.7.
The byte 0 stands for a token without one."""


def quantized(logprobs: Iterable[float], mask: Iterable[int]) -> str:
    """Return log-probabilities as one byte each, in base64; tokens outside the loss mask have 0."""
    pairs = zip(logprobs, mask, strict=True)
    return base64.b64encode(
        bytes(1 + round(-STEP * min(max(value, -12.7), 0.0)) if sampled else 0 for value, sampled in pairs)
    ).decode()


def _runs(values: Iterable[Any]) -> list[tuple[Any, int]]:
    """Return each run of equal values as the value and the length of the run."""
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def tokens(record: CompactRecord, number: int, start: int, limit: int, *, exact: bool) -> dict[str, Any]:
    """Return a range of a segment's tokens without their texts. Positions count from the first of the prompt.

    Raises:
        NotFound: The record has no such segment.
    """
    segment = _one_of(record.segments, number, "segment")
    prompt, end = len(segment.prompt_ids), start + limit
    response = slice(max(0, start - prompt), max(0, end - prompt))
    # The prompt is outside the loss mask and has neither log-probabilities nor versions.
    ids = segment.prompt_ids.numbers[start:end].tolist()
    mask = [0] * len(ids) + list(segment.loss_mask.data[response])
    versions = [""] * len(ids) + segment.policy_versions.versions[response]
    logprobs = [0.0] * len(ids) + segment.logprobs.numbers[response].tolist()
    return {
        "segment": number,
        "segments": len(record.segments),
        "start": start,
        "total": prompt + len(segment.response_ids),
        "prompt": prompt,
        "ids": ids + segment.response_ids.numbers[response].tolist(),
        "mask": _runs(mask),
        "versions": _runs(versions),
        "logprobs": logprobs if exact else quantized(logprobs, mask),
    }


AROUND: Final = 20
"""The number of tokens that are shown before and after the position."""


def difference(left: CompactRecord, right: CompactRecord) -> dict[str, Any]:
    """Return {segment, position, left, right}, where each side has `ids` from `start` on.

    `position` counts from the segment's first prompt token. It is None if the tokens are equal, or those of
    one rollout are the beginning of the other's in their last common segment. This call belongs in a thread.
    """
    number = position = None
    left_ids: list[int] = []
    right_ids: list[int] = []
    for index, segments in enumerate(zip(left.segments, right.segments, strict=False)):
        number = index
        left_ids, right_ids = ([*side.prompt_ids.numbers, *side.response_ids.numbers] for side in segments)
        pairs = enumerate(zip(left_ids, right_ids, strict=False))
        position = next((at for at, (mine, theirs) in pairs if mine != theirs), None)
        # If one of them is longer, no later segment can be compared.
        if position is not None or len(left_ids) != len(right_ids):
            break
    return {
        "segment": number,
        "position": position,
        "left": _side(left_ids, position),
        "right": _side(right_ids, position),
    }


def _side(ids: list[int], position: int | None) -> dict[str, Any]:
    at = len(ids) if position is None else position
    start = max(0, at - AROUND)
    return {"start": start, "ids": ids[start : at + AROUND], "total": len(ids)}
