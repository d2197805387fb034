"""The recorded outputs of the suite CanIToolCall, read as Run reads a sampled turn.

A turn's ids are recorded, its thought is taken apart, and the parser that the chat template requires reads
the rest with the schemas of the offered tools. The models' own tokenizers and templates are not at hand, so
a byte-level tokenizer has the marks of all families as tokens, and a template names a family's marks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from canitoolcall.checks import run_checks
from canitoolcall.fixtures import Family, Fixture
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status
from rollyard_crds.rolloutjob import AgentSpec, SamplingSpec
from rollyard_crds.task import Task
from rollyard_pipeline.agents.base import AgentContext, AgentTurn
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.chat.harmony import split_channels
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import ChatTokenizer
from rollyard_pipeline.tool_parsers.base import ChatModel
from rollyard_pipeline.tool_parsers.detect import AutoParser
from rollyard_pipeline.tool_parsers.renderers import Readers
from rollyard_pipeline.tools.base import ToolContext
from rollyard_pipeline.tools.shipped import SubmitTool
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.recorder import Sample, TrajectoryRecorder
from tokenizers import AddedToken, Tokenizer

from rollyard_testing.families import train_tokenizer

_TEMPLATE: Final = (
    "{{# {marks} #}}{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}{{{{ opening }}}}"
)
_MARKS: Final = {
    "qwen3-hermes": '<tool_call> "arguments": </tool_call> </think>',
    "qwen3-xml": "<tool_call> <function= <parameter= </think>",
    "Llama-3": "<|python_tag|>",
    "Llama-4": "[func_name1(params_name1=params_value1)]",
    "mistral": "[TOOL_CALLS] [ARGS] [THINK] [/THINK]",
    "gpt-oss": "<|channel|> <|message|>",
    "DeepSeek-V3-0324": "<｜tool▁calls▁begin｜> </think>",
    "DeepSeek-V3.1": "<｜tool▁calls▁begin｜> </think>",
    "deepseek": "<｜DSML｜invoke </think>",
    "glm": "<tool_call> <arg_key> <arg_value> </think>",
    "Kimi-K2": "<|tool_calls_section_begin|> </think>",
    "Kimi-K3": "<|open|> <|close|> <|sep|>",
    "gemma4": "<|tool_call> <tool_call|> <|channel> <channel|>",
}
"""What the chat templates contain by which a parser is chosen, by family or by the beginning of a model's
name. A template that does not exist (DeepSeek has an encoder since V3.2) is one that a user writes."""
_STOP: Final = "<stop>"
"""The end-of-turn token of the tokenizer. The recorded outputs end before that of the model."""


class _Session:
    """A session that samples one given turn."""

    def __init__(self, ids: Sequence[int], finish: str) -> None:
        self.model_seconds = 0.0
        self._ids, self._finish = ids, finish

    async def context_limit(self) -> int | None:
        return None

    async def turn(self, prompt: Sequence[int], max_tokens: int, turn: int) -> Sample:
        size = len(self._ids)
        return Sample(tuple(self._ids), (-0.5,) * size, ("v",) * size, self._finish)  # type: ignore[arg-type]


async def read_turn(fixture: Fixture, family: Family) -> ParseResult:
    """Return how Run reads a recorded output.

    Only calls that would be run are returned: a malformed call, which is answered with an error, is none.
    """
    chat = _chat(fixture, family)
    ids = chat.tokenizer.encode(fixture.raw_output + ("" if fixture.truncated else _STOP))
    task = Task(id="t", prompt="?")
    opening = [message.model_dump(exclude_none=True) for message in task.chat()]
    episode = Episode(task.chat(), TrajectoryRecorder(chat, opening))
    functions = [tool.get("function", tool) for tool in fixture.tools]
    schemas = {one["name"]: one.get("parameters") or {} for one in functions}
    model = ChatModel(fixture.reference_model, Path(), chat.template.source)
    _, parser = await AutoParser().for_model(model, schemas, Readers())
    session: Any = _Session(ids, "length" if fixture.truncated else "stop")
    client: Any = object()  # No call is run.
    context = AgentContext(
        task=task, spec=AgentSpec(max_context_tokens=1_000_000), sampling=SamplingSpec(max_tokens=100_000),
        episode=episode, tools={"submit": SubmitTool()},
        tool_context=ToolContext(client=client, timeout=1.0, max_output_bytes=100), parser=parser,
        session=session,
    )  # fmt: skip
    turn = await context.turn()
    assert turn is not None
    reasoning, content = _apart(turn, episode, fixture.raw_output if chat.channels else None)
    calls = tuple(
        ParsedToolCall(call.name, json.dumps(call.arguments)) for call in turn.calls if call.error is None
    )
    return ParseResult(content=content, reasoning_content=reasoning, tool_calls=calls)


def _apart(turn: AgentTurn, episode: Episode, channels: str | None) -> tuple[str, str]:
    """Return the thought of a turn, and its text outside its thought and its calls."""
    if channels is not None:
        # The parser puts what stands in `analysis` before a call into the text, as templates do.
        parts = split_channels(channels, str, calls=False)
        return parts.get("thinking", ""), parts["content"] if turn.calls else turn.text
    message, thought = episode.messages[-1], episode.turns[-1].thought
    if thought is None:
        return "", turn.text
    # The places are those in the message, which is the whole text if a call is malformed or there is none.
    blank = 0 if message.tool_calls else len(message.content) - len(message.content.lstrip())
    return message.content[thought.start : thought.end], turn.text[max(thought.answer - blank, 0) :]


def problem(fixture: Fixture, family: Family, parse: ParseResult) -> str:
    """Return what the suite's own checks find wrong with a parse, or "" if it is right.

    The calls must be the expected ones, with the arguments' values and types; the thought and the text
    outside of calls must be the expected ones but for white space around them.
    """
    rows = run_checks(fixture, family, Observation(nonstream=parse, streams={}))
    wrong = [row for row in rows if row.status not in (Status.PASS, Status.SOFT_PASS)]
    return "; ".join(f"{row.check}: {row.detail}" for row in wrong)


def _chat(fixture: Fixture, family: Family) -> ChatFormat:
    model = fixture.reference_model.partition("/")[2]
    known = family.reference_for(fixture.reference_model)
    opening = fixture.generation_prompt or (known.default_generation_prompt if known else "") or ""
    marks = next(marks for name, marks in _MARKS.items() if model.startswith(name) or family.slug == name)
    tokenizer = _tokenizer(family)
    template = ChatTemplate(_TEMPLATE.format(marks=marks), tokenizer.variables())
    return ChatFormat(tokenizer, template, None, variables={"opening": opening})


@cache
def _trained() -> str:
    return train_tokenizer().to_str()


@cache
def _tokenizer(family: Family) -> ChatTokenizer:
    """Return a tokenizer in which the marks of a family are tokens.

    They are special if they have a bar, like those of the models' own tokenizers that spell one.
    """
    bpe = Tokenizer.from_str(_trained())
    for mark in (*family.markers, _STOP):
        if "=" not in mark and mark != "｜DSML｜":
            special = "|" in mark or "｜" in mark or mark == _STOP
            bpe.add_tokens([AddedToken(mark, special=special, normalized=False)])
    return ChatTokenizer(bpe, {})
