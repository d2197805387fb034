"""Init, Run and Eval of single rollouts: sandboxes, rewards, handlers, and what counts as a failure.

The sandboxes are bare processes. Tests of the policy's turns in Run are in test_stage_runs.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from rollyard_crds.lease import Lease, RewardRequest, RewardResponse, StageResult
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_crds.trajectory import Trajectory
from rollyard_inference.errors import BackendUnavailable
from rollyard_pipeline.errors import EvalTimeout, PermanentFailure, PipelineError, SetupFailed
from rollyard_pipeline.handlers.base import StageContext
from rollyard_pipeline.handlers.shell import ShellHandler
from rollyard_pipeline.registry import HANDLERS, Registry
from rollyard_pipeline.sandboxes.errors import ImageNotUsable, SandboxLost
from rollyard_pipeline.stages.contexts import checked_carry, stage_context
from rollyard_pipeline.stages.rescoring import Rescorer
from rollyard_sandbox.errors import SandboxError
from rollyard_testing.families import FAMILIES, write_folder
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.single_rollouts import END, Rollout, UseModel, oracle
from rollyard_testing.waiting import eventually

Install = Callable[[str], None]
Installed = Callable[..., Awaitable[StageResult]]


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


@pytest.fixture
def extensions() -> Registry:
    return Registry({HANDLERS: {"late": Late}})


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
