"""Streamed replies: what is shown early is the beginning of the whole reply, whatever the policy writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.gateway.streaming import GrowingReply
from rollyard_pipeline.registry import TOOL_PARSERS, Registry
from rollyard_pipeline.tool_parsers.base import ConfigurableParser, ToolCallParser
from rollyard_pipeline.tool_parsers.json_calls import DeepSeekParser
from rollyard_pipeline.trajectories.parts import TurnParts, turn_parts
from rollyard_pipeline.trajectories.recorder import Sample, TrajectoryRecorder
from rollyard_testing.families import FAMILIES
from rollyard_testing.pipeline.thinking import thinking_chat

USER = [{"role": "user", "content": "how many files are there?"}]
NAMES = sorted(FAMILIES)
PIECES = (
    "I count the files.", " ", "\n\n", "é", "日本語", "🙂🏽", "\ufeff", "x" * 40, "{", "}", "[", "<", "</",
    "<th", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "<function=bash>", "[TOOL_CALLS]",
    "<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant",
    "<｜tool▁calls▁begin｜>", "<|python_tag|>", '{"name": "bash", "parameters": {}}',
)  # fmt: skip


@cache
def chat_of(name: str) -> ChatFormat:
    return thinking_chat(name, ())


def parser_of(name: str) -> ToolCallParser | None:
    family = FAMILIES[name]
    if family.parser is None:
        return None
    if family.parser == "deepseek_v3":
        return DeepSeekParser()
    parser: ToolCallParser = Registry({}).load(TOOL_PARSERS, family.parser)()
    if isinstance(parser, ConfigurableParser):
        parser.configure(family.source, {})
    return parser


async def whole(name: str, ids: list[int]) -> TurnParts:
    chat = chat_of(name)
    recorder = TrajectoryRecorder(chat, USER)
    prompt = recorder.prompt()
    zeros, versions = tuple(0.0 for _ in ids), tuple("v" for _ in ids)
    text = recorder.record(prompt, Sample(tuple(ids), zeros, versions, "stop"))
    thought = recorder.turns[-1].thought
    return await turn_parts(parser_of(name), text, thought, chat.channels, ids, prompt.ids)


def upto(ids: list[int], end: int | None = None) -> Callable[[int], list[int]]:
    return lambda first: ids[first:end]


def streamed(name: str, ids: list[int], step: int) -> list[tuple[str, str]]:
    """Return the thought and the answer that are shown after each step."""
    chat = chat_of(name)
    growing = GrowingReply(chat, parser_of(name), TrajectoryRecorder(chat, USER).prompt().rendering.text)
    shown = []
    for end in range(step, len(ids) + step, step):
        growing.update(upto(ids, end))
        shown.append((growing.thought, growing.text))
    return shown


def check(shown: list[tuple[str, str]], parts: TurnParts, turn: str) -> None:
    for before, after in pairwise(shown):
        assert after[0].startswith(before[0]), turn
        assert after[1].startswith(before[1]), turn
    thought, text = shown[-1]
    assert parts.thought.startswith(thought), turn
    assert parts.answer.startswith(text), turn
    for early, late in shown:
        assert not late or early == parts.thought, f"text before the end of the thought: {turn}"


@pytest.mark.parametrize("name", NAMES)
async def test_a_usual_turn_is_shown_as_it_comes(name: str) -> None:
    family, chat = FAMILIES[name], chat_of(name)
    thought = "I look into the folder, naïvely 🙂." if family.think else None
    calls = [("bash", {"command": "ls"})] if family.calls else []
    for made in ([], calls):
        said = "" if made and name == "gpt_oss" else "There are seven files.\n\nI am sure. \n"
        turn = family.turn(said, made, thought)
        ids = chat.tokenizer.encode(turn)
        parts = await whole(name, ids)
        assert parts.answer == said.strip()
        for step in (1, 2, 7):
            shown = streamed(name, ids, step)
            check(shown, parts, turn)
            assert shown[-1][0] == parts.thought == (thought or ""), turn
            assert shown[-1][1] == said.strip(), turn
            steps = len(said + (thought or "")) // (4 * step)
            assert len(set(shown)) > steps // 4, "most of it is held back"


@pytest.mark.parametrize("name", NAMES)
async def test_what_is_shown_begins_the_whole_reply(name: str) -> None:
    """Any mixture of marks, parts of marks, white space, and bytes of characters."""
    rng = random.Random(f"stream {name}")
    chat = chat_of(name)
    early = 0
    for _ in range(150):
        turn = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
        ids = chat.tokenizer.encode(turn)
        if rng.random() < 0.3:  # The marks are spelled by ordinary tokens.
            ids = chat.tokenizer.encode(chat.tokenizer.escape(turn))
        if rng.random() < 0.3:  # A byte is missing somewhere.
            del ids[rng.randrange(len(ids))]
        ids += chat.tokenizer.encode(FAMILIES[name].end)[: rng.randint(0, 1)]
        if not ids:
            continue
        parts = await whole(name, ids)
        shown = streamed(name, ids, rng.randint(1, 5))
        check(shown, parts, repr(turn))
        early += bool(shown[-1][0] or shown[-1][1])
    assert early > 20, "nothing was ever shown"


def test_tokens_that_are_replaced_are_noticed() -> None:
    chat = chat_of("chatml")
    growing = GrowingReply(chat, None, "")
    ids = chat.tokenizer.encode("there are seven files")
    assert growing.update(upto(ids))
    assert not growing.update(upto([*ids[:-2], ids[0], *ids[-1:], *ids]))
    assert growing.update(upto([*ids, *ids]))


def test_tokens_that_are_missing_for_a_while_come_again() -> None:
    """A request that has failed has no tokens until it is certain that they can be kept."""
    chat = chat_of("chatml")
    growing = GrowingReply(chat, None, "")
    ids = chat.tokenizer.encode("there are seven files in all of these folders")
    assert growing.update(upto(ids, -4))
    shown = growing.text
    for end in (0, 3, len(ids) - 5):
        assert growing.update(upto(ids, end))
        assert growing.text == shown
    assert growing.update(upto(ids))
    assert growing.text == "there are seven files in all of these folders"


def test_a_character_is_shown_once_it_is_whole() -> None:
    chat = chat_of("chatml")
    growing = GrowingReply(chat, None, "")
    ids = chat.tokenizer.encode("a🙂b")
    texts = []
    for end in range(1, len(ids) + 1):
        growing.update(upto(ids, end))
        texts.append(growing.text)
    assert sorted(set(texts), key=len) == ["a", "a🙂", "a🙂b"]


def test_endless_broken_bytes_are_held_back() -> None:
    chat = chat_of("chatml")
    growing = GrowingReply(chat, None, "")
    (broken,) = set(chat.tokenizer.encode("🙂")[:1])
    ids = [*chat.tokenizer.encode("a "), *[broken] * 600]
    for end in range(1, len(ids) + 1):
        growing.update(upto(ids, end))
    assert growing.text == "a"
