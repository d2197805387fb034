"""Init, Run and Eval of single rollouts, in sandboxes that are bare processes, with a scripted model."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from rollyard_crds.lease import (
    BackendAssignment,
    Lease,
    RewardRequest,
    RewardResponse,
    RouteRequest,
    RouteResponse,
    StageResult,
    StageTimes,
)
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_crds.trajectory import MALFORMED_CALL, Trajectory
from rollyard_inference.errors import BackendUnavailable
from rollyard_pipeline.agents.base import Agent, AgentContext
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.backends.session import request_seed
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import (
    EvalTimeout,
    NoToolParser,
    PermanentFailure,
    PipelineError,
    SetupFailed,
    TemplateError,
    TokenizerUnavailable,
)
from rollyard_pipeline.handlers.base import StageContext
from rollyard_pipeline.handlers.shell import ShellHandler
from rollyard_pipeline.registry import AGENTS, HANDLERS, Registry
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.egress.destinations import Infrastructure
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.errors import ImageNotUsable, SandboxLost
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.stages.contexts import checked_carry, stage_context
from rollyard_pipeline.stages.rescoring import Rescorer
from rollyard_pipeline.stages.stages import AgentRuns, RunLimits, Stages
from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.tools import ToolContext
from rollyard_pipeline.tools.shipped import EditTool
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.worker.worker import stage_failure
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import SandboxError
from rollyard_testing.crds.segments import lists
from rollyard_testing.families import FAMILIES, write_folder
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.call_suite import MINIMAX, byte_folder, byte_tokenizer
from rollyard_testing.waiting import eventually

END = "<|im_end|>"
Answer = Callable[[str], str]
Install = Callable[[str], None]
UseModel = Callable[..., None]
"""Gives the rollout a model: see the fixture `model`."""
Installed = Callable[..., Awaitable[StageResult]]


class Plane:
    def __init__(self) -> None:
        self.spec: RolloutJobSpec | None = None
        self.routed: list[RouteRequest] = []
        self.next: BackendAssignment | None = None
        """The backend to which rollouts move."""

    async def job_spec(self, namespace: str, name: str, uid: str) -> RolloutJobSpec:
        return self.spec

    async def route(self, request: RouteRequest) -> RouteResponse:
        self.routed.append(request)
        return RouteResponse(backend=self.next, retry_after=0.05)


class Rollout:
    """A rollout that is taken through its stages, as a worker would do it."""

    def __init__(
        self, provider: NodeProvider, stages: Stages, plane: Plane, infrastructure: Infrastructure
    ) -> None:
        self.provider = provider
        self.stages = stages
        self.plane = plane
        self.infrastructure = infrastructure
        """What no sandbox reaches."""
        self.task = Task(id="t", prompt="q")
        self.backend: BackendAssignment | None = None
        self.model: Any = None
        self.init: StageResult | None = None
        self.ran: StageResult | None = None

    def configure(self, task: dict[str, Any] | None = None, **spec: Any) -> None:
        base = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
        sandbox = {"warm": 0, "resources": {"memory": "256Mi", "disk": "32Mi"}}
        self.plane.spec = RolloutJobSpec.model_validate({**base, "sandbox": sandbox, **spec})
        self.task = Task.model_validate({"id": "t", "prompt": "q", "test_script": "true", **(task or {})})

    def lease(self, stage: str, **fields: Any) -> Lease:
        return Lease(
            rollout="r", token=1, stage=stage, job="j", namespace="default", job_uid=str(id(self.plane.spec)),
            group_id="g", sample_index=5, queued_seconds=0.0, lease_seconds=30.0, task=self.task,
            backend=self.backend, **{"attempt": 0, **fields},
        )  # fmt: skip

    def change_backend(self, **fields: Any) -> None:
        self.backend = self.backend.model_copy(update=fields)

    async def stage(self, stage: str, **fields: Any) -> StageResult:
        self.times = StageTimes()
        return await self.stages.work(HeldLease(self.lease(stage, **fields)), self.times)

    async def play(self) -> Trajectory:
        """Play Init and Run."""
        self.init = await self.stage("init")
        self.ran = await self.stage("run", sandbox=self.init.sandbox, carry=self.init.carry)
        transcript = self.ran.transcript
        return transcript.with_segments(lists(self.ran.segments))

    async def score(self, attempt: int = 0) -> StageResult:
        return await self.stage(
            "eval", sandbox=self.init.sandbox, carry=self.ran.carry, trajectory=self.ran.transcript,
            attempt=attempt,
        )  # fmt: skip


@pytest.fixture
async def rollout(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rollout]:
    provider = open_provider("process", run_dir=tmp_path_factory.mktemp("s"), node="n")
    await provider.start()
    plane = Plane()
    try:
        async with BackendClient(request_timeout=20.0) as backends:
            registry = Registry({AGENTS: {"replaying": ReplayingAgent}, HANDLERS: {"late": Late}})
            egress = Egress()
            stages = Stages(plane, backends, provider, registry, backend_budget=1.0, egress=egress)
            yield Rollout(provider, stages, plane, egress.infrastructure)
            await stages.close()
    finally:
        for sandbox in provider.claimed():
            await provider.release(sandbox)
        await provider.aclose()


@pytest.fixture
async def model(
    rollout: Rollout, scripted: Callable[[Answer], Any], model_folder: Path
) -> AsyncIterator[UseModel]:
    """Yield a function that gives the rollout a model whose answers depend on the prompt's text."""
    answer: list[Answer] = []

    def latest(prompt: str) -> str:
        return answer[-1](prompt)

    server = rollout.model = scripted(latest)
    async with server.serving():

        def use(
            answers: Answer,
            agent: dict[str, Any] | None = None,
            task: dict[str, Any] | None = None,
            **spec: Any,
        ) -> None:
            answer.append(answers)
            rollout.backend = BackendAssignment(
                pool="p", url=server.url, model="scripted", tokenizer=str(model_folder), policy_version="v0"
            )
            rollout.configure(
                task, agent={"type": "tools", **(agent or {})}, backendRef={"name": "p"}, **spec
            )

        yield use


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"


