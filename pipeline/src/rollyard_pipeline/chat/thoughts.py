"""Which part of a sampled turn is a thought, and which is the answer.

This is decided where the turn's tokens are known, because its text does not show it: the prompt may have
opened the thought already, and a mark such as `</think>` is either a token or spelled by ordinary ones.

- An opening mark at the end of the prompt, or at the beginning of the turn, opens a thought. White space and
  characters that show nothing, such as a byte order mark, may come before it.
- The next closing mark ends it. If the mark that opened the thought is a token, so must this one be.
- A further thought may follow at once. Marks after that are text of the answer.
- A thought that is not closed has no answer after it.
- A closing mark without an opening one before it ends a thought only if the chat template, too, looks for
  this mark, and if the prompt does not end with it. Some templates hide that a thought was opened.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollyard_crds.trajectory import Thought

from rollyard_pipeline.chat.format import ChatFormat
from rollyard_pipeline.chat.harmony import channel_thought
from rollyard_pipeline.chat.tokenizer import MARK

_CLOSING: Final = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<seed:think>": "</seed:think>",
    "<think:opensource>": "</think:opensource>",
    "<|channel>": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
"""The closing mark of each family's thoughts by the opening one. No mark can overlap with another one."""
THOUGHT_MARKS: Final = tuple(mark for pair in _CLOSING.items() for mark in pair)
"""The opening and closing marks of all families."""
THOUGHT_MARK: Final = re.compile("|".join(map(re.escape, THOUGHT_MARKS)))
"""One of these marks."""
_TAGS: Final = re.compile(
    "|".join(
        f"{MARK}*+".join(map(re.escape, mark)) for mark in ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    )
)
"""Kimi K3's marks, which consist of several tokens. One with a MARK in it is spelled by ordinary tokens."""
_CHANNEL_NAME: Final = re.compile(r"(?<=<\|channel>)thought\n?")
"""What Gemma 4 writes after its opening mark."""
_TAIL: Final = 64
"""The number of characters at the end of a prompt that are searched for a mark."""
_NEWLINES: Final = re.compile(r"\n*+")


@dataclass(frozen=True, slots=True)
class _Mark:
    text: str
    start: int
    end: int
    exact: bool
    """Whether it is what the model uses: a token, or text if the vocabulary has no such token."""


