"""gpt-oss's channels, in OpenAI's harmony format.

A turn consists of one or more `<|channel|>NAME …<|message|>TEXT`, with `<|end|><|start|>assistant` in
between.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollyard_crds.trajectory import Thought

HARMONY_MARK: Final = re.compile(r"<\|(start|message|end|call|return)\|>")
"""A mark between the parts of a turn."""
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*+([^\s<]++)")
_HEADER_LIMIT: Final = 1024  # characters


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of a turn. Its text is `turn[start:end]`."""

    channel: str
    """The name of the channel. It is empty if the header names none."""
    recipient: bool
    """Whether it is a call."""
    start: int
    end: int
    begun: bool
    """Whether its header ends, so that there is a text."""


def split_channels(text: str, escape: Callable[[str], str], calls: bool) -> dict[str, str]:
    """Return the `content` of a sampled turn and, if the turn has any, its `thinking`.

    Args:
        text: The turn without its end-of-turn token.
        escape: Turns control tokens that are left in the parts into text.
        calls: Whether the turn makes calls. The template then accepts only thinking in addition to them.
    """
    messages = [message for message in _messages(text) if message.begun and message.channel]
    if not messages:
        return {"content": "" if calls else escape(text)}
    bodies = [
        (message.channel, text[message.start : message.end]) for message in messages if not message.recipient
    ]
    thinking = "\n".join(body for channel, body in bodies if channel == "analysis")
    content = "\n".join(body for channel, body in bodies if channel != "analysis")
    if calls:
        thinking, content = "\n".join(part for part in (thinking, content) if part), ""
    return {"content": escape(content), **({"thinking": escape(thinking)} if thinking else {})}


def open_channel(text: str) -> str | None:
    """Return the channel of the message that a turn is in the middle of, or None if it is in none.

    A message that is a call has none. The channel is empty if the header names none.
    """
    messages = _messages(text)
    last = messages[-1] if messages else None
    return last.channel if last is not None and last.end == len(text) and not last.recipient else None


def channel_thought(text: str) -> Thought | None:
    """Return which part of a turn is a thought, or None for a turn without channels.

    The thought is what stands in the channel `analysis`. The answer is the last message, if it stands in the
    channel `final` or names none. Otherwise the turn has no answer.
    """
    messages = _messages(text)
    if not messages:
        return None
    thoughts = [message for message in messages if message.channel == "analysis" and message.begun]
    last = messages[-1]
    answered = last.begun and not last.recipient and last.channel in ("final", "")
    return Thought(
        start=thoughts[0].start if thoughts else 0,
        end=thoughts[-1].end if thoughts else 0,
        answer=last.start if answered else len(text),
    )


def _messages(text: str) -> list[_Message]:
    """Return the messages of a turn in one pass, or [] if it has no marks."""
    messages: list[_Message] = []
    header, body = 0, -1  # Where the header began, and where the text after it began, or -1 in a header.
    for mark in HARMONY_MARK.finditer(text):
        if body < 0 and mark[1] == "message":
            body = mark.end()
        elif mark[1] != "message":
            if body >= 0:
                messages.append(_message(text, header, body, mark.start()))
            header, body = mark.end(), -1
    if body >= 0:
        messages.append(_message(text, header, body, len(text)))
    elif messages or "<|channel|>" in text[header : header + _HEADER_LIMIT]:
        rest = text[header:]
        if rest.strip():
            messages.append(_Message("", False, len(text), len(text), False))
    return messages


def _message(text: str, header: int, start: int, end: int) -> _Message:
    head = text[header : min(start, header + _HEADER_LIMIT)]
    channel = _CHANNEL.search(head)
    return _Message(channel[1] if channel is not None else "", " to=" in head, start, end, True)
