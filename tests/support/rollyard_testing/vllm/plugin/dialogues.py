"""A handler, agents and a tool for the tests: random multi-turn dialogues that need no sandbox.

They are installed like any extension, by the entry points of a distribution (see product.py). The model of
the tests can only talk at random, so the dialogue continues whatever it said: its calls are answered by the
tool `lookup`, and the user answers anything else.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

from rollyard_pipeline.agents import Agent, AgentContext
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.tools.base import Tool, ToolContext, ToolResult
from rollyard_pipeline.trajectories.recorder import Prompt, Sample
from tokenizers import Tokenizer

PIECES = (
    "ok", "no, look again", "  two spaces first", "a\nb\n\nc\n", "naïve façade, 数字 42", "🙂 then 🧪",
    "\ttabs\t", "<tool_response>", "<|im_end|>", "</s>", "<think>hm</think>", '{"key": "value"}', "[/INST]",
    "What is the word for it?", "exit code 1", "0123456789", "...", "'quoted' and \"quoted\"",
)  # fmt: skip
"""What tools and users say, with special tokens' text and odd whitespace among it."""


def words(rng: random.Random) -> str:
    """Return up to six pieces, or much of one."""
    if rng.random() < 0.1:
        return rng.choice(PIECES) * 40
    return " ".join(rng.choice(PIECES) for _ in range(rng.randint(1, 6)))


class Lookup(Tool):
    """A tool that looks a word up, with a random result."""

    name: ClassVar[str] = "lookup"
    description: ClassVar[str] = "Look a word up."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"key": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["key"],
    }
    needs_sandbox: ClassVar[bool] = False

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        return ToolResult(words(random.Random(repr(arguments))))


class Dialogue(Agent):
    """An agent that plays `metadata.turns` turns, and sleeps `metadata.pause` seconds between them, as slow
    tools do.
    """

    async def run(self, ctx: AgentContext) -> None:
        turns, pause = int(ctx.task.metadata["turns"]), float(ctx.task.metadata.get("pause", 0))
        rng = random.Random()
        for number in range(turns):
            turn = await ctx.turn()
            if turn is None or number == turns - 1:
                return
            rng.seed(f"{ctx.task.id} {number} {turn.text}")
            await asyncio.sleep(pause * rng.random())
            if turn.calls:
                await ctx.call_all(turn.calls[:3])
            else:
                ctx.say(words(rng))


class Retokenizing(Dialogue):
    """An agent that does what agents over chat APIs do and what none must do: it keeps the text of a turn,
    and makes ids of it again. Log-probabilities are cut or filled up to the new length.
    """

    async def run(self, ctx: AgentContext) -> None:
        recorder = ctx.episode.recorder
        assert recorder is not None
        record = recorder.record
        tokenizer = Tokenizer.from_file(ctx.task.metadata["tokenizer"])

        def wrong(prompt: Prompt, sample: Sample) -> str:
            text = tokenizer.decode(list(sample.token_ids), skip_special_tokens=False)
            ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            filled = (*sample.logprobs, *[-1.0] * len(ids))[: len(ids)]
            versions = (sample.policy_versions[0],) * len(ids)
            return record(prompt, Sample(ids, filled, versions, sample.finish_reason))

        recorder.record = wrong  # type: ignore[method-assign]
        await super().run(ctx)


class Free(Handler):
    """A handler that needs no sandbox, and for which every episode is worth 1."""

    needs_sandbox: ClassVar[bool] = False

    async def eval(self, ctx: StageContext) -> Evaluation:
        return Evaluation(1.0)
