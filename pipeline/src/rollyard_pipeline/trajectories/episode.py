"""The record of one Run stage so far. It survives a timeout, which allows Eval to score it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson
from rollyard_crds.lease import MAX_LIVE_CALLS, MAX_LIVE_TEXT, MAX_LIVE_TURNS, Lease, LiveCall, LiveTurn
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_crds.task import FunctionCall, Message, ToolCall
from rollyard_crds.trajectory import (
    MALFORMED_CALL,
    FinishReason,
    HarnessRecord,
    RunRecord,
    SamplingRecord,
    Thought,
    Turn,
    TurnToolCall,
    turns_said,
)

from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.trajectories.recorder import TrajectoryRecorder
from rollyard_pipeline.trajectories.sanitize import clean_text, clean_value

_MAX_CONTENT: Final = 1 << 20  # Message has the same limit, in characters.
_MAX_RECORDED_CALLS: Final = 64  # Message has the same limit.
MAX_ARGUMENTS: Final = 1024
"""The number of characters of a call's arguments that are shown."""


@dataclass(slots=True)
class Episode:
    """The messages, turns and outcome of one rollout's Run stage."""

    messages: list[Message]
    recorder: TrajectoryRecorder | None = None
    """The token record, or None if no model is asked (the `oracle` agent)."""
    turns: list[Turn] = field(default_factory=list)
    truncated_reason: str = ""
    answer: str | None = None
    """The answer that the `submit` tool received."""
    finished: bool = False
    tool_seconds: float = 0.0
    tool_parser: str = ""
    """The parser that reads the turns' tool calls, or an empty string if no tool is offered."""
    harness: HarnessRecord | None = None
    """How the harness ended, or None."""

    @property
    def sampled_turns(self) -> int:
        """Return the number of turns that were sampled, which excludes replayed calls."""
        return sum(turn.finish_reason != "replayed" for turn in self.turns)

    def add_assistant(
        self, text: str, parsed: ParsedTurn, finish: FinishReason, model_seconds: float = 0.0
    ) -> None:
        """Append an assistant turn, and its token span if a recorder has just recorded it.

        A turn that ends as `replayed` was not sampled. It has no tokens of its own, and the model reads its
        call in the next prompt, outside the loss mask.
        """
        well_formed = [call for call in parsed.calls if call.error is None]
        if well_formed and len(well_formed) == len(parsed.calls) <= _MAX_RECORDED_CALLS:
            calls = [
                ToolCall(function=FunctionCall(name=call.name, arguments=call.arguments))
                for call in well_formed
            ]
            message = Message(
                role="assistant", content=clean_text(parsed.text, _MAX_CONTENT), tool_calls=calls
            )
        else:
            message = Message(role="assistant", content=clean_text(text, _MAX_CONTENT))
        self.messages.append(message)
        if finish == "stop" and parsed.calls:
            finish = "tool_calls"
        if self.recorder is None:
            turn = Turn(segment=0, start=0, end=0, finish_reason=finish)
        elif finish == "replayed":
            turn = self.recorder.replayed(message.model_dump(mode="json", exclude_none=True))
        else:
            if message.tool_calls:
                self.recorder.structured(message.model_dump(mode="json", exclude_none=True))
            turn = self.recorder.turns[-1]
            turn.finish_reason = finish
            turn.model_seconds = model_seconds
            if turn.thought is not None:
                turn.thought = _in_content(turn.thought, text, message)
        self.turns.append(turn)

    def add_observation(self, call: ParsedCall, text: str, error: str | None, seconds: float) -> None:
        """Append a tool's result, and record the call with its turn."""
        text = clean_text(text, _MAX_CONTENT)
        name = clean_text(call.name, 128) or None
        self.messages.append(Message(role="tool", content=text, name=name))
        self.tool_seconds += seconds
        if self.recorder is not None:
            self.recorder.add({"role": "tool", "content": text, **({"name": name} if name else {})})
        if self.turns:
            turn = self.turns[-1]
            turn.tool_seconds += seconds
            turn.tool_calls.append(
                TurnToolCall(name=call.name, arguments=call.arguments, error=error, seconds=seconds)
            )

    def add_user(self, text: str) -> None:
        """Append a user's message, for example that of a simulated user."""
        text = clean_text(text, _MAX_CONTENT)
        self.messages.append(Message(role="user", content=text))
        if self.recorder is not None:
            self.recorder.add({"role": "user", "content": text})

    def resume(self, text: str) -> None:
        """Continue an episode that the agent has ended, with a user's message."""
        self.finished, self.answer = False, None
        self.add_user(text)

    def truncate(self, reason: str) -> None:
        """End the episode before the policy did. The first reason is kept."""
        self.truncated_reason = self.truncated_reason or reason
        self.finished = True

    def record(self, lease: Lease, sampling: SamplingSpec, backend: str, logprobs_mode: str) -> RunRecord:
        """Return what Run passes on in addition to the token lists. The control plane adds the timings."""
        return RunRecord(
            id=lease.rollout,
            job=lease.job,
            namespace=lease.namespace,
            task_id=lease.task.id,
            group_id=lease.group_id,
            sample_index=lease.sample_index,
            attempt=lease.attempt,
            messages=self.messages,
            turns=self.turns,
            sampling=None
            if self.recorder is None
            else SamplingRecord(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                seed=sampling.seed,
                logprobs_mode=logprobs_mode,
            ),
            backend=backend,
            tool_parser=self.tool_parser,
            truncated=bool(self.truncated_reason),
            truncated_reason=self.truncated_reason,
            template_breaks=self.recorder.template_breaks if self.recorder else 0,
            metadata=lease.task.metadata,
            harness=self.harness,
        )