class ThoughtReader:
    """Finds the thoughts of turns, each in time linear in the length of the turn.

    Args:
        chat: The model's chat format.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._tokenizer = chat.tokenizer
        tokens = {mark: chat.tokenizer.token_id(mark) for mark in THOUGHT_MARKS}
        self._tokens = {token: mark for mark, token in tokens.items() if token is not None}
        self._in_template = {mark for mark in _CLOSING.values() if mark in chat.template.source}
        self._channels = chat.channels

    def may_open_later(self, prompt: str) -> bool:
        """Return whether a closing mark, without an opening one before it, may end a thought of a turn.

        Args:
            prompt: The text after which the turn is sampled.
        """
        tail = prompt[-_TAIL:].rstrip()
        return any(not tail.endswith(mark) for mark in self._in_template)

    def read(self, prompt: str, ids: Sequence[int], text: str) -> Thought | None:
        """Return which part of a turn is a thought, or None if all of it is the answer.

        The places are those in `text` without any `tokenizer.MARK`.

        Args:
            prompt: The text after which the turn was sampled.
            ids: The sampled ids without the end-of-turn token.
            text: Their text, as `ChatTokenizer.decode_sampled` returns it.
        """
        if self._channels:
            thought = channel_thought(text)
            return None if thought is None else _without_marks(thought, text)
        spelled = [MARK in tag[0] for tag in _TAGS.finditer(text)]
        text = text.replace(MARK, "")
        marks = self._marks(ids, text, spelled)
        tail = prompt[-_TAIL:].rstrip()
        opened = next((mark for mark in _CLOSING if tail.endswith(mark)), "")
        thought = _first_thought(text, marks, opened)
        if thought is not None:
            return thought
        first = next((mark for mark in marks if mark.exact), None)
        if first is None or first.text not in self._in_template or tail.endswith(first.text):
            return None
        return Thought(start=0, end=first.start, answer=_after(text, first))

    def _marks(self, ids: Sequence[int], text: str, spelled: Sequence[bool]) -> list[_Mark]:
        """Return the marks of a text, in order.

        Args:
            ids: The sampled ids.
            text: Their text without any MARK.
            spelled: Whether ordinary tokens spell it, for each of `_TAGS` in the text.
        """
        matches = list(THOUGHT_MARK.finditer(text))
        sampled = sum(token in self._tokens for token in ids) if matches else 0
        mixed = 0 < sampled < len(matches)
        tokens = self._in_order(ids) if mixed else [sampled > 0] * len(matches)
        existing = set(self._tokens.values())
        tags = iter(spelled)
        return [
            _Mark(
                match[0],
                match.start(),
                match.end(),
                not next(tags) if _TAGS.fullmatch(match[0]) else token or match[0] not in existing,
            )
            for match, token in zip(matches, tokens, strict=False)
        ]

    def _in_order(self, ids: Sequence[int]) -> list[bool]:
        """Return for each mark in the text of `ids` whether it is a token."""
        tokens: list[bool] = []
        begin = 0
        for index, token in enumerate(ids):
            if token in self._tokens:
                tokens += [*self._spelled(ids[begin:index]), True]
                begin = index + 1
        return [*tokens, *self._spelled(ids[begin:])]

    def _spelled(self, ids: Sequence[int]) -> list[bool]:
        text = self._tokenizer.decode_sampled(ids).replace(MARK, "") if ids else ""
        return [False for _ in THOUGHT_MARK.finditer(text)]


def text_thought(text: str) -> Thought | None:
    """Return which part of a message is a thought, or None, where only its text is known.

    Only what the text itself opens, at its beginning, is a thought.
    """
    marks = [_Mark(match[0], match.start(), match.end(), False) for match in THOUGHT_MARK.finditer(text)]
    return _first_thought(text, marks, "")


def _first_thought(text: str, marks: Sequence[_Mark], opened: str) -> Thought | None:
    """Return the thought with which a turn begins, or None if it begins with none.

    Args:
        text: The text of the turn.
        marks: The marks in it, in order.
        opened: The mark with which the prompt opened a thought, or "".
    """
    if opened:
        opening, exact, start, following = opened, True, 0, 0
    elif marks and marks[0].text in _CLOSING and _blank(text[: marks[0].start]):
        name = _CHANNEL_NAME.match(text, marks[0].end)
        start = marks[0].end if name is None else name.end()
        opening, exact, following = marks[0].text, marks[0].exact, 1
    else:
        return None
    for index in range(following, len(marks)):
        mark = marks[index]
        if mark.text != _CLOSING[opening] or (exact and not mark.exact):
            continue
        after = marks[index + 1] if index + 1 < len(marks) else None
        if after is None or after.text != opening or not _blank(text[mark.end : after.start]):
            return Thought(start=start, end=mark.start, answer=_after(text, mark), opened=opened)
        exact = after.exact  # A further thought begins at once.
    return Thought(start=start, end=len(text), answer=len(text), opened=opened)


def _blank(text: str) -> bool:
    """Return whether a text shows nothing: it has only white space, format and control characters."""
    return all(char.isspace() or unicodedata.category(char) in ("Cf", "Cc") for char in text)


def _after(text: str, mark: _Mark) -> int:
    """Return where the answer begins after a closing mark and the newlines that templates put there."""
    newlines = _NEWLINES.match(text, mark.end)
    return mark.end if newlines is None else newlines.end()


def _without_marks(thought: Thought, text: str) -> Thought:
    """Return a thought whose offsets do not count the `tokenizer.MARK`s of the text."""
    offsets = {name: getattr(thought, name) for name in ("start", "end", "answer")}
    return Thought(**{name: offset - text.count(MARK, 0, offset) for name, offset in offsets.items()})
