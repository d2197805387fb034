"""A harness and a sampler for `gateway.conversations`, and what must hold of every record.

player = Player("qwen3")
first = player.ask([user("go")], "I look.", [("bash", {"command": "ls"})])
player.ask([user("go"), first.repeated(), result(first, "a b")], "done")
player.check()
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Final

from rollyard_crds.rolloutjob import AgentSpec
from rollyard_crds.task import Message
from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import Branch, Turn
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import ChatTokenizer
from rollyard_pipeline.gateway.branches import ConversationsRecord
from rollyard_pipeline.gateway.calls import (
    Finish,
    HistoryCall,
    HistoryMessage,
    Marks,
    ModelCall,
    ModelReply,
    ReplyCall,
    Usage,
)
from rollyard_pipeline.gateway.conversations import Conversations, Placed
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.tool_parsers.base import ParsedTurn, ToolCallParser
from rollyard_pipeline.trajectories.episode import Episode, clean_turn
from rollyard_pipeline.trajectories.recorder import Sample
from tokenizers import Tokenizer

from rollyard_testing.crds.segments import lists
from rollyard_testing.families import FAMILIES, train_tokenizer

NOW: Final = datetime(2026, 1, 2, 3, 4)
Calls = Sequence[tuple[str, dict[str, Any]]]


def tool(name: str) -> dict[str, Any]:
    """Return a tool that takes a text."""
    text = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": text}}


BASH: Final = (tool("bash"), tool("task"))


@cache
def _bpe() -> Tokenizer:
    return train_tokenizer()


@cache
def chat_format(family: str) -> ChatFormat:
    """Return the chat format of a family without tools."""
    tokenizer = ChatTokenizer(_bpe(), dict(FAMILIES[family].variables))
    return ChatFormat(tokenizer, ChatTemplate(FAMILIES[family].source, tokenizer.variables()), None, NOW)


def user(text: str) -> HistoryMessage:
    """Return a user's message."""
    return HistoryMessage("user", text)


def system(text: str) -> HistoryMessage:
    """Return a system message."""
    return HistoryMessage("system", text)


@dataclass(frozen=True)
class Answered:
    """A call that was answered."""

    placed: Placed
    call: ModelCall
    reply: ModelReply
    prompt: tuple[int, ...]
    sample: tuple[int, ...]

    @property
    def number(self) -> int:
        """The number of its conversation."""
        return self.placed.conversation.number

    def repeated(self, **changes: Any) -> HistoryMessage:
        """Return the reply as a harness repeats it."""
        calls = tuple(HistoryCall(call.id, call.name, call.arguments) for call in self.reply.calls)
        message = HistoryMessage("assistant", self.reply.text, self.reply.thought, calls)
        return dataclasses.replace(message, **changes)

    def result(self, text: str, index: int = 0, **changes: Any) -> HistoryMessage:
        """Return the result of one of the reply's calls."""
        call = self.reply.calls[index]
        return dataclasses.replace(HistoryMessage("tool", text, call_id=call.id, name=call.name), **changes)


