"""How a job's `reward` makes a reward of components: weights, penalties, checks of form and functions."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.fields.reward import FormatCheck, OverlongPenalty, RewardServiceSpec
from rollyard_crds.lease import Lease, RewardRequest, RewardResponse, StageTimes
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Message, Task, ToolCall
from rollyard_crds.trajectory import Segment, Trajectory
from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable
from rollyard_pipeline.errors import ChildFailed, PermanentFailure, PipelineError, TaskInvalid
from rollyard_pipeline.handlers import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_pipeline.registry import REWARD_FUNCTIONS, Registry
from rollyard_pipeline.rewards.components import component_problems
from rollyard_pipeline.rewards.format_checks import FormatChecks, has_tags
from rollyard_pipeline.rewards.shaping import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_TEXT,
    Rewards,
    episode_document,
    service_score,
)
from rollyard_pipeline.worker.worker import stage_failure
from rollyard_process.log_text import LogFormatter
from rollyard_testing.pace import patience

FUNCTIONS = """
import os, time
from rollyard_pipeline.handlers import Evaluation
from rollyard_pipeline.rewards import RewardFunction

class Length(RewardFunction):
    components = ("characters",)
    def score(self, episode):
        print("a line that is no answer")
        return Evaluation(float(len(episode["final_text"]) < 10), {"characters": len(episode["final_text"])})

class Raising(RewardFunction):
    def score(self, episode):
        raise KeyError("no such\\nthing")

class Repeating(RewardFunction):
    def score(self, episode):
        raise ValueError(episode["final_text"])

class Hanging(RewardFunction):
    def score(self, episode):
        while True:
            pass

class Dying(RewardFunction):
    def score(self, episode):
        os._exit(0)

class Wrong(RewardFunction):
    def score(self, episode):
        give = episode["task"]["metadata"]["give"]
        return {"nan": float("nan"), "huge": 10**9, "none": None, "yes": True}[give]
