"""The text of a reply while it is sampled: what of it is certain, and may be sent already.

A piece that was sent cannot be taken back. Therefore whatever may yet turn out to be something else is held
back: a character of which a byte is missing, a part of a mark, white space that may be at the end, a text
that may be a thought, and everything from where a call may begin. The end of the turn decides what it is.
"""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rollyard_crds.trajectory import Thought

from rollyard_pipeline.chat.format import ChatFormat
from rollyard_pipeline.chat.harmony import HARMONY_MARK, open_channel, split_channels
from rollyard_pipeline.chat.thoughts import THOUGHT_MARK, THOUGHT_MARKS, ThoughtReader
from rollyard_pipeline.chat.tokenizer import MARK, ChatTokenizer
from rollyard_pipeline.tool_parsers.base import TokenParser, ToolCallParser
from rollyard_pipeline.tool_parsers.calls import MarkedParser

_BROKEN: Final = "\ufffd"
_CONTEXT: Final = 6  # The ids before new ones that are decoded with them.
_COMPARED: Final = 8  # The ids that were read already and are compared with each step.
_LONGEST_BROKEN: Final = 256  # The ids without one whole character after which no more is sent.
_MOST_READS: Final = 32  # How often a turn is searched for a thought. Marks after that hold everything back.
_HEAD: Final = 256  # The characters within which an opening mark has to begin.
_GEMMA: Final = "<|channel>"
_HARMONY_MARKS: Final = ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>")


class ShownText(ABC):
    """The certain part of a reply's texts. Both only grow."""

    def __init__(self) -> None:
        self.thought = ""
        self.text = ""

    @abstractmethod
    def read(self, text: str, ids: Sequence[int]) -> None:
        """Read the text of the turn so far, which is that of the first of `ids`, without any MARK."""


class GrowingReply:
    """Turns the ids of a turn into the certain part of its texts as they come.

    The cost of a step is that of the new ids.

    Args:
        chat: The model's chat format.
        parser: What reads the calls of the turn, or None if no tool was offered.
        prompt: The text after which the turn is sampled.
    """

    def __init__(self, chat: ChatFormat, parser: ToolCallParser | TokenParser | None, prompt: str) -> None:
        self._tokenizer = chat.tokenizer
        self._ids: list[int] = []
        self._window: list[int] = []
        """The last ids, whose text begins with `_known` characters that are part of `_text`."""
        self._known = 0
        self._text = ""
        self._stuck = False
        self._shown = _InChannels() if chat.channels else _WithMarks(chat, parser, prompt)

    @property
    def thought(self) -> str:
        """The certain part of the thought."""
        return self._shown.thought

    @property
    def text(self) -> str:
        """The certain part of the answer."""
        return self._shown.text

    def update(self, since: Callable[[int], Sequence[int]]) -> bool:
        """Read the ids that have come, and return whether none of them replaces one that was read before.

        Only the last ones are compared. The whole reply shows if others have changed. Ids that are missing
        may come again: the tokens of a request that has failed are not there until it is certain that they
        can be kept, and no token is there once the turn has ended.

        Args:
            since: Returns the ids of the turn so far from the one with a number on, from 0.
        """
        first = max(0, len(self._ids) - _COMPARED)
        ids, read = since(first), self._ids[first:]
        count = len(read)
        if list(ids[:count]) != read[: len(ids)]:
            return False
        # The end-of-turn token is not part of the text, and only the next id shows whether this is one.
        end = len(ids) - (len(ids) > 0 and self._tokenizer.special_text(ids[-1]) is not None)
        if end > count and not self._stuck:
            new = list(ids[count:end])
            self._ids += new
            self._decode(new)
            self._shown.read(self._text, self._ids)
        return True

    def _decode(self, ids: list[int]) -> None:
        window = self._window + ids
        text = _decoded(self._tokenizer, window)
        whole = text.rstrip(_BROKEN)
        self._text += whole[self._known :]
        if len(whole) == len(text):
            self._window = window[-_CONTEXT:]
            self._known = len(_decoded(self._tokenizer, self._window))
        else:
            self._window, self._known = window, max(self._known, len(whole))
            self._stuck = len(window) > _LONGEST_BROKEN


