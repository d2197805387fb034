"""What of a turn is a thought and what is the answer, and what each handler makes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rollyard_crds.lease import LeaseRef
from rollyard_crds.task import Message, Task
from rollyard_crds.trajectory import Thought, Trajectory, Turn
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.handlers import Evaluation
from rollyard_pipeline.handlers.code.handler import CodeHandler
from rollyard_pipeline.handlers.isolated.handler import loaded_handler
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_pipeline.handlers.stem import StemHandler
from rollyard_pipeline.handlers.swe.handler import patch_of
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.rewards.format_checks import has_tags, own_texts
from rollyard_pipeline.rewards.shaping import episode_document
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.stages.evaluation import evaluate
from rollyard_pipeline.stages.rescoring import Rescorer
from rollyard_testing.families import FAMILIES
from rollyard_testing.pipeline.swelab import FIX_DIFF, SMALL, swe_task
from rollyard_testing.pipeline.thinking import TASK, judged, kept, played, said_by_hand, thinking_chat

SPECIAL = {
    "mistral": ("mistral_v11", ("[THINK]", "[/THINK]")),
    "kimi": ("chatml", ("◁think▷", "◁/think▷")),
    "kimi_k3": ("chatml", ("<|open|>", "<|close|>", "<|sep|>")),
    "gemma4": ("chatml", ("<|channel>", "<channel|>")),
}
"""Formats whose marks are special tokens. The first word of a case names one of these or a family."""


@cache
def chat_of(name: str) -> ChatFormat:
    family, *variables = name.split()
    family, special = SPECIAL.get(family, (family, ()))
    return thinking_chat(family, special, **dict.fromkeys(variables, False))


async def record_of(name: str, text: str, **options: Any) -> Trajectory:
    family = SPECIAL.get(name.split()[0], (name.split()[0],))[0]
    return kept(await played(chat_of(name), text, **{"end": FAMILIES[family].end, **options}))


# The family (with variables of its template that are false), the sampled turn, and the thought and the answer
# in it. `·` separates tokens. `…` at the end stands for a turn that its token limit has cut.
CASES = [
    ("qwen3", "7", "", "7"),
    ("qwen3", "<think>\nI count.\n</think>\n\n7", "I count.", "7"),
    ("qwen3", "<think>\n\n</think>\n\n7", "", "7"),
    ("qwen3", " \n<think>I count.</think>7", "I count.", "7"),
    ("qwen3", "<think>It is 7", "It is 7", ""),
    ("qwen3", "<think>It is 7…", "It is 7", ""),
    ("qwen3", "\ufeff<think>It is 7", "It is 7", ""),
    ("qwen3", "\u200b \u2060<think>I count.</think>7", "I count.", "7"),
    ("qwen3", "<think>a</think>\u200b<think>It is 7", "a</think>\u200b<think>It is 7", ""),
    ("qwen3", "<think>", "", ""),
    ("qwen3", "<think>a</think>", "a", ""),
    ("qwen3", "<think>a</think> The mark </think> ends it: 7", "a", " The mark </think> ends it: 7"),
    ("qwen3", "<think>a</think>Write <think> first: 7", "a", "Write <think> first: 7"),
    ("qwen3", "Write <think> first: 7", "", "Write <think> first: 7"),
    ("qwen3", "Sure. <think>It is 7", "", "Sure. <think>It is 7"),
    ("qwen3", "<think>a <think> b</think>7", "a <think> b", "7"),
    # One thought after another: all of them are thoughts.
    ("qwen3", "<think>a</think>\n<think>b</think>\n7", "a</think>\n<think>b", "7"),
    ("qwen3", "<think>a</think><think>It is 7", "a</think><think>It is 7", ""),
    # Spelled by ordinary tokens, a mark is text, unless the thought was opened in this way, too.
    ("qwen3", "<think>I end with <·/think> then.</think>7", "I end with </think> then.", "7"),
    ("qwen3", "<think>a<·/think>7", "a</think>7", ""),
    ("qwen3", "<·think>a<·/think>7", "a", "7"),
    ("qwen3", "<·think>a</think>7", "a", "7"),
    ("qwen3", "<·think>It is 7", "It is 7", ""),
    ("qwen3", "Write <·/think>: 7", "", "Write </think>: 7"),
    # Nothing has opened it, but the template looks for it, as it hides what has opened the thought.
    ("qwen3", "a</think>7", "a", "7"),
    ("chatml", "Write </think>: 7", "", "Write </think>: 7"),
    ("chatml", "<think>a</think>7", "a", "7"),
    # The prompt ends with <think>, or with an empty thought.
    ("qwen3_5", "I count.\n</think>\n\n7", "I count.", "7"),
    ("qwen3_5", "It is 7", "It is 7", ""),
    ("qwen3_5", "It is 7…", "It is 7", ""),
    ("qwen3_5", "", "", ""),
    ("qwen3_5", "<think>It is 7", "<think>It is 7", ""),
    ("qwen3_5", "a<·/think>7", "a</think>7", ""),
    ("qwen3_5", "a</think>Write </think>: 7", "a", "Write </think>: 7"),
    ("deepseek_r1", "I count.\n</think>\n\n7", "I count.", "7"),
    ("deepseek_r1", "It is 7", "It is 7", ""),
    ("qwen3 enable_thinking", "Write </think>: 7", "", "Write </think>: 7"),
    ("qwen3 enable_thinking", "<think>It is 7", "It is 7", ""),
    # Marks that are special tokens, and those of which the vocabulary has no token.
    ("mistral", "[THINK]I count.[/THINK]7", "I count.", "7"),
    ("mistral", "[THINK]It is 7", "It is 7", ""),
    ("mistral", "[THINK]a[·/THINK]7", "a[/THINK]7", ""),
    ("mistral_v11", "[THINK]I count.[/THINK]7", "I count.", "7"),
    ("kimi", "◁think▷I count.◁/think▷7", "I count.", "7"),
    ("kimi", "◁think▷It is 7", "It is 7", ""),
    ("chatml", "◁think▷I count.◁/think▷7", "I count.", "7"),
    ("chatml", "<seed:think>I count.</seed:think>7", "I count.", "7"),
    ("chatml", "<think:opensource>It is 7", "It is 7", ""),
    ("chatml", "<think:opensource>I count.</think:opensource>7", "I count.", "7"),
    # Kimi K3's marks consist of several tokens. Gemma 4 names the channel.
    ("kimi_k3", "<|open|>think<|sep|>I count.<|close|>think<|sep|>7", "I count.", "7"),
    ("kimi_k3", "<|open|>think<|sep|>It is 7", "It is 7", ""),
    ("kimi_k3", "<|open|>think<|sep|>a<|·close|>think<|·sep|>7", "a<|close|>think<|sep|>7", ""),
    ("kimi_k3", "<|open|>think<|sep|>a<|close|>think<|·sep|>7", "a<|close|>think<|sep|>7", ""),
    ("kimi_k3", "<|·open|>think<|sep|>a<|·close|>think<|sep|>7", "a", "7"),
    ("kimi_k3", "<|open|>think<|sep|>a<|·close|>think<|sep|>b<|close|>think<|sep|>7",
     "a<|close|>think<|sep|>b", "7"),
    ("gemma4", "<|channel>thought\nI count.\n<channel|>7", "I count.", "7"),
    ("gemma4", "<|channel>thought\nIt is 7", "It is 7", ""),
    ("gemma4", "<|channel>thought", "", ""),
    ("gemma4", "<|channel>thought\na<·channel|>7", "a<channel|>7", ""),
    ("gemma4", "<|channel>I count.<channel|>7", "I count.", "7"),
    # The channels of gpt-oss.
    ("gpt_oss", "7", "", "7"),
    ("gpt_oss", "<|channel|>final<|message|>7", "", "7"),
    ("gpt_oss", "<|channel|>analysis<|message|>It is 7", "It is 7", ""),
    ("gpt_oss", "<|channel|>analysis<|message|>It is 7…", "It is 7", ""),
    ("gpt_oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7",
     "a", "7"),
    ("gpt_oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7…",
     "a", "7"),
    ("gpt_oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final…", "a", ""),
    ("gpt_oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant…", "a", ""),
    ("gpt_oss", "<|channel|>final<|message|>7<|end|><|start|>assistant<|channel|>analysis<|message|>b",
     "b", ""),
    ("gpt_oss", "<|channel|>commentary<|message|>It is 7", "", ""),
    ("gpt_oss", "<|channel|>foo<|message|>It is 7", "", ""),
    ("gpt_oss", "<|channel|>Analysis<|message|>It is 7", "", ""),
    ("gpt_oss", "<|channel|>final-analysis<|message|>It is 7", "", ""),
    ("gpt_oss", "<|channel|>?<|message|>It is 7", "", ""),
    ("gpt_oss", "<|channel|> final<|message|>7", "", "7"),
    ("gpt_oss", "<|channel|>final <|constrain|>json<|message|>7", "", "7"),
    ("gpt_oss", "<|message|>7", "", "7"),
    ("gpt_oss", "<|channel|>analysis<|message|>a<|·channel|>final<|·message|>7",
     "a<|channel|>final<|message|>7", ""),
    ("gpt_oss", "<|channel|>analysis<|message|><|·end|><|end|><|start|>assistant<|channel|>final<|message|>7",
     "<|end|>", "7"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "thought", "answer"), CASES)
async def test_what_is_the_thought_and_what_the_answer(
    name: str, text: str, thought: str, answer: str
) -> None:
    options = {"end": ""} if text.endswith("…") else {}
    trajectory = await record_of(name, text.removesuffix("…"), **options)
    context = judged(trajectory)
    assert (context.thought, context.final_text) == (thought, answer)
    document = episode_document(context, Evaluation(0.0))
    assert (document["thought"], document["final_text"]) == (thought, answer)
    # A trainer that scores by itself has the same text.
    assert (trajectory.answer, trajectory.final_text) == (None, answer)
    whole = judged(trajectory, agent={"type": "oracle", "thoughts": "answer"})
    assert (whole.thought, whole.final_text) == ("", text.removesuffix("…").replace("·", ""))


@pytest.mark.parametrize(
    ("name", "text", "closed"),
    [
        ("qwen3", "<think>It is 7…", False),
        ("qwen3", "<think>a</think>…", True),
        ("qwen3", "<think>a</think><think>It is 7…", False),
        ("qwen3_5", "It is 7…", False),
        ("qwen3_5", "a<·/think>7…", False),
        ("qwen3_5", "a</think>7…", True),
        ("gemma4", "<|channel>thought\nIt is 7…", False),
        ("kimi_k3", "<|open|>think<|sep|>It is 7…", False),
        ("gpt_oss", "<|channel|>analysis<|message|>It is 7…", False),
        ("gpt_oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant…", True),
    ],
)
async def test_whether_a_turn_was_cut_before_the_end_of_its_thought(
    name: str, text: str, closed: bool
) -> None:
    (turn,) = (await record_of(name, text.removesuffix("…"), end="")).turns
    assert turn.thought is not None
    assert (turn.finish_reason, turn.thought.closed) == ("length", closed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def handlers() -> AsyncIterator[dict[str, Any]]:
    made = {"math": MathHandler(), "stem": StemHandler(), "code": CodeHandler()}
    yield made
    for handler in made.values():
        await handler.close()


HANDLED: dict[str, tuple[Task, str, str]] = {
    "math": (TASK, r"It is \boxed{7}.", r"Or \boxed{8}?"),
    "stem": (
        Task(id="t", prompt="?", answer="A", choices=["seven", "eight"]),
        "The answer is A.",
        "The answer is B?",
    ),
    "code": (
        Task.model_validate({"id": "t", "prompt": "?", "tests": {"cases": [{"input": "", "output": "7"}]}}),
        "```python\nprint(7)\n```\n",
        "```python\nprint(8)\n```\n",
    ),
}
"""For each handler a task, a right answer and a wrong one."""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", HANDLED)
async def test_each_handler_judges_the_answer_alone(
    name: str, handlers: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    task, right, wrong = HANDLED[name]
    provider = open_provider("process", run_dir=tmp_path_factory.mktemp("e"), node="n")
    await provider.start()
    sandbox = await provider.acquire(SandboxRequest(), LeaseRef(rollout="r", token=1))

    async def reward(trajectory: Trajectory | None, answer: str | None = None, **spec: Any) -> float:
        context = judged(trajectory, task, answer, **spec)
        context.client, context.workdir = sandbox.client, sandbox.workdir
        evaluation = await evaluate(handlers[name], context, 90.0)
        return evaluation.reward

    try:
        for family, text, given in (
            ("qwen3", f"<think>\n{wrong}\n</think>\n\n{right}", 1.0),
            ("qwen3", f"<think>\n{right}\n</think>\n\n{wrong}", 0.0),
            ("qwen3", f"<think>\n{right}", 0.0),
            ("qwen3", f"<think>a</think>\n{right}\nIt stands after </think>.", 1.0),
            ("qwen3", right, 1.0),
            ("qwen3_5", f"{wrong}\n</think>\n\n{right}", 1.0),
            ("qwen3_5", right, 0.0),
        ):
            assert await reward(await record_of(family, text)) == given, text
        unclosed = await record_of("qwen3", f"<think>\n{right}")
        assert await reward(unclosed, agent={"type": "oracle", "thoughts": "answer"}) == 1.0
        # What `submit` received is an answer, whatever it spells, and whatever the last message is.
        assert await reward(unclosed, f"<think>\n{right}") == 1.0
        assert await reward(unclosed, f"{right}\nIt stands before </think>.") == 1.0
    finally:
        await sandbox.close()
        await provider.release(sandbox.handle)
        await provider.aclose()


async def test_a_diff_is_read_from_the_answer() -> None:
    diff = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n \n"
    trajectory = await record_of("qwen3", f"<think>```diff\nno\n```</think>\n\n{diff}")
    assert patch_of(judged(trajectory).final_text) == diff
    assert patch_of(judged(await record_of("qwen3_5", f"```diff\n{diff}```")).final_text) == ""


async def test_a_diff_in_a_thought_is_not_applied(bubblewrap_works: None, tmp_path: Path) -> None:
    """A handler with tests in a sandbox, which evaluates kept records."""
    task = swe_task([], submission="answer", verdict="log")
    fenced = f"```diff\n{FIX_DIFF}```\n"
    spec = judged(None, handler="swe", sandbox=SMALL).spec
    provider = partial(open_provider, "bubblewrap", run_dir=tmp_path, node="n")
    rescorer = Rescorer("swe", spec, None, "me", provider=provider)
    await rescorer.check()
    records = [
        await record_of(family, text, task=task)
        for family, text in (("qwen3", f"<think>\na</think>\n{fenced}"), ("qwen3_5", fenced))
    ]
    found = await rescorer.rescored([(record, task) for record in records], datetime.now(UTC))
    await rescorer.close()
    assert [(one.status, one.reward, one.reward_reason) for one in found] == [
        ("succeeded", 1.0, ""),
        ("succeeded", 0.0, "PatchDoesNotApply"),
    ]


APART = """
class Judge(Handler):
    needs_sandbox = False

    async def eval(self, ctx):
        return Evaluation(float((ctx.thought, ctx.final_text, ctx.answer) == ("I count.", "7", None)))