"""


def spec(reward: Mapping[str, Any] | None, handler: str = "math") -> RolloutJobSpec:
    return RolloutJobSpec.model_validate(
        {"tasks": {"stream": True}, "handler": handler, "agent": {"type": "oracle"}, "reward": reward}
    )


def context(reward: Mapping[str, Any] | None, *said: str, tokens: int = 0, **task: Any) -> StageContext:
    messages = [
        Message(role="user", content="q"),
        *(Message(role="assistant", content=text) for text in said),
    ]
    segment = Segment(
        prompt_ids=[1], response_ids=[2] * tokens, loss_mask=[1] * tokens, logprobs=[-0.5] * tokens,
        policy_versions=["v"] * tokens,
    )  # fmt: skip
    trajectory = Trajectory(
        id="r", job="j", task_id="t", group_id="t", sample_index=0, messages=messages, segments=[segment]
    )
    return StageContext(
        task=Task(id="t", prompt="q", answer="4", **task), spec=spec(reward), rollout="r", sample_index=0,
        timeout=5.0, trajectory=trajectory,
    )  # fmt: skip


@pytest.fixture
async def rewards() -> AsyncIterator[Rewards]:
    made = Rewards(lambda _: Registry())
    yield made
    await made.close()


async def shaped(rewards: Rewards, given: StageContext, evaluation: Evaluation, **more: Any) -> Evaluation:
    return await rewards.shaped(MathHandler(), given, evaluation, more.get("ask"))


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (15, 0.0), (16, -0.2), (18, -0.6), (20, -1.0), (21, -1.0), (10_000, -1.0)],
)
def test_the_penalty_is_that_of_the_paper(tokens: int, penalty: float) -> None:
    """DAPO, equation 13: 0 up to Lmax - Lcache, (Lmax - Lcache - |y|) / Lcache up to Lmax, then -1."""
    assert OverlongPenalty(max_tokens=20, buffer_tokens=5).penalty(tokens) == pytest.approx(penalty)
    assert OverlongPenalty(max_tokens=20, buffer_tokens=5, factor=0.5).penalty(tokens) == pytest.approx(
        penalty / 2
    )


async def test_components_are_weighed_and_kept(rewards: Rewards) -> None:
    reward = {
        "weights": {"handler": 1.0, "think": 0.25, "answered": -0.5, "verify_timeout": 3.0},
        "overlong": {"maxTokens": 10, "bufferTokens": 5},
        "format": [{"name": "think", "tags": ["think", "answer"]}, {"name": "polite", "pattern": "please"}],
    }
    given = context(reward, "<think>2+2</think><answer>4</answer>", tokens=7)
    found = await shaped(rewards, given, Evaluation(1.0, {"answered": 1.0}))
    # The component that the handler left out counts as 0, and the check without a weight only says something.
    assert found.reward == pytest.approx(1.0 + 0.25 - 0.5 - 0.4)
    assert found.components == {
        "answered": 1.0, "handler": 1.0, "overlong": pytest.approx(-0.4), "think": 1.0, "polite": 0.0,
    }  # fmt: skip
    assert found.reason == ""


async def test_a_job_without_the_section_keeps_what_the_handler_says(rewards: Rewards) -> None:
    evaluation = Evaluation(0.5, {"answered": 1.0}, "TestTimeout")
    assert await shaped(rewards, context(None), evaluation) is evaluation


@pytest.mark.attack(
    "the sandbox is broken so that a penalty does not apply",
    boundary="evaluation",
    surface="`reward`",
    stopped_by="penalties hold for every evaluation",
)
async def test_a_penalty_is_not_avoided_by_breaking_the_sandbox(rewards: Rewards) -> None:
    given = context({"overlong": {"maxTokens": 10, "bufferTokens": 5}}, "x", tokens=50)
    found = await shaped(rewards, given, Evaluation(0.0, {}, "SandboxSabotaged"))
    assert (found.reward, found.reason) == (-1.0, "SandboxSabotaged")


async def test_the_sum_is_bounded_and_names_are_not_taken_twice(rewards: Rewards) -> None:
    given = context({"weights": {"handler": 1e6}}, "x")
    with pytest.raises(PermanentFailure, match=r"spec\.reward\.weights: the reward is 2000000\.0"):
        await shaped(rewards, given, Evaluation(2.0))
    with pytest.raises(PermanentFailure, match="component 'handler' is reserved"):
        await shaped(rewards, context({}, "x"), Evaluation(0.0, {"handler": 1.0}))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (
            {"weights": {"speling": 1.0}},
            r"spec\.reward\.weights: there is no component 'speling'; there are answered, handler,",
        ),
        (
            {"format": [{"name": "answered", "pattern": "x"}]},
            r"spec\.reward\.format\[0\]\.name: the handler has a component 'answered', too",
        ),
        (
            {"service": {"url": "http://a/", "components": ["answered"]}},
            r"spec\.reward\.service\.components: 'answered' has another meaning",
        ),
        (
            {
                "service": {"url": "http://a/", "components": ["style", "polite"]},
                "format": [{"name": "polite", "pattern": "x"}],
            },
            r"spec\.reward\.service\.components: 'polite' has another meaning",
        ),
        (
            {"service": {"url": "http://a/", "components": ["test_timeout"]}},
            r"spec\.reward\.service\.components: 'test_timeout' has another meaning",
        ),
        (
            {"format": [{"name": "fine", "pattern": "x"}, {"name": "test_timeout", "pattern": "x"}]},
            r"spec\.reward\.format\[1\]\.name: the handler has a component 'test_timeout', too",
        ),
        (
            {"weights": {"handler": 1.0, "answered": 1.0, "polite": 1.0}},
            r"spec\.reward\.weights: there is no component 'polite'",
        ),
    ],
)
async def test_names_are_checked_before_anything_starts(rewards: Rewards, reward: Any, words: str) -> None:
    with pytest.raises(PermanentFailure, match=words) as caught:
        await rewards.check(MathHandler(), spec(reward))
    assert not caught.value.retryable


@pytest.mark.parametrize("name", ["answered", "test_timeout", "polite", "handler"])
def test_a_function_has_no_component_that_means_something_else(name: str) -> None:
    reward = spec({**function("f"), "format": [{"name": "polite", "pattern": "x"}]}).reward
    assert component_problems(reward, ["answered"], ["style", "neat"]) == []
    words = f"spec.reward.function: component '{name}' has another meaning"
    assert component_problems(reward, ["answered"], ["style", name]) == [words]


async def test_a_handler_that_declares_no_component_has_none_to_weigh(rewards: Rewards) -> None:
    class Silent(Handler):
        async def eval(self, ctx: StageContext) -> Evaluation:
            return Evaluation(0.0)

    await rewards.check(Silent(), spec({"weights": {"handler": 1.0, "test_timeout": -1.0}}))
    with pytest.raises(PermanentFailure, match="no component 'style'"):
        await rewards.check(Silent(), spec({"weights": {"style": 1.0}}))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("x <think>a</think> y\n<answer>b</answer> z", True),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think><think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b", False),
        ("", False),
    ],
)
def test_tags_stand_once_each_and_in_their_order(text: str, kept: bool) -> None:
    assert has_tags(text, ["think", "answer"]) is kept


async def test_patterns_read_the_policys_own_messages(rewards: Rewards) -> None:
    checks = [
        {"name": "last", "pattern": "^done.$"},
        {"name": "all", "pattern": "done", "messages": "every"},
        {"name": "question", "pattern": "q"},
    ]
    given = context({"format": checks}, "not yet", "done\n")
    found = await shaped(rewards, given, Evaluation(1.0))
    assert {name: found.components[name] for name in ("last", "all", "question")} == {
        "last": 1.0, "all": 0.0, "question": 0.0,
    }  # fmt: skip
    assert found.reward == 1.0
    # The task's own messages are no words of the policy, whoever is said to have said them.
    chat = [Message(role="user", content="q"), Message(role="assistant", content="no")]
    primed = replace(given, task=given.task.model_copy(update={"prompt": None, "messages": chat}))
    said = Message(role="assistant", content="done\n")
    primed.trajectory = primed.trajectory.model_copy(update={"messages": [*chat, said]})
    found = await shaped(rewards, primed, Evaluation(1.0))
    assert [found.components[name] for name in ("last", "all")] == [1.0, 1.0]
    given.trajectory = None
    found = await shaped(rewards, given, Evaluation(1.0))
    assert [found.components[name] for name in ("last", "all")] == [0.0, 0.0]
    silent = await shaped(rewards, context({"format": checks}), Evaluation(1.0))
    assert [silent.components[name] for name in ("last", "all")] == [0.0, 0.0]


async def test_every_message_is_looked_at_where_the_job_says_so(rewards: Rewards) -> None:
    checks = [
        {"name": "pattern", "pattern": "a", "messages": "every"},
        {"name": "tags", "tags": ["b"], "messages": "every"},
        {"name": "last", "tags": ["b"]},
    ]
    for said, kept in (
        (["a<b></b>", "a<b></b>"], (1.0, 1.0, 1.0)), (["a", "<b></b>"], (0.0, 0.0, 1.0)),
        (["<b></b>", "a"], (0.0, 0.0, 0.0)),
    ):  # fmt: skip
        found = await shaped(rewards, context({"format": checks}, *said), Evaluation(1.0))
        assert tuple(found.components[name] for name in ("pattern", "tags", "last")) == kept


class Undecided(FormatChecks):
    """Checks of form that are never decided in time."""

    async def kept(self, check: FormatCheck, texts: Sequence[str]) -> tuple[bool, bool]:
        return False, False


@pytest.mark.parametrize(("before", "after"), [("", "FormatTimeout"), ("TestTimeout", "TestTimeout")])
async def test_a_form_that_cannot_be_decided_is_a_reason_where_there_is_no_other(
    before: str, after: str
) -> None:
    made = Rewards(lambda _: Registry(), Undecided())
    given = context({"format": [{"name": "x", "pattern": "a"}]}, "a")
    found = await shaped(made, given, Evaluation(1.0, {}, before))
    assert (found.reward, found.components, found.reason) == (1.0, {"handler": 1.0, "x": 0.0}, after)
    await made.close()


async def test_a_search_that_dies_is_tried_again_and_then_scored() -> None:
    checks = FormatChecks()
    check = FormatCheck(name="x", pattern="a")
    try:
        assert await checks.kept(check, ["a"]) == (True, True)
        (child,) = checks._children._idle
        child.kill()
        await child.wait()
        assert await checks.kept(check, ["a"]) == (True, True)
    finally:
        await checks.close()


@pytest.fixture
async def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rewards]:
    """Yield rewards that know the functions above, which an installed package would bring."""
    (tmp_path / "reward_functions_of_a_test.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Installed(Registry):
        def target(self, group: str, name: str) -> str:
            assert group == REWARD_FUNCTIONS
            return f"reward_functions_of_a_test:{name.capitalize()}"

    installed = Installed()
    made = Rewards(lambda _: installed)
    yield made
    await made.close()


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, **more}}


async def test_a_function_replaces_the_handlers_reward(functions: Rewards) -> None:
    given = context(function("length"), "short")
    await functions.check(MathHandler(), given.spec)
    found = await shaped(functions, given, Evaluation(0.0))
    assert (found.reward, found.components) == (1.0, {"handler": 0.0, "function": 1.0, "characters": 5.0})
    weighed = context({**function("length"), "weights": {"characters": 0.1, "handler": 2.0}}, "short")
    assert (await shaped(functions, weighed, Evaluation(1.0))).reward == pytest.approx(2.5)
    # The names of its components are checked, too.
    with pytest.raises(PermanentFailure, match="no component 'length'"):
        await functions.check(MathHandler(), spec({**function("length"), "weights": {"length": 1.0}}))


@pytest.mark.parametrize(
    ("name", "give", "reason", "words"),
    [
        ("raising", "", "RewardFunctionFailed", "the reward function 'raising' raised KeyError: 'no such"),
        ("hanging", "", "RewardFunctionTimeout", "gave no answer within 0.5 s"),
        ("dying", "", "RewardFunctionFailed", "ended without an answer"),
        ("wrong", "nan", "RewardFunctionFailed", "reward is nan, expected a number of at most 1,000,000"),
        ("wrong", "huge", "RewardFunctionFailed", "reward is 1000000000, expected a number"),
        ("wrong", "none", "RewardFunctionFailed", "reward is None, expected a number"),
        ("wrong", "yes", "RewardFunctionFailed", "reward is True, expected a number"),
        ("absent", "", "RewardFunctionFailed", "ended at its start: AttributeError"),
    ],
)
async def test_a_function_that_fails_gives_no_reward(
    functions: Rewards, name: str, give: str, reason: str, words: str
) -> None:
    given = context(function(name, timeoutSeconds=0.5), "x", metadata={"give": give})
    with pytest.raises(PipelineError, match=words) as caught:
        await shaped(functions, given, Evaluation(1.0))
    assert (caught.value.reason, caught.value.retryable) == (reason, True)
    # A function that hangs leaves no process behind.
    for children in functions._functions.values():
        assert all(child.returncode is None for child in children._idle)
        assert name not in ("hanging", "dying", "absent") or not children._idle


@pytest.mark.attack(
    "a text that a reward function repeats in an exception hides where that was raised, or forges "
    "lines of the worker's log",
    boundary="evaluation",
    surface="reward functions, services",
    stopped_by="the text is cut before the place; each line of a traceback is marked, and escaped in the log",
)
async def test_an_exception_names_the_line_of_the_function(functions: Rewards) -> None:
    line = FUNCTIONS[: FUNCTIONS.index("raise ValueError")].count("\n") + 1
    given = context(function("repeating"), "4\n2026-01-01 INFO forged\x1b[2J" + "x" * 50_000)
    with pytest.raises(PipelineError) as caught:
        await shaped(functions, given, Evaluation(1.0))
    message = str(caught.value)
    assert message.startswith("the reward function 'repeating' raised ValueError: 4 2026-01-01 INFO forged")
    assert message.endswith(f" (reward_functions_of_a_test.py, line {line}, in score)")
    assert len(message) < 500
    (trace,) = caught.value.__notes__
    assert trace.startswith("Traceback")
    assert f"line {line}, in score" in trace
    assert len(trace) <= 16_384
    raised = (PipelineError, caught.value, None)
    record = logging.LogRecord("worker", logging.WARNING, "", 0, "failed", (), raised)
    _, *rest = LogFormatter().format(record).split("\n")
    assert any("INFO forged" in text for text in rest)
    assert all(text.startswith("  | ") and "\x1b" not in text for text in rest)


async def test_an_unknown_function_is_named(rewards: Rewards) -> None:
    words = "no reward function 'mine' is installed on this machine"
    with pytest.raises(PermanentFailure, match=words) as caught:
        await rewards.check(MathHandler(), spec(function("mine")))
    assert caught.value.reason == "UnknownRewardFunction"


async def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """A worker that is killed leaves no function behind that computes for ever."""
    (tmp_path / "hang.py").write_text("class F:\n    def score(self, episode):\n        while True: pass\n")
    program = (
        "import asyncio\n"
        "from rollyard_pipeline.child_processes import ChildProcesses\n"
        "async def main():\n"
        "    module = 'rollyard_pipeline.rewards.function_process'\n"
        "    made = ChildProcesses(module, 'hang:F', what='f', failed='F', timeout='F')\n"
        "    await made.greeting()\n"
        "    print(made._idle[0].pid, flush=True)\n"
        "    await made.ask({}, 600.0)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    held = os.pidfd_open(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    ended = select.poll()
    ended.register(held, select.POLLIN)
    try:
        assert ended.poll(patience(20_000))
    finally:
        os.close(held)


async def test_the_service_gets_the_episode_and_its_answer_is_checked(rewards: Rewards) -> None:
    sent: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"reward": 0.75, "components": {"style": 0.5, "extra": 1.0}}

    async def ask(episode: dict[str, Any]) -> dict[str, Any]:
        sent.append(episode)
        return answer

    reward = {
        "service": {"url": "http://rewards.example/", "components": ["style"]},
        "weights": {"service": 2.0, "style": 1.0},
    }
    given = context(reward, "said", tokens=3)
    found = await shaped(rewards, given, Evaluation(0.0, {"answered": 1.0}), ask=ask)
    assert found.reward == pytest.approx(2.0)
    assert found.components == {
        "answered": 1.0, "handler": 0.0, "service": 0.75, "style": 0.5, "extra": 1.0,
    }  # fmt: skip
    (episode,) = sent
    assert (episode["rollout"], episode["final_text"], episode["sampled_tokens"]) == ("r", "said", 3)
    assert (episode["task"]["answer"], episode["components"]) == ("4", {"answered": 1.0})
    for wrong, words in (
        ({"reward": 1e9}, "reward is 1000000000.0, expected a number"),
        ({"reward": None}, "reward is None"),
        ({"reward": -1000001}, "reward is -1000001, expected a number"),
        ({"reward": 1.0, "components": {"style": 1e7}}, "component 'style' is 10000000.0, expected a number"),
        ({"reward": 1.0, "components": {"style": True}}, "component 'style' is True, expected a number"),
        ({"reward": 1.0, "components": {"style": 1.0, "overlong": 1.0}}, "'overlong' is not a name"),
        (
            {"reward": 1.0, "components": {"style": 1.0, "verify_timeout": 1.0}},
            "'verify_timeout' is not a name",
        ),
        ({"reward": 1.0, "components": {"style": 1.0, "test_timeout": 1.0}}, "'test_timeout' is not a name"),
        ({"reward": 1.0, "components": {"style": 1.0, "a" * 129: 1.0}}, "is not a name"),
        ({"reward": 1.0, "components": [1.0]}, "must be an object"),
        ({"reward": 1.0, "components": {}}, "component 'style' is missing"),
        ({"reward": 1.0, "components": {"style": 1.0, "handler": 1.0}}, "'handler' is not a name"),
        ({"reward": 1.0, "components": {"style": 1.0, "answered": 1.0}}, "'answered' is not a name"),
        ({"reward": 1.0, "components": {"style": 1.0, "a b": 1.0}}, "'a b' is not a name"),
        ({"reward": 1.0, "components": {f"c{n}": 1.0 for n in range(65)}}, "at most 64 numbers"),
    ):
        answer = wrong
        with pytest.raises(PipelineError, match=words) as caught:
            await shaped(rewards, given, Evaluation(0.0), ask=ask)
        assert caught.value.reason == "RewardServiceFailed"
    answer = {"reward": -1e6, "components": {"style": 1000000, "a" * 128: 0.0}}
    given.spec = spec({**reward, "weights": {"style": 1.0}})
    found = await shaped(rewards, given, Evaluation(0.0), ask=ask)
    assert (found.reward, found.components["service"]) == (1e6, -1e6)


def test_an_episode_says_what_run_and_eval_have_recorded() -> None:
    given = context({}, "first", "last", tokens=3, metadata={"a": [1]})
    given.sample_index, given.carry = 5, {"answer": "handed in"}
    update = {"truncated": True, "truncated_reason": "MaxTurns", "namespace": "n"}
    given.trajectory = given.trajectory.model_copy(update=update)
    document = episode_document(given, Evaluation(0.5, {"answered": 1.0}, "TestTimeout"))
    assert document == {
        "rollout": "r", "job": "j", "namespace": "n", "sample_index": 5,
        "task": {"id": "t", "answer": "4", "answers": None, "metadata": {"a": [1]}},
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "first"},
            {"role": "assistant", "content": "last"},
        ],
        "messages_dropped": 0, "answer": "handed in", "final_text": "handed in", "thought": "",
            "reward": 0.5,
        "reward_reason": "TestTimeout", "components": {"answered": 1.0}, "sampled_tokens": 3,
        "truncated": True, "truncated_reason": "MaxTurns",
    }  # fmt: skip
    given.trajectory, given.carry = None, {}
    alone = episode_document(given, Evaluation(0.0))
    assert [message["content"] for message in alone["messages"]] == ["q"]
    assert (alone["answer"], alone["final_text"], alone["job"], alone["truncated"]) == (None, "", "", False)


def test_the_latest_messages_and_both_ends_of_a_text_are_kept() -> None:
    texts = [f"<{number}>{'x' * MAX_TEXT}</{number}>" for number in range(12)]
    document = episode_document(context({}, *texts), Evaluation(0.0))
    kept = document["messages"]
    assert [message["content"][:4] for message in kept] == [text[:4] for text in texts[-len(kept) :]]
    assert all(message["content"].endswith(f"</{n}>") for message, n in zip(kept, range(4, 12), strict=True))
    assert document["messages_dropped"] == 5
    whole = "y" * MAX_TEXT
    (_, message) = episode_document(context({}, whole), Evaluation(0.0))["messages"]
    assert message["content"] == whole
    calls = context({}, *"abcdefghijkl")
    for message, size in zip(calls.trajectory.messages[1:], [*[200_000] * 11, MAX_TEXT], strict=True):
        given = {"function": {"name": "bash", "arguments": {"command": "x" * size}}}
        message.tool_calls = [ToolCall.model_validate(given)]
    document = episode_document(calls, Evaluation(0.0))
    shown = [(message["content"], "tool_calls" in message) for message in document["messages"]]
    assert shown == [*((letter, True) for letter in "bcdefghijk"), ("l", False)]
    assert document["messages_dropped"] == 2
    small = episode_document(context({}, "y", metadata={"a": "x" * (MAX_METADATA - 100)}), Evaluation(0.0))
    assert len(small["task"]["metadata"]["a"]) == MAX_METADATA - 100
    with pytest.raises(TaskInvalid, match="task 't': metadata: has"):
        episode_document(context({}, "y", metadata={"a": "x" * MAX_METADATA}), Evaluation(0.0))


@pytest.mark.attack(
    "a very long episode is refused, which gives a new try instead of a bad score",
    boundary="evaluation",
    surface="reward functions, services",
    stopped_by="it is shortened",
)
def test_a_long_episode_is_shortened_and_never_refused() -> None:
    given = context({}, *(["x" * (1 << 20)] * 12))
    document = episode_document(given, Evaluation(0.0))
    assert len(document["final_text"]) <= MAX_TEXT
    assert "[…]" in document["final_text"]
    sizes = [len(message["content"]) for message in document["messages"]]
    assert max(sizes) <= MAX_TEXT
    assert sum(sizes) <= MAX_MESSAGES
    assert len(sizes) + document["messages_dropped"] == 13
    for message in given.trajectory.messages:
        message.content, message.reasoning_content = "", "x" * (1 << 20)
    thoughts = episode_document(given, Evaluation(0.0))["messages"]
    sizes = [len(message["reasoning_content"]) for message in thoughts]
    assert max(sizes) <= MAX_TEXT
    assert 1 < len(sizes) < 13
    assert sum(sizes) <= MAX_MESSAGES


class Control:
    """A control plane that gives these answers, one after the other."""

    def __init__(self, *answers: RewardResponse | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[RewardRequest, float]] = []

    async def reward(self, request: RewardRequest, seconds: float) -> RewardResponse:
        self.asked.append((request, seconds))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


LEASE = Lease(
    rollout="r", token=7, stage="eval", job="j", namespace="default", job_uid="u", group_id="g",
    sample_index=0, attempt=0, queued_seconds=0.0, lease_seconds=30.0, task=Task(id="t", prompt="q"),
)  # fmt: skip
SERVICE = RewardServiceSpec(url="http://rewards.example/", timeout_seconds=9.0, max_attempts=2)


async def service_said(*answers: RewardResponse | Exception) -> tuple[dict[str, Any], Control]:
    control: Any = Control(*answers)
    return await service_score(control, LEASE, SERVICE, {"a": 1}), control


async def test_a_service_is_asked_again_as_often_as_the_job_says() -> None:
    broken = RewardResponse(error="the service answered 500")
    good = RewardResponse(reward=0.5, components={"style": 1.0})
    away = ControlPlaneUnavailable("it restarts", 0.0)
    # That the control plane is away is no failure of the service.
    found, control = await service_said(away, broken, away, good)
    assert found == {"reward": 0.5, "components": {"style": 1.0}}
    assert [(asked.rollout, asked.token, asked.episode, seconds) for asked, seconds in control.asked] == [
        ("r", 7, {"a": 1}, 9.0)
    ] * 4
    found, control = await service_said(broken, good)
    assert (found["reward"], len(control.asked)) == (0.5, 2)
    with pytest.raises(PipelineError, match="no score in 2 tries; last: the service answered 500"):
        await service_said(broken, broken, good)
    moved = RewardResponse(error="the service answered 307", retryable=False)
    with pytest.raises(PipelineError, match="no score in 1 try; last: the service answered 307"):
        await service_said(moved, good)


async def test_a_failure_of_a_function_or_a_service_is_reported_as_one(functions: Rewards) -> None:
    """The report is that of the infrastructure, so the rollout ends as Failed and has no reward."""
    errors: list[tuple[str, PipelineError]] = []
    with pytest.raises(ChildFailed) as raised:
        await shaped(functions, context(function("raising"), "x"), Evaluation(1.0))
    errors.append(("RewardFunctionFailed", raised.value))
    with pytest.raises(PipelineError) as refused:
        await service_said(RewardResponse(error="no", retryable=False))
    errors.append(("RewardServiceFailed", refused.value))
    for reason, error in errors:
        failure = stage_failure(LEASE, error, StageTimes())
        assert (failure.reason, failure.retryable, failure.counts, failure.return_to) == (
            reason, True, True, None,
        )  # fmt: skip
