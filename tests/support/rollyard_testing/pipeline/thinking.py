"""Turns of models that think, sampled token by token, as Run records them.

In the texts here, `·` separates tokens: `<·/think>` is `</think>` spelled by ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollyard_crds import RolloutJobSpec
from rollyard_crds.rolloutjob import AgentSpec, SamplingSpec
from rollyard_crds.task import Message, Task
from rollyard_crds.trajectory import Trajectory
from rollyard_pipeline.agents.base import AgentContext
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import MARK, ChatTokenizer
from rollyard_pipeline.handlers import StageContext
from rollyard_pipeline.tool_parsers.base import ChatModel
from rollyard_pipeline.tool_parsers.detect import AutoParser
from rollyard_pipeline.tool_parsers.renderers import Readers
from rollyard_pipeline.tools.base import ToolContext
from rollyard_pipeline.tools.shipped import SubmitTool
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.recorder import Sample, TrajectoryRecorder
from tokenizers import Tokenizer

from rollyard_testing.crds.segments import lists
from rollyard_testing.families import FAMILIES, train_tokenizer

TASK = Task(id="t", prompt="How many?", answer="7")


def thinking_chat(family: str, special: Sequence[str] = (), **variables: Any) -> ChatFormat:
    """Return the chat format of a family, with more special tokens and variables of the template."""
    bpe = Tokenizer.from_str(train_tokenizer().to_str())
    bpe.add_special_tokens(list(special))
    tokenizer = ChatTokenizer(bpe, dict(FAMILIES[family].variables))
    return ChatFormat(tokenizer, ChatTemplate(FAMILIES[family].source, tokenizer.variables()), None,
                      variables=variables)  # fmt: skip


class _Session:
    """A session whose turns the test gives."""

    def __init__(self, *turns: tuple[list[int], str]) -> None:
        self.model_seconds = 0.0
        self._turns = list(turns)

    async def context_limit(self) -> int | None:
        return None

    async def turn(self, prompt: Sequence[int], max_tokens: int, turn: int) -> Sample:
        ids, finish = self._turns.pop(0)
        return Sample(tuple(ids), (-0.5,) * len(ids), ("v",) * len(ids), finish)  # type: ignore[arg-type]


async def played(
    chat: ChatFormat, text: str, *, end: str = "<|im_end|>", tools: bool = False, task: Task = TASK
) -> Episode:
    """Return an episode in which the policy has sampled one turn, and its calls were run.

    Args:
        chat: The model's chat format.
        text: The text of the turn.
        end: The token that ends it. Without one, the turn is cut by its length.
        tools: Whether the tool `submit` is offered.
        task: The task.
    """
    ids = chat.tokenizer.encode(text.replace("·", MARK) + end)
    opening = task.chat()
    episode = Episode(
        opening, TrajectoryRecorder(chat, [one.model_dump(exclude_none=True) for one in opening])
    )
    model = ChatModel("", Path(), chat.template.source)
    parser = (await AutoParser().for_model(model, {}, Readers()))[1] if tools else None
    session: Any = _Session((ids, "stop" if end else "length"))
    client: Any = object()  # `submit` uses no sandbox.

    async def own_end() -> str:
        return ""

    context = AgentContext(
        task=task, spec=AgentSpec(max_context_tokens=10_000_000), sampling=SamplingSpec(max_tokens=1_000_000),
        episode=episode, tools={"submit": SubmitTool()} if tools else {},
        tool_context=ToolContext(client=client, timeout=1.0, max_output_bytes=100, own_end=own_end),
        parser=parser, session=session,
    )  # fmt: skip
    turn = await context.turn()
    assert turn is not None
    await context.call_all(turn.calls)
    return episode


def kept(episode: Episode) -> Trajectory:
    """Return the record of an episode, as another process reads it."""
    assert episode.recorder is not None
    record = Trajectory(
        id="r", job="j", task_id="t", group_id="g", sample_index=0,
        segments=lists(episode.recorder.segments()), messages=episode.messages, turns=episode.turns,
    )  # fmt: skip
    return Trajectory.model_validate_json(record.line())


def judged(
    trajectory: Trajectory | None, task: Task = TASK, answer: str | None = None, **spec: Any
) -> StageContext:
    """Return the context of an Eval.

    Args:
        trajectory: What Run recorded.
        task: The task.
        answer: What `submit` received.
        spec: Fields of the job's spec.
    """
    base: Mapping[str, Any] = {"tasks": {"stream": True}, "handler": "math", "agent": {"type": "oracle"}}
    return StageContext(
        task=task, spec=RolloutJobSpec.model_validate({**base, **spec}), rollout="r", sample_index=0,
        timeout=30.0, carry={} if answer is None else {"answer": answer}, trajectory=trajectory,
    )  # fmt: skip


def said_by_hand(text: str) -> Trajectory:
    """Return a record of which only the text is known."""
    messages = [Message(role="user", content="How many?"), Message(role="assistant", content=text)]
    return Trajectory(id="r", job="j", task_id="t", group_id="g", sample_index=0, messages=messages)