def oracle(*steps: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"solution": [{"name": name, "arguments": arguments} for name, arguments in steps]}


async def test_another_familys_calls_are_read_and_a_malformed_one_is_an_observation(
    rollout: Rollout, model: UseModel
) -> None:
    steps = [
        f"<tool_call>\n<function=bash>\n<parameter=command>\nls{END}",
        "<tool_call>\n<function=bash>\n<parameter=command>\nprintf 'a\\n\\nb'\n</parameter>\n</function>\n"
        f"</tool_call>{END}",
        "I am done." + END,
    ]
    model(lambda prompt: steps[prompt.count("<tool_response>")], {"toolParser": "qwen_coder"})
    trajectory = await rollout.play()
    seen = [message.content for message in trajectory.messages if message.role == "tool"]
    assert seen == ["error: malformed tool call: </parameter> of 'command' is missing", "a\n\nb"]
    assert [turn.finish_reason for turn in trajectory.turns] == ["tool_calls"] * 2 + ["stop"]
    # The control plane knows malformed calls by this, to find parsers that do not fit their model.
    errors = [call.error for turn in trajectory.turns for call in turn.tool_calls]
    assert [error is not None and error.startswith(MALFORMED_CALL) for error in errors] == [True, False]


async def test_calls_that_only_the_library_reads_are_run_and_the_record_names_it(
    rollout: Rollout, scripted: Callable[[Answer], Any], tmp_path: Path
) -> None:
    call = '<minimax:tool_call>\n<invoke name="submit">\n<parameter name="answer">7</parameter>\n</invoke>\n'
    steps = [f"I guess.</think>\n\nSo:\n{call}</minimax:tool_call>[e~["]
    server = scripted(lambda prompt: steps[prompt.count("<response>")])
    server.tokenizer = byte_tokenizer("minimax-m2")
    folder = byte_folder("minimax-m2", MINIMAX, tmp_path)
    async with server.serving():
        rollout.backend = BackendAssignment(pool="p", url=server.url, model="scripted", tokenizer=str(folder))
        rollout.configure(agent={"type": "tools", "tools": ["submit"]}, backendRef={"name": "p"})
        trajectory = await rollout.play()
        # The library would run it, as the call closes the thought there.
        steps[0] = f"I guess.\n{call}</minimax:tool_call>[e~["
        drafted = await rollout.play()
    assert [turn.tool_calls for turn in drafted.turns] == [[]]
    assert trajectory.tool_parser.endswith(":minimax-m2")
    (turn,) = trajectory.turns
    assert [(one.name, one.arguments) for one in turn.tool_calls] == [("submit", {"answer": "7"})]
    said = trajectory.messages[-2]
    assert said.content == "I guess.</think>\n\nSo:"
    assert said.content[turn.thought.start : turn.thought.end] == "I guess."


async def test_a_template_that_fits_no_parser_is_no_try_of_a_rollout(
    rollout: Rollout, scripted: Callable[[Answer], Any], tmp_path: Path
) -> None:
    folder = byte_folder("qwen3", FAMILIES["chatml"].source, tmp_path)
    server = scripted(lambda prompt: f"7{END}")
    server.tokenizer = byte_tokenizer("qwen3")
    async with server.serving():
        rollout.backend = BackendAssignment(pool="p", url=server.url, model="scripted", tokenizer=str(folder))
        spec: dict[str, Any] = {"backendRef": {"name": "p"}}
        rollout.configure(agent={"type": "tools", "tools": ["submit"]}, **spec)
        with pytest.raises(NoToolParser, match=r"the chat template of 'scripted' offers no tools ") as caught:
            await rollout.play()
        failure = stage_failure(rollout.lease("run"), caught.value, StageTimes())
        assert (failure.reason, failure.retryable) == ("NoToolParser", False)
        assert server.prompts == []
        # An author who names the parser, or offers no tool, knows what he does.
        for agent, used in (({"tools": ["submit"], "toolParser": "hermes"}, "hermes"), ({"tools": []}, "")):
            rollout.configure(agent={"type": "tools", **agent}, **spec)
            assert (await rollout.play()).tool_parser == used


async def test_the_policy_sees_what_went_wrong_and_goes_on(rollout: Rollout, model: UseModel) -> None:
    steps = [
        call("bash", command="echo out; exit_code() { return 3; }; exit_code"),
        f"<tool_call>{{broken</tool_call>{END}",
        call("no_such_tool", x=1),
        call("bash", cmd="ls"),
        call("bash", command=7),
        call("bash", command="true"),
        call("bash", command="sleep 30"),
        "I am done." + END,
    ]
    model(lambda prompt: steps[prompt.count("<tool_response>")], {"toolTimeoutSeconds": 1})
    trajectory = await rollout.play()
    seen = [message.content for message in trajectory.messages if message.role == "tool"]
    assert seen == [
        "out\n[exit code 3]",
        "error: malformed tool call: not JSON: "
        "Expecting property name enclosed in double quotes at character 1",
        "error: unknown tool 'no_such_tool'; tools: bash, ipython, edit, submit",
        "error: argument 'command' is missing; expected command",
        "error: argument 'command' must be of type string, not int",
        "(no output)",
        "[timed out after 1 s]",
    ]
    assert trajectory.messages[-1].content == "I am done."
    assert not trajectory.truncated
    assert [turn.finish_reason for turn in trajectory.turns] == ["tool_calls"] * 7 + ["stop"]
    errors = [turn.tool_calls[0].error for turn in trajectory.turns[:-1]]
    assert [error is None for error in errors] == [True, False, False, False, False, True, False]
    assert trajectory.turns[6].tool_seconds >= 1.0
    times = rollout.times
    assert min(times.tool_seconds - 1.0, times.model_seconds, times.own_seconds) > 0
    parts = times.model_seconds + times.tool_seconds + times.own_seconds
    assert parts == pytest.approx(times.active_seconds)
    assert trajectory.template_breaks == 0
    (segment,) = trajectory.segments
    assert sum(segment.loss_mask) == sum(turn.end - turn.start for turn in trajectory.turns)