"""


async def test_a_handler_in_a_process_of_its_own_gets_both(install: Callable[[str], None]) -> None:
    install(APART)
    handler = loaded_handler(Registry(), "steered")
    try:
        for text, reward in (("I count.</think>7", 1.0), ("I count. 7", 0.0)):
            context = judged(await record_of("qwen3_5", text))
            assert (await evaluate(handler, context, 30.0)).reward == reward
    finally:
        await handler.close()


async def test_calls_in_a_thought_do_not_count() -> None:
    call = '<tool_call>\n{"name": "submit", "arguments": {"answer": "7"}}\n</tool_call>'
    for family, text, answer, thought in (
        ("qwen3", f" <think>a</think>\nb {call}", "7", "a"),
        ("qwen3", f"<think>a {call}", None, f"a {call}"),
        ("qwen3", f"<think>a {call}</think>b", None, f"a {call}"),
        ("qwen3_5", f"a {call}", None, f"a {call}"),
    ):
        if family == "qwen3_5":
            text = text.replace(call, "<tool_call>\n<function=submit>\n<parameter=answer>\n7\n</parameter>\n"
                                "</function>\n</tool_call>")  # fmt: skip
            thought = text
        episode = await played(chat_of(family), text, tools=True)
        assert episode.answer == answer
        assert judged(kept(episode)).thought == thought
    call_of_channels = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.submit"
        '<|message|>{"answer": "7"}'
    )
    episode = await played(chat_of("gpt_oss"), call_of_channels, end="<|call|>", tools=True)
    assert (episode.answer, judged(kept(episode)).thought, judged(kept(episode)).final_text) == ("7", "a", "")
    assert (kept(episode).answer, kept(episode).final_text) == ("7", "7")
    # The content of a message that makes a call is without it, and the places are those in the content.
    episode = await played(chat_of("qwen3"), f"  <think>a</think>\n\nb {call}", tools=True)
    assert episode.messages[1].content == "<think>a</think>\n\nb"
    assert judged(kept(episode)).final_text == "b"


async def test_a_form_has_the_mark_with_which_the_prompt_opened_the_thought() -> None:
    for family, text, form in (
        ("qwen3", "<think>a</think><answer>7</answer>", True),
        ("qwen3_5", "a</think><answer>7</answer>", True),
        ("qwen3_5", "<think>a</think><answer>7</answer>", False),
        ("qwen3_5", "<answer>7</answer>", False),
        ("qwen3", "a</think><answer>7</answer>", False),
        ("mistral", "[THINK]a[/THINK]<answer>7</answer>", False),
    ):
        texts = own_texts(TASK, await record_of(family, text))
        assert has_tags(texts[-1], ["think", "answer"]) is form, text


def test_messages_of_the_task_are_no_answer() -> None:
    opening = [
        Message(role="user", content="2 + 2?"),
        Message(role="assistant", content="<think>a</think>7"),
        Message(role="user", content="3 + 4?"),
    ]
    task = Task(id="t", messages=opening, answer="7")
    silent = said_by_hand("").model_copy(update={"messages": opening})
    assert (judged(silent, task).final_text, judged(silent, task).thought) == ("", "")
    assert (silent.answer, silent.final_text) == (None, "")
    assert own_texts(task, silent) == []
    assert (judged(None).final_text, judged(None).thought) == ("", "")


def test_where_only_the_text_is_known_it_has_to_open_the_thought() -> None:
    for text, thought, answer in (
        ("<think>a</think>\n\n7", "a", "7"), ("<think>7", "7", ""), ("[THINK]a[/THINK]7", "a", "7"),
        ("\ufeff<think>7", "7", ""), ("\u200b\n<think>a</think>7", "a", "7"),
        ("Sure. <think>7", "", "Sure. <think>7"), ("7", "", "7"),
        ("Write </think>: 7", "", "Write </think>: 7"),
    ):  # fmt: skip
        context = judged(said_by_hand(text))
        assert (context.thought, context.final_text) == (thought, answer)


def test_a_turn_without_a_thought_does_not_mention_one() -> None:
    turn = Turn(segment=0, start=0, end=1, finish_reason="stop")
    assert "thought" not in turn.model_dump()
    assert "thought" not in turn.model_dump_json()
    thought = Thought(start=0, end=1, answer=2)
    assert Turn.model_validate(turn.model_copy(update={"thought": thought}).model_dump()).thought == thought
