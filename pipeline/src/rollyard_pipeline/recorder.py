"""Token trajectories: which ids go to the backend next, and what the record keeps of them.

Pure: no I/O, no clock. The rule is that a prompt is, id for id, the segment so far plus
newly tokenized outside text; sampled ids are never decoded and encoded again within a
segment. How the outside text (tool results and the template's glue) is found:

    R(k)   = the template's rendering before turn k, which is the text of the ids so far
    R(k+1) = its rendering with turn k's text as it was sampled, and with the new messages

If R(k+1) begins with R(k) + the sampled text (+ its end-of-turn token, where the model
sampled it), the rest is the outside text, and it alone is tokenized. If not, the template
rewrites history (thinking stripped, whitespace merged): a new segment begins, whose prompt
is R(k+1), all of it outside the loss mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollyard_crds.trajectory import FinishReason, Segment, Turn

from rollyard_pipeline.chat.format import ChatFormat, ChatMessage
from rollyard_pipeline.errors import TemplateError


@dataclass(frozen=True, slots=True)
class Sample:
    """What a backend sampled in one request; the three sequences are parallel (length n)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """In nats, of the sampled tokens."""
    policy_versions: tuple[str, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Prompt:
    """The next request's prompt. Nothing is recorded until its sample is."""

    ids: tuple[int, ...]
    rendered: str
    outside: tuple[int, ...] | None
    """Newly tokenized ids at the end of `ids`; None where `ids` opens a new segment."""
    template_break: bool = False
    """The template would have rewritten history."""


@dataclass(slots=True)
class _OpenSegment:
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[str] = field(default_factory=list)

    def outside(self, ids: Sequence[int]) -> None:
        self.response_ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.policy_versions += [""] * len(ids)

    def sampled(self, sample: Sample) -> None:
        self.response_ids += sample.token_ids
        self.loss_mask += [1] * len(sample.token_ids)
        self.logprobs += sample.logprobs
        self.policy_versions += sample.policy_versions


@dataclass(frozen=True, slots=True)
class _LastTurn:
    """The turn that was sampled last, as the next rendering must show it."""

    text: str
    """Decoded, without `end`."""
    end: str
    """The special token that it ended with, spelled out; empty if it ended without one."""
    message: ChatMessage
    before: str
    """R(k): the rendering that it was sampled after."""


class TrajectoryRecorder:
    """The token record of one conversation.

    Args:
        chat: the model's chat format.
        messages: the conversation that the rollout starts from.
    """

    def __init__(self, chat: ChatFormat, messages: Sequence[ChatMessage]) -> None:
        self._chat = chat
        self._messages = list(messages)
        self._structured: dict[int, ChatMessage] = {}
        self._segments: list[_OpenSegment] = []
        self._last: _LastTurn | None = None
        self.turns: list[Turn] = []
        self.template_breaks = 0

    def add(self, message: ChatMessage) -> None:
        """Append a message from outside (a tool's result, a user's word)."""
        self._messages.append(message)

    def structured(self, message: ChatMessage) -> None:
        """Give the parsed form of the last turn, for templates that refuse its raw text."""
        for place in range(len(self._messages) - 1, -1, -1):
            if self._last is not None and self._messages[place] is self._last.message:
                self._structured[place] = message
                return

    def prompt(self) -> Prompt:
        """The ids to send for the next turn.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        last = self._last
        if last is None:
            rendered = self._render()
            return Prompt(tuple(self._chat.tokenizer.encode(rendered)), rendered, None)
        rendered, outside = self._outside_text(last)
        if outside is None:
            ids = self._chat.tokenizer.encode(rendered)
            return Prompt(tuple(ids), rendered, None, template_break=True)
        segment = self._segments[-1]
        so_far = segment.prompt_ids + segment.response_ids
        new = self._chat.tokenizer.encode_after(so_far[-1] if so_far else None, outside)
        return Prompt((*so_far, *new), rendered, tuple(new))

    def record(self, prompt: Prompt, sample: Sample) -> str:
        """Keep what was sampled after `prompt`; gives the turn's text without its end-of-turn token."""
        if prompt.outside is None:
            self._segments.append(_OpenSegment(list(prompt.ids)))
            self.template_breaks += prompt.template_break
        else:
            self._segments[-1].outside(prompt.outside)
        segment = self._segments[-1]
        start = len(segment.response_ids)
        segment.sampled(sample)
        self.turns.append(
            Turn(
                segment=len(self._segments) - 1,
                start=start,
                end=len(segment.response_ids),
                finish_reason=sample.finish_reason,
            )
        )
        tokenizer = self._chat.tokenizer
        end = tokenizer.special_text(sample.token_ids[-1]) if sample.token_ids else None
        text = tokenizer.decode(sample.token_ids[:-1] if end else sample.token_ids)
        message: ChatMessage = {"role": "assistant", "content": text}
        self._messages.append(message)
        self._last = _LastTurn(text, end or "", message, prompt.rendered)
        return text

    def segments(self) -> list[Segment]:
        """The record so far."""
        return [
            Segment(
                prompt_ids=list(segment.prompt_ids),
                response_ids=list(segment.response_ids),
                loss_mask=list(segment.loss_mask),
                logprobs=list(segment.logprobs),
                policy_versions=list(segment.policy_versions),
            )
            for segment in self._segments
        ]

    def _outside_text(self, last: _LastTurn) -> tuple[str, str | None]:
        """R(k+1), and what of it comes after the sampled turn; None where history is rewritten."""
        rendered = self._render()
        known = last.before + last.text
        if not rendered.startswith(known):
            return rendered, None
        rest = rendered[len(known) :]
        if rest.startswith(last.end):
            return rendered, rest[len(last.end) :]
        if rest.lstrip().startswith(last.end):
            # The template puts whitespace before the end-of-turn token that the model did not sample.
            return rendered, None
        # Another special token than the template's end of turn: it is part of what the model said.
        last.message["content"] = last.text + last.end
        rendered = self._render()
        if rendered.startswith(known + last.end):
            return rendered, rendered[len(known + last.end) :]
        return rendered, None

    def _render(self) -> str:
        try:
            return self._chat.render(self._messages)
        except TemplateError:
            if not self._structured:
                raise
            # Some templates insist on parsed tool calls before tool results.
            messages = [self._structured.get(place, message) for place, message in enumerate(self._messages)]
            return self._chat.render(messages)