@pytest.mark.parametrize(
    ("agent", "sampling", "context", "reason"),
    [
        ({"maxTurns": 2}, {}, 8192, "MaxTurns"),
        ({"maxContextTokens": 1500}, {}, 8192, "MaxContext"),
        ({}, {"maxTokens": 4}, 8192, "MaxTokens"),
        # The server's context is smaller than it says.
        ({}, {}, 1500, "MaxContext"),
    ],
)
async def test_limits_truncate_and_go_to_eval(
    rollout: Rollout, model: UseModel, agent: Any, sampling: Any, context: int, reason: str
) -> None:
    model(lambda prompt: call("bash", command="seq 1 30"), agent, sampling=sampling)
    rollout.model.context = context
    trajectory = await rollout.play()
    assert (trajectory.truncated, trajectory.truncated_reason) == (True, reason)
    assert trajectory.turns
    assert rollout.plane.routed == []
    limit = min(agent.get("maxContextTokens", context), context)
    for segment in trajectory.segments:
        assert len(segment.prompt_ids) + len(segment.response_ids) <= limit
        assert segment.loss_mask[-1] == 1  # There is no tool output that was not answered.
    assert (await rollout.score()).reward == 1.0


@pytest.mark.parametrize(
    ("agent", "card", "context", "limit"),
    [
        ({"maxContextTokens": 16}, {}, 100_000, "agent.maxContextTokens is 16"),
        ({"maxContextTokens": 16}, {"max_model_len": 20}, 100_000, "agent.maxContextTokens is 16"),
        ({}, {"max_model_len": 20}, 100_000, r"the server's context \(max_model_len\) is 20"),
        # The server's context is smaller than it says.
        ({}, {}, 20, "the server's context is 20"),
        # What an agent replays before the first turn is not the policy's.
        ({"type": "replaying"}, {"max_model_len": 20}, 100_000, ".* is 20"),
    ],
)
async def test_a_first_prompt_that_leaves_no_room_fails_before_anything_is_sampled(
    rollout: Rollout,
    model: UseModel,
    agent: dict[str, Any],
    card: dict[str, Any],
    context: int,
    limit: str,
) -> None:
    model(lambda prompt: "done" + END, agent)
    rollout.model.card |= card
    rollout.model.context = context
    with pytest.raises(
        PermanentFailure,
        match=rf"^task 't': the first prompt has \d\d+ tokens .*, and {limit}: raise the limit",
    ) as caught:
        await rollout.play()
    assert rollout.model.prompts == []
    lease = rollout.lease("run", sandbox=rollout.init.sandbox)
    failure = stage_failure(lease, caught.value, StageTimes())
    assert (failure.reason, failure.retryable, failure.counts) == ("PromptTooLong", False, True)


class ReplayingAgent(Agent):
    """Replays a call before the first turn and after each one that calls no tool."""

    async def run(self, ctx: AgentContext) -> None:
        await ctx.replay(ParsedCall("bash", {"command": "echo first"}))
        while (turn := await ctx.turn()) is not None:
            await ctx.call_all(turn.calls)
            await ctx.replay(ParsedCall("bash", {"command": "echo again"}))


async def test_replayed_calls_do_not_count_against_max_turns(rollout: Rollout, model: UseModel) -> None:
    """The model reads them as turns of its own, and none of their tokens is trained on."""
    read: list[str] = []

    def answer(prompt: str) -> str:
        read.append(prompt)
        return call("bash", command="echo sampled")

    model(answer, {"type": "replaying", "maxTurns": 3})
    trajectory = await rollout.play()
    assert (trajectory.truncated, trajectory.truncated_reason) == (True, "MaxTurns")
    ends = [turn.finish_reason for turn in trajectory.turns]
    assert ends == ["replayed", *["tool_calls", "replayed"] * 3]
    outputs = [message.content for message in trajectory.messages if message.role == "tool"]
    assert outputs == ["first", *["sampled", "again"] * 3]
    spans = [turn.end - turn.start for turn in trajectory.turns]
    assert spans[0::2] == [0] * 4
    assert sum(spans) == trajectory.sampled_tokens
    for number, prompt in enumerate(read):
        assert prompt.count("echo again") == number
        assert prompt.count("echo first") == 1
        assert prompt.count("echo sampled") == number
    assert (await rollout.score()).reward == 1.0


async def test_a_run_timeout_keeps_what_was_sampled(rollout: Rollout, model: UseModel) -> None:
    model(
        lambda prompt: call("bash", command="sleep 60" if "<tool_response>" in prompt else "touch worked"),
        task={"test_script": "[ -f worked ]"},
        stages={"run": {"timeoutSeconds": 3}},
    )
    trajectory = await rollout.play()
    assert (trajectory.truncated, trajectory.truncated_reason) == (True, "RunTimeout")
    assert len(trajectory.turns) == 2
    assert sum(trajectory.segments[0].loss_mask) > 0
    assert (await rollout.score()).reward == 1.0


async def test_the_record_says_what_the_backend_did(rollout: Rollout, model: UseModel) -> None:
    model(lambda prompt: "done" + END, sampling={"temperature": 0.7, "seed": 11})
    rollout.model.card["logprobs_mode"] = "raw_logprobs"
    trajectory = await rollout.play()
    assert (trajectory.sampling.temperature, trajectory.sampling.logprobs_mode) == (0.7, "raw_logprobs")
    stats = rollout.ran.stats
    assert (stats.sampled_tokens, stats.discarded_tokens) == (trajectory.sampled_tokens, 0)
    assert stats.requests == 1
    assert (trajectory.backend, trajectory.sample_index) == (rollout.model.url, 5)
    # A run is repeatable: another attempt, or another rollout of the same sample, has the same seeds.
    assert rollout.model.seeds == [request_seed(11, "t", 5, 0)]