class _WithMarks(ShownText):
    """The texts of a turn in which marks stand around thoughts and calls."""

    def __init__(self, chat: ChatFormat, parser: ToolCallParser | TokenParser | None, prompt: str) -> None:
        super().__init__()
        self._tokenizer = chat.tokenizer
        self._reader = ThoughtReader(chat)
        self._prompt = prompt
        self._may_open_later = self._reader.may_open_later(prompt)
        self._begins: tuple[str, ...] | None = () if parser is None else None
        if isinstance(parser, MarkedParser) and parser.begins:
            self._begins = parser.begins
        self._reads = 0
        self._scanned = 0
        self._marks = 0
        self._thought: Thought | None = None
        self._answer: int | None = None
        """Where the answer begins, once that is certain."""
        self._held: int | None = None
        """Where a call may begin, once there is such a place."""
        self._searched = 0

    def read(self, text: str, ids: Sequence[int]) -> None:
        """Read the text of the turn so far."""
        if self._answer is None and not self._read_thought(text, ids):
            return
        if self._answer is not None and self._begins is not None:
            self._read_answer(text, self._answer, self._begins)

    def _read_thought(self, text: str, ids: Sequence[int]) -> bool:
        """Read what precedes the answer, and return whether all that follows is known to be the answer."""
        marks = self._marks
        for mark in THOUGHT_MARK.finditer(text, self._scanned):
            self._marks += 1
            self._scanned = mark.end()
        self._scanned = max(self._scanned, len(text) - max(map(len, THOUGHT_MARKS)) + 1)
        if self._marks > marks or not self._reads:
            self._find(ids)
        thought = self._thought
        if self._reads > _MOST_READS:
            return False
        if thought is None:
            if self._may_open_later or _may_begin(text[:_HEAD], THOUGHT_MARKS):
                return False
            self._answer = 0
            return True
        if thought.end == thought.answer:  # It is not closed.
            if _GEMMA not in text[: thought.start]:
                self.thought = text[thought.start : len(text) - _partial(text, THOUGHT_MARKS)].strip()
            return False
        self.thought = (
            text[thought.start : thought.end].strip() if not self._continues(text) else self.thought
        )
        if self._continues(text):
            return False
        self._find(ids)
        thought = self._thought
        self._answer = thought.answer if thought is not None and thought.closed else None
        return self._answer is not None

    def _continues(self, text: str) -> bool:
        """Return whether a further thought may follow the one that is closed."""
        assert self._thought is not None
        return _may_begin(text[self._thought.answer : self._thought.answer + _HEAD], THOUGHT_MARKS)

    def _find(self, ids: Sequence[int]) -> None:
        self._reads += 1
        if self._reads <= _MOST_READS:
            marked = self._tokenizer.decode_sampled(ids).rstrip(_BROKEN)
            self._thought = self._reader.read(self._prompt, ids, marked)

    def _read_answer(self, text: str, start: int, begins: tuple[str, ...]) -> None:
        if self._held is None and begins:
            longest = max(map(len, begins))
            at = max(start, self._searched)
            self._held = min((place for mark in begins if (place := text.find(mark, at)) >= 0), default=None)
            self._searched = max(start, len(text) - longest + 1)
        end = self._held if self._held is not None else len(text) - _partial(text, begins)
        self.text = text[start:end].strip()


class _InChannels(ShownText):
    """The texts of a turn that consists of messages in channels."""

    def __init__(self) -> None:
        super().__init__()
        self._marks = -1
        self._scanned = 0
        self._read = 0
        self._channel: str | None = None
        self._before = ""
        """What the channel that is written to had before the text after `_read`."""

    def read(self, text: str, ids: Sequence[int]) -> None:
        """Read the text of the turn so far."""
        end = len(text) - _partial(text, _HARMONY_MARKS)
        marks = max(self._marks, 0)
        for mark in HARMONY_MARK.finditer(text, self._scanned, end):
            marks += 1
            self._scanned = mark.end()
        if marks != self._marks:
            if marks > _MOST_READS:
                self._channel = None
                return
            self._marks, self._read = marks, end
            parts = split_channels(text[:end], str, False)
            self._channel = open_channel(text[:end])
            thinking = parts.get("thinking", "")
            self._before = thinking if self._channel == "analysis" else parts["content"]
            if not self.text:
                self.thought = thinking.strip()
        so_far = (self._before + text[self._read : end]).strip()
        if self._channel == "analysis" and not self.text:
            self.thought = so_far
        elif self._channel == "final":
            self.text = so_far


def _decoded(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode_sampled(ids).replace(MARK, "")


def _may_begin(text: str, marks: Iterable[str]) -> bool:
    """Return whether a text that shows nothing so far, or begins a mark, may become one that does."""
    head = text.lstrip()
    while head and unicodedata.category(head[0]) in ("Cf", "Cc"):
        head = head[1:].lstrip()
    return not head or any(mark.startswith(head) for mark in marks)


def _partial(text: str, marks: Iterable[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of one of the marks."""
    return max(
        (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0
    )