def _in_content(thought: Thought, text: str, message: Message) -> Thought:
    """Return a thought of a turn's text with its offsets in the content of its message."""
    size, cut = len(message.content), 0
    if message.tool_calls:  # The content is the text without the calls and without whitespace around it.
        before = clean_text(text[: thought.answer])
        if not message.content.startswith(before.strip()):
            # gpt-oss's parser puts the thoughts before a call together, and such a turn has no answer.
            return Thought(start=0, end=size, answer=size)
        cut = len(before) - len(before.lstrip())
    start, end, answer = (
        min(max(offset - cut, 0), size) for offset in (thought.start, thought.end, thought.answer)
    )
    return Thought(start=start, end=end, answer=answer, opened=thought.opened)


def clean_turn(parsed: ParsedTurn) -> ParsedTurn:
    """Return a parser's result with values that can be stored.

    A call that cannot be stored becomes malformed.
    """
    calls: list[ParsedCall] = []
    for call in parsed.calls:
        name = clean_text(call.name, 128)
        try:
            arguments = clean_value(call.arguments)
        except ValueError as error:
            calls.append(ParsedCall(name, error=f"{MALFORMED_CALL}arguments {error}"))
        else:
            problem = clean_text(call.error) if call.error else None
            calls.append(ParsedCall(name, arguments, problem, call.written))
    return ParsedTurn(parsed.text, tuple(calls), parsed.thought)


def turns_from(episode: Episode, first: int) -> list[LiveTurn]:
    """Return the messages of an episode from the number `first` on, shortened for viewers.

    Heartbeats send them, so there are at most MAX_LIVE_TURNS of them, and their texts are bounded.
    """
    messages = episode.messages[first : first + MAX_LIVE_TURNS]
    if not messages:
        return []
    turn_of = turns_said([message.role for message in episode.messages], len(episode.turns))
    return [_turn(episode, first + index, message, turn_of) for index, message in enumerate(messages)]


def running_turn(episode: Episode, ids: Sequence[int], seconds: float) -> LiveTurn | None:
    """Return the turn that is being sampled, whose text ends with the last of its ids, for viewers.

    Args:
        ids: The ids that have been sampled so far.
        seconds: The seconds for which the turn has been sampled.
    """
    if episode.recorder is None:
        return None
    # A token has at least one character, but for bytes of one that is not complete.
    text = clean_text(episode.recorder.text_of(ids[-MAX_LIVE_TEXT:]))
    return LiveTurn(
        no=len(episode.messages),
        role="assistant",
        text=text[-MAX_LIVE_TEXT:],
        characters=len(text),
        tokens=len(ids),
        seconds=seconds,
        running=True,
    )


def _turn(episode: Episode, number: int, message: Message, turn_of: dict[int, int]) -> LiveTurn:
    text = message.content if isinstance(message.content, str) else ""
    calls = [
        LiveCall(name=call.function.name[:128], arguments=_arguments(call.function.arguments))
        for call in (message.tool_calls or ())[:MAX_LIVE_CALLS]
    ]
    turn = episode.turns[turn_of[number]] if number in turn_of else None
    return LiveTurn(
        no=number,
        role=message.role,
        text=text[:MAX_LIVE_TEXT],
        characters=len(text),
        tool_calls=calls,
        tokens=0 if turn is None else turn.end - turn.start,
        seconds=0.0 if turn is None else turn.model_seconds,
    )


def _arguments(arguments: object) -> str:
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments, default=str).decode()
    return text[:MAX_ARGUMENTS]