async def test_a_paused_backend_uses_up_no_run_time(
    rollout: Rollout, model: UseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_pipeline.backends.client._PAUSE_POLL", 0.1)
    model(lambda prompt: "done" + END, stages={"run": {"timeoutSeconds": 2}})
    rollout.model.running.clear()
    asyncio.get_running_loop().call_later(4.0, rollout.model.running.set)
    trajectory = await rollout.play()
    assert not trajectory.truncated
    assert rollout.times.model_seconds < 2.0, "the pause was taken for the backend's speed"


async def test_a_backend_that_is_gone_is_no_reward(rollout: Rollout, model: UseModel) -> None:
    model(lambda prompt: call("bash", command="true"))
    rollout.change_backend(url="http://127.0.0.1:9")
    with pytest.raises(BackendUnavailable) as caught:
        await rollout.play()
    assert rollout.plane.routed
    assert rollout.plane.routed[0].failed_url == "http://127.0.0.1:9"
    assert rollout.times.model_seconds >= 0.9, "the times of a stage that fails are reported, too"
    assert rollout.times.own_seconds < rollout.times.active_seconds - 0.9
    lease = rollout.lease("run", sandbox=rollout.init.sandbox)
    failure = stage_failure(lease, caught.value, StageTimes())
    assert (failure.reason, failure.retryable, failure.return_to) == ("BackendUnavailable", True, "init")


async def test_no_sandbox_reaches_a_backend_that_a_rollout_uses_or_moves_to(
    rollout: Rollout, model: UseModel
) -> None:
    model(lambda prompt: "done" + END)
    url = rollout.backend.url.replace("127.0.0.1", "localhost")
    rollout.plane.next = rollout.backend.model_copy(update={"url": url})
    rollout.change_backend(url="http://127.0.0.1:9")
    trajectory = await rollout.play()
    assert [one.failed_url for one in rollout.plane.routed] == ["http://127.0.0.1:9"]
    assert (rollout.plane.routed[0].rollout, rollout.plane.routed[0].token) == ("r", 1)
    assert trajectory.backend == url
    for host in ("127.0.0.1", "localhost"):
        assert await rollout.infrastructure.contains(host, [])
    assert not await rollout.infrastructure.contains("pkgs.example.org", [])


async def test_a_tokenizer_that_is_not_here_says_what_to_set(rollout: Rollout, model: UseModel) -> None:
    model(lambda prompt: END)
    rollout.change_backend(tokenizer="/no/such/folder")
    with pytest.raises(TokenizerUnavailable, match=r"spec\.tokenizer"):
        await rollout.play()


async def test_a_model_without_a_chat_template_fails_once_and_says_what_to_do(
    rollout: Rollout, model: UseModel, model_folder: Path, tmp_path: Path
) -> None:
    model(lambda prompt: END)
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    rollout.change_backend(tokenizer=str(tmp_path))
    with pytest.raises(TokenizerUnavailable) as caught:
        await rollout.play()
    failure = stage_failure(rollout.lease("run"), caught.value, StageTimes())
    assert (failure.reason, failure.retryable) == ("TokenizerUnavailable", False)
    assert str(tmp_path) in failure.message
    assert "chat_template.jinja" in failure.message


async def test_chat_template_kwargs_reach_the_template(
    rollout: Rollout, model: UseModel, model_folder: Path, tmp_path: Path
) -> None:
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{{ 'no thoughts' if enable_thinking is false else 'thoughts' }}"
    )
    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(prompt)
        return END

    model(answer, {"tools": [], "chatTemplateKwargs": {"enable_thinking": False}})
    rollout.change_backend(tokenizer=str(tmp_path))
    await rollout.play()
    assert seen == ["qno thoughts"]
    model(answer, {"tools": [], "chatTemplateKwargs": {"messages": []}})
    rollout.change_backend(tokenizer=str(tmp_path))
    with pytest.raises(TemplateError, match=r"agent\.chatTemplateKwargs cannot set messages"):
        await rollout.play()


async def test_math_needs_no_sandbox(rollout: Rollout, model: UseModel) -> None:
    model(lambda prompt: "2 + 2 = \\boxed{4}" + END, {"type": "single_turn"}, {"answer": "4"}, handler="math")
    trajectory = await rollout.play()
    assert rollout.init.sandbox is None
    assert rollout.provider.claimed() == []
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]
    assert (await rollout.score()).reward == 1.0


@pytest.mark.parametrize(
    ("family", "said", "reward"),
    [
        ("qwen3", "<think>\\boxed{5}</think>\n\n\\boxed{4}", 1.0),
        ("qwen3", "<think>It is \\boxed{4}", 0.0),
        ("qwen3_5", "\\boxed{5}\n</think>\n\n\\boxed{4}", 1.0),
        ("qwen3_5", "It is \\boxed{4}", 0.0),
    ],
)
async def test_what_stands_in_a_thought_is_no_answer(
    rollout: Rollout,
    model: UseModel,
    bpe: Any,
    tmp_path: Path,
    family: str,
    said: str,
    reward: float,
) -> None:
    """It is neither when the rollout is evaluated nor when its record is evaluated again."""
    folder = write_folder(FAMILIES[family], bpe, tmp_path / family)
    for thoughts, expected in (("separate", reward), ("answer", 1.0)):
        agent = {"type": "single_turn", "thoughts": thoughts}
        model(lambda prompt: said + END, agent, {"answer": "4"}, handler="math")
        rollout.change_backend(tokenizer=str(folder))
        trajectory = await rollout.play()
        assert trajectory.messages[-1].content == said
        assert (await rollout.score()).reward == expected
        rescorer = Rescorer("math", rollout.plane.spec, None, "me")
        record = Trajectory.model_validate_json(trajectory.line())
        (again,) = await rescorer.rescored([(record, rollout.task)], datetime.now(UTC))
        await rescorer.close()
        assert (again.status, again.reward) == ("succeeded", expected)