@dataclass
class Player:
    """A rollout of one model family. Its sampler says what the test wants, or any ids."""

    family: str
    trained: frozenset[str] = field(default_factory=lambda: AgentSpec().trained)
    log: list[Answered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = FAMILIES[self.family]
        self.episode = Episode([Message(role="user", content="the task")])
        self.conversations = Conversations(self.episode, self.trained)
        self.chats: dict[str, ChatFormat] = {}
        self.parser: ToolCallParser | None = None
        if self.spec.parser is not None:
            self.parser = Registry().load("rollyard.tool_parsers", self.spec.parser)()

    def chat(self, tools: Sequence[dict[str, Any]]) -> ChatFormat:
        """Return the chat format with tools, which is the same object for the same tools."""
        key = json.dumps(tools)
        if key not in self.chats:
            self.chats[key] = dataclasses.replace(chat_format(self.family), tools=list(tools) or None)
        return self.chats[key]

    def place(
        self,
        messages: Sequence[HistoryMessage],
        tools: Sequence[dict[str, Any]] = BASH,
        marks: Marks | None = None,
        now: float = 0.0,
    ) -> tuple[Placed, ModelCall]:
        """Place a call."""
        call = ModelCall(tuple(messages), tuple(tools), marks=marks or Marks())
        return self.conversations.place(call, self.chat(tools), now), call

    def ask(
        self,
        messages: Sequence[HistoryMessage],
        text: str = "",
        calls: Calls = (),
        *,
        tools: Sequence[dict[str, Any]] = BASH,
        marks: Marks | None = None,
        thought: str | None = None,
        ids: Sequence[int] | None = None,
        now: float = 0.0,
    ) -> Answered:
        """Place a call and answer it."""
        placed, call = self.place(messages, tools, marks, now)
        if ids is None:
            ids = self.ids(text, calls, thought)
        return self.answer(placed, call, ids, now)

    def ids(self, text: str, calls: Calls = (), thought: str | None = None) -> list[int]:
        """Return what a well-behaved model samples."""
        return chat_format(self.family).tokenizer.encode(self.spec.turn(text, calls, thought))

    def answer(self, placed: Placed, call: ModelCall, ids: Sequence[int], now: float = 0.0) -> Answered:
        """Sample, record and send the reply to a call that was placed."""
        number = len(self.log)
        sample = Sample(
            tuple(ids),
            tuple(-0.5 - place / 1024 for place in range(len(ids))),
            tuple(f"v{number}" for _ in ids),
            "stop",
        )
        prompt = tuple(placed.prompt.ids)
        raw = self.conversations.record(placed, sample)
        recorder = placed.conversation.recorder
        thought = recorder.turns[-1].thought
        start = thought.answer if thought is not None and not recorder.channels else 0
        parsed = ParsedTurn(raw.strip())
        if self.parser is not None and call.tools:
            part = clean_turn(self.parser.parse(raw[start:]))
            parsed = ParsedTurn((raw[:start] + part.text).strip(), part.calls)
            said = part.text.strip()
        else:
            said = raw[start:].strip()
        self.conversations.add(placed, raw, parsed, "stop", 1.0)
        replied = tuple(
            ReplyCall(
                f"call_{number}_{index}",
                one.name,
                json.dumps(one.arguments) if one.error is None else raw,
                one.error or "",
            )
            for index, one in enumerate(parsed.calls)
        )
        shown = "" if thought is None else raw[thought.start : thought.end]
        finish: Finish = "tool_calls" if replied else "stop"
        reply = ModelReply(f"{number:x}", 0, "m", said, shown, replied, finish, Usage(len(prompt), len(ids)))
        self.conversations.sent(placed, reply, now)
        self.log.append(Answered(placed, call, reply, prompt, tuple(ids)))
        return self.log[-1]

    def record(self) -> ConversationsRecord:
        """Return the record as a worker sends it."""
        return self.conversations.branches()

    def parts(self) -> dict[int, tuple[list[Message], list[Turn], bool]]:
        """Return the messages and turns of each recorded conversation, and whether it is trained on."""
        record = self.record()
        parts = {one.number: (one.messages, one.turns, one.trained) for one in record.branches}
        own = "main" in self.trained
        return parts | {record.conversation: (self.episode.messages, self.episode.turns, own)}

    def branch(self, number: int) -> Branch:
        """Return the branch with a number."""
        (branch,) = (one for one in self.record().branches if one.number == number)
        return branch

    def check(self) -> None:
        """Check what a trainer relies on, from what was sent and sampled alone."""
        record = self.record()
        segments = lists([PackedSegment.model_validate(one.model_dump()) for one in record.segments])
        numbers = [one.number for one in record.branches]
        assert numbers == sorted(set(numbers) - {record.conversation})
        parts = self.parts()
        whole = {one.number: one.episode.messages for one in self.conversations._all.values()}
        for branch in record.branches:
            before = [] if branch.parent is None else whole[branch.parent][: branch.shared]
            assert before + branch.messages == whole[branch.number]
            assert branch.shared == len(before)
        ended: set[tuple[int, ...]] = {()}
        places = dict.fromkeys(parts, 0)
        masked, spans = 0, set()
        for one in self.log:
            messages, turns, trained = parts[one.number]
            turn = turns[places[one.number]]
            places[one.number] += 1
            segment = segments[turn.segment]
            # What was sent is, id for id, the record before the turn; what was sampled follows unchanged.
            assert segment.prompt_ids + segment.response_ids[: turn.start] == list(one.prompt)
            assert tuple(segment.response_ids[turn.start : turn.end]) == one.sample
            assert set(segment.loss_mask[turn.start : turn.end]) <= {int(trained)}
            masked += len(one.sample) * trained
            spans.add((turn.segment, turn.start))
            # A prompt begins with what was sent and sampled before, or is tokenized as a whole.
            assert one.prompt[: one.placed.prompt.known] in ended
            ended.add(one.prompt + one.sample)
            roles = [message.role for message in messages]
            assert roles.count("assistant") >= len(turns)
        assert len(spans) == len(self.log), "two turns have one place"
        assert all(places[number] == len(turns) for number, (_, turns, _) in parts.items())
        # Each sampled token of a trained conversation has mask 1 once, and nothing else has.
        assert sum(sum(segment.loss_mask) for segment in segments) == masked
        for segment in segments:
            for mask, logprob, version in zip(
                segment.loss_mask, segment.logprobs, segment.policy_versions, strict=True
            ):
                assert (logprob, version) == (0.0, "") if not mask else version.startswith("v")
