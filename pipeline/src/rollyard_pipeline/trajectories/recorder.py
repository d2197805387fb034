"""Token trajectories: which ids are sent to the backend next, and what the record keeps of them.

The module is pure: it has no I/O and no clock. The rule is that a prompt is, id for id, the segment so far
plus newly tokenized outside text. Sampled ids are never decoded and encoded again within a segment.
`chat.conversation` determines what the outside text is (tool results and the template's glue), and where
the template rewrites history (thinking stripped, whitespace merged). Where it does, a new segment begins,
whose prompt is the template's rendering, all of it outside the loss mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import overload

from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import FinishReason, Turn

from rollyard_pipeline.chat.conversation import Conversation, Rendering
from rollyard_pipeline.chat.format import ChatFormat, ChatMessage
from rollyard_pipeline.chat.thoughts import ThoughtReader
from rollyard_pipeline.chat.tokenizer import MARK


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one sampling request. The three sequences are parallel (length n)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probabilities of the sampled tokens, in nats."""
    policy_versions: tuple[str, ...]
    finish_reason: FinishReason


class TokenIds(Sequence[int]):
    """The first `count` ids of a list that only grows, and more ids, without a copy of a long history."""

    __slots__ = ("_count", "_head", "_tail")

    def __init__(self, head: list[int], tail: tuple[int, ...] = ()) -> None:
        self._head = head
        self._count = len(head)
        self._tail = tail

    def __len__(self) -> int:
        return self._count + len(self._tail)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._head, self._count), self._tail)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return tuple(self)[index]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"id {index} of {len(self)}")
        return self._head[position] if position < self._count else self._tail[position - self._count]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of the next request. It is recorded only together with its sample."""

    ids: Sequence[int]
    rendering: Rendering
    outside: tuple[int, ...] | None
    """The newly tokenized ids at the end of `ids`, or None if `ids` opens a new segment."""
    template_break: bool = False
    """Whether the template would have rewritten history."""
    known: int = 0
    """How many ids at the beginning of `ids` were not tokenized for it, as the record has them."""

    @property
    def rendered(self) -> str:
        """Return the template's rendering of the conversation as text."""
        return self.rendering.text.replace(MARK, "")


@dataclass(slots=True)
class _OpenSegment:
    ids: list[int]
    """The ids of prompt and response."""
    prompt: int
    """The number of ids that belong to the prompt."""
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[str] = field(default_factory=list)

    def outside(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.policy_versions += [""] * len(ids)

    def sampled(self, sample: Sample) -> None:
        self.ids += sample.token_ids
        self.loss_mask += [1] * len(sample.token_ids)
        self.logprobs += sample.logprobs
        self.policy_versions += sample.policy_versions


class TrajectoryRecorder:
    """The token record of one conversation.

    Args:
        chat: The model's chat format.
        messages: The conversation from which the rollout starts.
    """

    def __init__(self, chat: ChatFormat, messages: Sequence[ChatMessage]) -> None:
        self._tokenizer = chat.tokenizer
        self._conversation = Conversation(chat, messages)
        self._thoughts = ThoughtReader(chat)
        self.channels = chat.channels
        """Whether a turn consists of messages in channels."""
        self._segments: list[_OpenSegment] = []
        self._forked: list[int] = []
        """The ids with which the first segment begins if this is a fork."""
        self._shared = 0
        """The number of turns of a fork that were sampled before it."""
        self.turns: list[Turn] = []
        self.template_breaks = 0

    def add(self, message: ChatMessage) -> None:
        """Append a message from outside, such as a tool's result or a user's message."""
        self._conversation.add(message)

    def retract(self, count: int) -> None:
        """Take back the last `count` messages from outside, after which nothing was sampled."""
        self._conversation.retract(count)

    def fork(self, turns: int) -> TrajectoryRecorder | None:
        """Return a recorder of a conversation that shares the first `turns` turns of this record.

        The prompt of its first segment begins with the ids up to the end of these turns, which are not
        tokenized again. The result is None if the template no longer renders them as they were sampled.
        """
        conversation = self._conversation.fork(self._shared + turns)
        if conversation is None:
            return None
        last = [turn for turn in self.turns if turn.finish_reason != "replayed"][turns - 1]
        segment = self._segments[last.segment]
        fork = copy(self)
        fork._conversation = conversation
        fork._segments, fork.turns, fork.template_breaks = [], [], 0
        fork._shared = self._shared + turns
        fork._forked = segment.ids[: segment.prompt + last.end]
        return fork

    def replayed(self, message: ChatMessage) -> Turn:
        """Append an assistant's message that was not sampled, and return its turn, whose span is empty."""
        self._conversation.add(message)
        end = len(self._segments[-1].loss_mask) if self._segments else 0
        turn = Turn(segment=max(0, len(self._segments) - 1), start=end, end=end, finish_reason="replayed")
        self.turns.append(turn)
        return turn

    def structured(self, message: ChatMessage) -> None:
        """Set the parsed form of the last turn, for templates that refuse its raw text."""
        self._conversation.structured(message)

    def prompt(self) -> Prompt:
        """Return the ids to send for the next turn.

        Raises:
            TemplateError: The template refuses the conversation.
        """
        rendering = self._conversation.next()
        so_far = self._segments[-1].ids if self._segments else self._forked
        begun = bool(self._segments or self._forked)
        if rendering.outside is None or not begun:
            ids = self._tokenizer.encode(rendering.text)
            return Prompt(tuple(ids), rendering, None, template_break=begun)
        new = tuple(self._tokenizer.encode_after(so_far[-1] if so_far else None, rendering.outside))
        outside = new if self._segments else None
        return Prompt(TokenIds(so_far, new), rendering, outside, known=len(so_far))

    def record(self, prompt: Prompt, sample: Sample) -> str:
        """Record what was sampled after `prompt`, and return the turn's text without its end-of-turn token.

        The offsets of the turn's `thought` are those in this text.
        """
        if prompt.outside is None:
            self._segments.append(_OpenSegment(list(prompt.ids), len(prompt.ids)))
            self._forked = []
            self.template_breaks += prompt.template_break
        else:
            self._segments[-1].outside(prompt.outside)
        segment = self._segments[-1]
        start = len(segment.loss_mask)
        segment.sampled(sample)
        end = self._tokenizer.special_text(sample.token_ids[-1]) if sample.token_ids else None
        ids = sample.token_ids[:-1] if end else sample.token_ids
        text = self._tokenizer.decode_sampled(ids)
        self.turns.append(
            Turn(
                segment=len(self._segments) - 1,
                start=start,
                end=len(segment.loss_mask),
                finish_reason=sample.finish_reason,
                thought=self._thoughts.read(prompt.rendering.text, ids, text),
            )
        )
        self._conversation.said(prompt.rendering, text, end or "")
        return text.replace(MARK, "")

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids that are not recorded yet."""
        return self._tokenizer.decode_sampled(ids).replace(MARK, "")

    def segments(self, trained: bool = True) -> list[PackedSegment]:
        """Return the record so far.

        Args:
            trained: Whether sampled tokens are in the loss mask. If not, it is 0 throughout.
        """
        return [
            PackedSegment.of(
                prompt_ids=segment.ids[: segment.prompt],
                response_ids=segment.ids[segment.prompt :],
                loss_mask=segment.loss_mask if trained else [0] * len(segment.loss_mask),
                logprobs=segment.logprobs if trained else [0.0] * len(segment.logprobs),
                policy_versions=segment.policy_versions if trained else [""] * len(segment.policy_versions),
            )
            for segment in self._segments
        ]