async def test_a_jobs_reward_is_made_of_components(
    rollout: Rollout, model: UseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = {
        "weights": {"handler": 1.0, "boxed": 0.5, "service": 0.25},
        "overlong": {"maxTokens": 100, "bufferTokens": 100, "factor": 100.0},
        "format": [{"name": "boxed", "pattern": r"boxed\{\d+\}"}],
        "service": {"url": "http://rewards.example/"},
    }
    said = "2 + 2 = \\boxed{4}" + END
    model(lambda prompt: said, {"type": "single_turn"}, {"answer": "4"}, handler="math", reward=reward)
    trajectory = await rollout.play()
    asked: list[RewardRequest] = []

    async def service(request: RewardRequest, seconds: float) -> RewardResponse:
        asked.append(request)
        return RewardResponse(reward=2.0)

    monkeypatch.setattr(rollout.plane, "reward", service, raising=False)
    result = await rollout.score()
    tokens = trajectory.sampled_tokens
    assert tokens > 0
    assert result.reward == pytest.approx(1.0 + 0.5 + 0.5 - tokens)
    assert result.reward_components == {
        "answered": 1.0, "handler": 1.0, "boxed": 1.0, "service": 2.0, "overlong": pytest.approx(-tokens),
    }  # fmt: skip
    assert (asked[0].rollout, asked[0].token, asked[0].episode["reward"]) == ("r", 1, 1.0)


async def test_a_weight_for_nothing_ends_init_before_a_sandbox_starts(rollout: Rollout) -> None:
    rollout.configure(reward={"weights": {"exit_zero": 1.0, "style": 1.0}})
    with pytest.raises(PermanentFailure, match="no component 'style'"):
        await rollout.stage("init")
    assert rollout.provider.claimed() == []


@pytest.mark.parametrize("then", ["run", "init"])
async def test_sandboxes_in_advance_come_after_the_first_run_or_with_the_second_sandbox(
    rollout: Rollout, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    async def warm(request: object, count: int) -> None:
        counts.append(count)
        raise ImageNotUsable("only tasks name an image that can be used here")

    monkeypatch.setattr(rollout.provider, "warm", warm)
    sandbox = {"warm": 3, "resources": {"memory": "256Mi", "disk": "32Mi"}}
    rollout.configure(oracle(("bash", {"command": "true"})), sandbox=sandbox)
    first = await rollout.stage("init")
    assert counts == []
    await rollout.stage(then, sandbox=first.sandbox if then == "run" else None, carry=first.carry)
    assert counts == [3], "a failure is logged, and costs no rollout"
    await rollout.stage("init")
    assert counts == [3]


async def test_hidden_tests_come_after_every_process_of_run_is_dead(rollout: Rollout) -> None:
    mark = f"spy-{secrets.token_hex(8)}"
    watch = f"setsid bash -c 'while :; do sleep 0.05; done' {mark} & disown"
    count = f"pgrep -fc '^bash -c while.*{mark}$'"
    started = f"{watch}; until {count}; do sleep 0.05; done"
    rollout.configure({"test_script": f"! {count}", **oracle(("bash", {"command": started}))})
    trajectory = await rollout.play()
    # There are two for a moment, when the watcher forks for `sleep`.
    assert int(trajectory.messages[-1].content.splitlines()[-1]) >= 1
    assert (await rollout.score()).reward == 1.0


@pytest.mark.parametrize(
    ("script", "reward", "components"),
    [
        ("exit 0", 1.0, {}),
        ("exit 3", 0.0, {}),
        ("syntax error (", 0.0, {}),
        ('echo 0.25 > "$ROLLYARD_REWARD_FILE"; exit 1', 0.25, {"exit_zero": 0.0}),
        ('[ "$ROLLYARD_ANSWER" = "4 2" ]', 1.0, {}),
        ("read line; [ -z \"$line\" ]", 1.0, {}),
        ("sleep 60", 0.0, {"test_timeout": 1.0}),
        ('echo 0.75 > "$ROLLYARD_REWARD_FILE"; sleep 60', 0.0, {"test_timeout": 1.0}),
        ('[ "$(cd; pwd)" != "$OLDPWD" ] && [ -z "$(ls -A ~)$(ls -A "$TMPDIR")" ]', 1.0, {}),
    ],
)  # fmt: skip
async def test_the_test_script_decides(
    rollout: Rollout, script: str, reward: float, components: dict[str, float]
) -> None:
    rollout.configure(
        {"test_script": script, **oracle(("submit", {"answer": "4 2"}))},
        stages={"eval": {"timeoutSeconds": 5}},
    )
    await rollout.play()
    result = await rollout.score()
    assert (result.reward, result.reward_components) == (reward, components)
    assert result.reward_reason == ("TestTimeout" if components == {"test_timeout": 1.0} else "")


@pytest.mark.parametrize(
    ("script", "reward", "reason"),
    [
        *(
            (f"printf '%s' '{written}' > $ROLLYARD_REWARD_FILE", 0.0, "RewardInvalid")
            for written in ("1.5", "nan", "much", "-0.1", "1" * 100)
        ),
        ('[ -f "$ROLLYARD_REWARD_FILE" ] && echo > "$ROLLYARD_REWARD_FILE"; exit 0', 1.0, ""),
        ('[ -f "$ROLLYARD_REWARD_FILE" ] && echo > "$ROLLYARD_REWARD_FILE"; exit 1', 0.0, ""),
        ('rm "$ROLLYARD_REWARD_FILE"; mkdir "$ROLLYARD_REWARD_FILE"', 0.0, "SandboxSabotaged"),
    ],
)
async def test_a_reward_file_without_a_reward(
    rollout: Rollout, script: str, reward: float, reason: str
) -> None:
    """It scores 0 at once, unless it is empty, which leaves it to the exit status."""
    rollout.configure({"test_script": script, **oracle(("submit", {"answer": ""}))})
    await rollout.play()
    result = await rollout.score()
    assert (result.reward, result.reward_reason) == (reward, reason)
    assert reason or result.reward_components == {}


async def test_an_earlier_attempts_answer_is_forgotten(rollout: Rollout) -> None:
    rollout.configure({"test_script": '[ -z "$ROLLYARD_ANSWER" ]', **oracle(("bash", {"command": "true"}))})
    stale = {"answer": "7", "kept": 1}
    rollout.init = await rollout.stage("init", carry=stale)
    assert rollout.init.carry == {}
    rollout.ran = await rollout.stage("run", sandbox=rollout.init.sandbox, carry=stale)
    assert rollout.ran.carry == {"kept": 1}
    assert (await rollout.score()).reward == 1.0


def leased(stage: str, **fields: Any) -> Lease:
    return Lease(
        rollout="r", token=1, stage=stage, job="j", namespace="d", job_uid="u", group_id="g", sample_index=3,
        attempt=0, queued_seconds=0, lease_seconds=30, carry={"answer": "7", "kept": 1},
        **{"task": Task(id="t", prompt="q"), **fields},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "carry"), [("init", {}), ("run", {"kept": 1}), ("eval", {"answer": "7", "kept": 1})]
)
def test_a_stage_has_what_the_stages_before_it_left(stage: str, carry: dict[str, Any]) -> None:
    sandbox: Any = {"env": {"A": "task", "B": "task"}}
    lease = leased(stage, task=Task(id="t", prompt="q", sandbox=sandbox))
    job = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
    spec = RolloutJobSpec.model_validate({**job, "sandbox": {"env": {"A": "job", "C": "job"}}})
    context = stage_context(lease, spec, 7)
    assert context.carry == carry
    assert context.env == {"A": "task", "B": "task", "C": "job"}
    assert (context.rollout, context.sample_index, context.timeout) == ("r", 3, 7.0)
    context.carry["more"] = 1
    assert lease.carry == {"answer": "7", "kept": 1}, "another attempt begins with what this one got"


def test_a_carry_is_json_of_at_most_a_mebibyte() -> None:
    job = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
    context = stage_context(leased("init"), RolloutJobSpec.model_validate(job), 7)
    context.carry["a"] = "x" * ((1 << 20) - len('{"a": ""}'))
    assert checked_carry(context) is context.carry
    context.carry["a"] += "x"
    with pytest.raises(PermanentFailure, match="1048577 bytes"):
        checked_carry(context)
    context.carry["a"] = object()
    with pytest.raises(PermanentFailure, match="not JSON"):
        checked_carry(context)


class Session:
    """A session with a backend, whose waits the test makes."""

    def __init__(self, silence: str | None = None) -> None:
        self.on_wait: Callable[[float], None] = lambda seconds: None
        self.waited_seconds = 0.0
        self.said = silence

    async def silence(self) -> str | None:
        return self.said


async def test_a_wait_for_a_backend_extends_each_limit_that_is_in_force() -> None:
    session: Any = Session()
    episode = Episode(messages=[])
    limits = RunLimits(session, episode)
    loop = asyncio.get_running_loop()
    async with limits.within(1000.0):
        async with limits.within(100.0):
            pass
        begun = loop.time()
        async with limits.within(200.0):
            session.on_wait(50.0)
            whens = [limit.when() for limit in limits._limits]
            assert [round(when - begun, -1) for when in whens if when is not None] == [1050.0, 250.0]
            session.waited_seconds = 14_400.0
            session.on_wait(50.0)
            session.waited_seconds = 14_401.0
            session.on_wait(50.0)
            whens = [limit.when() for limit in limits._limits]
            assert [round(when - begun, -1) for when in whens if when is not None] == [1100.0, 300.0]
    assert limits._limits == []
    assert episode.truncated_reason == ""


@pytest.mark.parametrize("silence", [None, "refused"])
async def test_time_that_a_silent_backend_used_up_truncates_nothing(silence: str | None) -> None:
    session: Any = Session(silence)
    episode = Episode(messages=[])
    limits = RunLimits(session, episode)
    words = "no backend answered until Run's limit of 0.01 s; last: refused"
    blamed = nullcontext() if silence is None else pytest.raises(BackendUnavailable, match=words)
    with blamed:
        async with limits.within(0.01):
            await asyncio.Event().wait()
    assert episode.truncated_reason == ("RunTimeout" if silence is None else "")
    assert limits._limits == []
    # A TimeoutError of something else is an error as any other.
    with pytest.raises(TimeoutError, match="another"):
        async with limits.within(1000.0):
            raise TimeoutError("another")


async def test_only_a_step_whose_limit_has_ended_is_the_last_one() -> None:
    class Waiting(Agent):
        forever = False

        async def run(self, ctx: AgentContext) -> None:
            in_force.append(len(limits._limits))
            if self.forever:
                await asyncio.Event().wait()

    episode = Episode(messages=[])
    context: Any = SimpleNamespace(episode=episode, task=None)
    agent, limits = Waiting(), RunLimits(None, episode)
    in_force: list[int] = []
    runs = AgentRuns(agent, context, limits)
    first, second = Task(id="a", prompt="q"), Task(id="b", prompt="q")
    assert await runs.step(first, 1000.0)
    assert context.task is first
    assert await runs.step(second, None)
    agent.forever = True
    assert not await runs.step(second, 0.01)
    assert (context.task, episode.truncated_reason) == (second, "RunTimeout")
    assert in_force == [1, 0, 1], "a step without a limit of its own has that of the stage only"


async def test_a_failed_setup_ends_init(rollout: Rollout) -> None:
    rollout.configure({"sandbox": {"setup": "echo no disk; exit 4"}})
    with pytest.raises(SetupFailed, match=r"exited with 4: no disk"):
        await rollout.play()


async def test_a_lost_sandbox_goes_back_to_init(rollout: Rollout) -> None:
    rollout.configure(oracle(("bash", {"command": "true"})))
    rollout.init = await rollout.stage("init")
    await rollout.provider.release(rollout.init.sandbox)
    for stage in ("run", "eval"):
        with pytest.raises(SandboxLost) as caught:
            await rollout.stage(stage, sandbox=rollout.init.sandbox)
        assert (caught.value.reason, caught.value.return_to) == ("SandboxLost", "init")


OUT_OF_MEMORY = pytest.mark.attack(
    "the sandbox ends for its own memory, so that the rollout begins again",
    boundary="evaluation",
    surface="sabotage in Run",
    stopped_by="it is scored 0 with the reason SandboxOutOfMemory",
)


@OUT_OF_MEMORY
async def test_a_sandbox_that_ended_for_its_own_memory_is_scored(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout.configure(oracle(("bash", {"command": "true"})))
    await rollout.play()
    await rollout.provider.release(rollout.init.sandbox)
    with pytest.raises(SandboxLost):
        await rollout.score()
    monkeypatch.setattr(rollout.provider, "oom_killed", AsyncMock(return_value=True))
    result = await rollout.score()
    assert (result.reward, result.reward_reason) == (0.0, "SandboxOutOfMemory")
    # This worker's sandboxes say nothing of one that a worker of another kind has lost.
    rollout.init.sandbox = rollout.init.sandbox.model_copy(update={"provider": "bubblewrap"})
    with pytest.raises(SandboxLost, match="bubblewrap"):
        await rollout.score()


async def test_an_evaluation_that_waits_for_the_sandboxs_memory_is_scored(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exec server is there, and does not answer before the limit."""

    rollout.configure(oracle(("bash", {"command": "true"})))
    await rollout.play()
    late = AsyncMock(side_effect=EvalTimeout("Eval took longer than 1 s"))
    monkeypatch.setattr("rollyard_pipeline.stages.stages.evaluate", late)
    with pytest.raises(EvalTimeout):
        await rollout.score()
    monkeypatch.setattr(rollout.provider, "oom_killed", AsyncMock(return_value=True))
    result = await rollout.score()
    assert (result.reward, result.reward_reason) == (0.0, "SandboxOutOfMemory")


@OUT_OF_MEMORY
async def test_a_sandbox_that_a_call_of_run_ends_for_memory_goes_to_eval(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout.provider, "oom_killed", AsyncMock(return_value=True))
    rollout.configure(oracle(("bash", {"command": "kill -9 $PPID; sleep 30"})))
    trajectory = await rollout.play()
    assert (trajectory.truncated, trajectory.truncated_reason) == (True, "SandboxOutOfMemory")
    result = await rollout.score()
    assert (result.reward, result.reward_reason) == (0.0, "SandboxOutOfMemory")


INSTALLED = """
from rollyard_sandbox.errors import FileError
from rollyard_testing.crds.segments import lists

class Judge(Handler):
    components = ("seen",)

    async def init(self, ctx):
        await super().init(ctx)
        await ctx.sandbox.write_file("note.txt", b"\\0 from init")

    async def run(self, ctx):
        further = await ctx.agent_steps.step(ctx.task, 60.0)
        ctx.agent_steps.say("Once more.")
        await ctx.run_agent()
        ctx.carry["further"] = further

    async def eval(self, ctx):
        assert ctx.carry == {"further": True}
        box = ctx.sandbox
        waiting = await box.start("echo ask; read line; echo got $line", session="s")
        await waiting.wait_for_output(b"ask")
        await waiting.send_input(b"input\\n")
        await waiting.wait_for_output(b"got input")
        results = await asyncio.gather(*(box.run(["echo", str(n)]) for n in range(20)))
        assert [result.text() for result in results] == [f"{n}\\n" for n in range(20)]
        assert b"note.txt" in await box.work_folder().tree()
        assert (await box.read_file("note.txt")).data == b"\\0 from init"
        try:
            await box.read_file("missing.txt")
        except FileError as error:
            assert error.reason == "FileNotFound"
        tested = await ctx.run_test("echo $HOME; exit 3")
        assert tested.text() == ctx.place.home + "\\n"
        END
        return Evaluation(0.25, {"seen": len(ctx.trajectory.messages)})
"""


@pytest.fixture
def installed(rollout: Rollout, model: UseModel, install: Install) -> Installed:
    """Return a function for the Eval of a handler of an installed package, which ends with `end`."""

    async def evaluated(end: str, **spec: Any) -> StageResult:
        install(INSTALLED.replace("END", end))
        model(lambda prompt: f"Turn {prompt.count('<|im_start|>assistant')}.{END}", handler="steered", **spec)
        await rollout.play()
        return await rollout.score()

    return evaluated


async def test_an_installed_handler_uses_its_context_from_its_own_process(
    rollout: Rollout, installed: Installed
) -> None:
    result = await installed("pass")
    said = [(message.role, message.content) for message in rollout.ran.trajectory.messages]
    assert said == [
        ("user", "q"), ("assistant", "Turn 1."), ("user", "Once more."), ("assistant", "Turn 2."),
    ]  # fmt: skip
    assert (result.reward, result.reward_components) == (0.25, {"seen": 4.0})
    assert result.reward_output.startswith("/")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("await box.read_file('missing.txt')", "SandboxSabotaged"),
        ("await box.bash('sleep 3600', timeout=3600)", "TestTimeout"),
    ],
    ids=["a missing file", "a test that hangs"],
)
async def test_what_the_policy_broke_is_scored_where_the_handler_has_its_own_process(
    rollout: Rollout, installed: Installed, end: str, reason: str
) -> None:
    rollout.stages._eval_grace = 0.0
    result = await installed(end, stages={"eval": {"timeoutSeconds": round(patience(3))}})
    assert (result.reward, result.reward_reason) == (0.0, reason)


@pytest.mark.attack(
    "a handler whose process a policy has taken over breaks the protocol, or keeps the sandbox of a "
    "rollout for the next one",
    boundary="evaluation",
    surface="handlers of packages",
    stopped_by="the process ends, and its rollout fails with the handler's name; a request of a call that "
    "has ended is refused. It runs **as the worker's user** all the same",
)
async def test_a_sandbox_is_out_of_reach_when_its_call_has_ended(
    rollout: Rollout, installed: Installed
) -> None:
    """A handler that keeps the context of a rollout does not reach the sandbox of the next one by it."""
    kept = "if box is not globals().setdefault('kept', box): await kept.run(['true'])"
    await installed(kept)
    await rollout.play()
    with pytest.raises(SandboxError, match="the call of this request has ended"):
        await rollout.score()


async def test_a_failing_backend_is_reported_through_an_installed_handler(
    rollout: Rollout, model: UseModel, install: Install
) -> None:
    """The exception of the agent is the worker's own, whatever the handler did with it."""
    install(INSTALLED)
    model(lambda prompt: END, handler="steered")
    rollout.change_backend(url="http://127.0.0.1:9")
    with pytest.raises(BackendUnavailable):
        await rollout.play()


async def test_a_crash_of_an_exec_server_is_a_failure_once(
    rollout: Rollout, caplog: pytest.LogCaptureFixture
) -> None:
    """Without isolation, a command can end its own server, which then looks as after a crash."""
    rollout.configure(oracle(("bash", {"command": "kill -9 $PPID; sleep 30"}), ("submit", {"answer": ""})))
    trajectory = await rollout.play()
    assert (trajectory.truncated, trajectory.truncated_reason) == (True, "SandboxCrashed")
    assert trajectory.messages[-1].content == "error: the sandbox has ended by itself, and is gone"
    assert "this is a bug" in caplog.text
    with pytest.raises(PipelineError) as caught:
        await rollout.score()
    error = caught.value
    assert (error.reason, error.return_to, error.counts, error.retryable) == (
        "SandboxCrashed", "init", True, True,
    )  # fmt: skip
    again = await rollout.score(attempt=1)
    assert (again.reward, again.reward_reason) == (0.0, "SandboxCrashed")


class Late(ShellHandler):
    """A handler that uses the sandbox in Run, after the agent."""

    async def run(self, ctx: StageContext) -> None:
        await super().run(ctx)
        await ctx.sandbox.bash("sleep 30")


async def test_a_crash_in_a_call_of_the_handlers_own_is_one_of_run(rollout: Rollout) -> None:
    rollout.configure(oracle(("bash", {"command": "(sleep 0.1; kill -9 $PPID) & disown"})), handler="late")
    trajectory = await rollout.play()
    assert (trajectory.truncated, trajectory.truncated_reason) == (True, "SandboxCrashed")


@pytest.mark.attack(
    "a bug of the exec server is used to end it, each time that a rollout goes badly",
    boundary="evaluation",
    surface="sabotage in Run",
    stopped_by="the first crash of a rollout is an infrastructure failure, which is logged as a bug "
    "(`SandboxCrashed`); from the second one on the rollout scores 0. Where no control group binds the "
    "memory of a sandbox, a server that the kernel ends because the whole node is out of memory counts as "
    "crashed, too",
)
async def test_a_crash_after_run_is_a_failure_once(rollout: Rollout) -> None:
    rollout.configure(oracle(("bash", {"command": "(sleep 0.1; kill -9 $PPID) & disown"})))
    await rollout.play()
    await eventually(lambda: not rollout.provider.claimed(), patience(20))
    for swept in ([], [rollout.init.sandbox.id]):
        with pytest.raises(PipelineError) as caught:
            await rollout.score()
        assert caught.value.reason == "SandboxCrashed"
        again = await rollout.score(attempt=1)
        assert (again.reward, again.reward_reason) == (0.0, "SandboxCrashed")
        if not swept:
            assert await rollout.provider.sweep() == [rollout.init.sandbox.id]


async def test_cancelling_run_stops_its_command(rollout: Rollout, tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    command = f"while :; do echo x >> {mark}; sleep 0.02; done"
    rollout.configure(oracle(("bash", {"command": command})))
    rollout.init = await rollout.stage("init")
    task = asyncio.create_task(rollout.stage("run", sandbox=rollout.init.sandbox))
    await eventually(mark.exists, patience(20))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(patience(20)):
        last = -1
        while (now := mark.stat().st_size) != last:
            last = now
            await asyncio.sleep(0.5)  # Some rounds of the loop: nothing tells that there are no more.


@pytest.fixture
async def files(rollout: Rollout) -> AsyncIterator[ExecClient]:
    rollout.configure()
    rollout.init = await rollout.stage("init")
    async with await rollout.provider.attach(rollout.init.sandbox) as sandbox:
        yield sandbox.client


async def test_edit(files: ExecClient) -> None:
    ctx = ToolContext(client=files, timeout=10.0, max_output_bytes=200)

    async def edit(**arguments: Any) -> str:
        return (await EditTool().call(arguments, ctx)).text

    assert await edit(command="create", path="a/b.txt", file_text="one\ntwo\ntwo\n") == "created a/b.txt"
    assert await edit(command="view", path="a/b.txt") == "     1\tone\n     2\ttwo\n     3\ttwo"
    assert await edit(command="view", path="a/b.txt", view_range=[2, -1]) == "     2\ttwo\n     3\ttwo"
    assert "view_range" in await edit(command="view", path="a/b.txt", view_range=[9, 2])
    assert await edit(command="view", path="a") == "b.txt"
    assert await edit(command="view", path=".") == "a/"
    twice = await edit(command="str_replace", path="a/b.txt", old_str="two", new_str="2")
    assert twice == "error: old_str occurs 2 times in a/b.txt, expected once"
    assert (
        await edit(command="str_replace", path="a/b.txt", old_str="one\ntwo", new_str="1\n2")
        == "edited a/b.txt"
    )
    assert await edit(command="insert", path="a/b.txt", insert_line=0, new_str="zero") == "edited a/b.txt"
    assert await edit(command="insert", path="a/b.txt", insert_line=4, new_str="end") == "edited a/b.txt"
    assert (await files.read_file("a/b.txt")).text() == "zero\n1\n2\ntwo\nend"
    assert await edit(command="view", path="none.txt") == "error: no such file: none.txt"
    assert await edit(command="str_replace", path="none.txt", old_str="a") == "error: no such file: none.txt"
    await files.write_file("binary", b"\xff\xfe")
    assert (await edit(command="view", path="binary")).startswith("error: binary is not UTF-8 text")
    await files.write_file("long", b"x" * 1000)
    assert "bytes left out" in await edit(command="view", path="long")
