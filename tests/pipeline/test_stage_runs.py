"""Run of single rollouts with a scripted model: calls and tools, limits, backends, tokenizers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import BackendAssignment, StageTimes
from rollyard_crds.task import Task
from rollyard_crds.trajectory import MALFORMED_CALL
from rollyard_inference.errors import BackendUnavailable
from rollyard_pipeline.agents.base import Agent, AgentContext
from rollyard_pipeline.backends.session import request_seed
from rollyard_pipeline.errors import NoToolParser, PermanentFailure, TemplateError, TokenizerUnavailable
from rollyard_pipeline.registry import AGENTS, Registry
from rollyard_pipeline.stages.stages import AgentRuns, RunLimits
from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.tools import ToolContext
from rollyard_pipeline.tools.shipped import EditTool
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.worker.worker import stage_failure
from rollyard_sandbox.client import ExecClient
from rollyard_testing.families import FAMILIES
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.call_suite import MINIMAX, byte_folder, byte_tokenizer
from rollyard_testing.pipeline.single_rollouts import END, Answer, Rollout, UseModel, call, oracle
from rollyard_testing.waiting import eventually


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
        ({"maxContextTokens": 8192}, {"maxTokens": 500}, 1500, "MaxContext"),
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


@pytest.mark.attack(
    "a policy never ends its turn, to keep its place on a backend",
    boundary="evaluation",
    surface="jobs without limits of their own",
    stopped_by="the context of the server, and the time of Run: the rollout is truncated and scored",
)
async def test_a_job_without_options_is_cut_by_nothing_but_the_servers_context(
    rollout: Rollout, model: UseModel
) -> None:
    """A thought of thousands of tokens ends, and one that does not end is cut where the context ends."""
    steps = ["<think>" + "so " * 3000 + "</think>" + call("bash", command="echo x"), "so " * 40_000]
    model(lambda prompt: steps[prompt.count("<tool_response>")])
    rollout.model.card["max_model_len"] = rollout.model.context = 30_000
    trajectory = await rollout.play()
    assert [turn.finish_reason for turn in trajectory.turns] == ["tool_calls", "length"]
    assert (trajectory.truncated, trajectory.truncated_reason) == (True, "MaxContext")
    last = trajectory.segments[-1]  # The template leaves out the thoughts of earlier turns.
    assert len(last.prompt_ids) + len(last.response_ids) == 30_000
    assert trajectory.sampling.max_tokens is None
    assert (await rollout.score()).reward == 1.0


@pytest.mark.parametrize(
    ("agent", "context", "limit"),
    [
        ({}, 12_000, 12_000),
        ({"maxContextTokens": 9000}, 12_000, 9000),
        ({"maxToolOutputBytes": 300}, 12_000, 300),
    ],
)
async def test_the_output_of_a_call_is_a_share_of_the_context(
    rollout: Rollout, model: UseModel, agent: dict[str, Any], context: int, limit: int
) -> None:
    model(lambda prompt: call("bash", command="seq 1 20000"), {"maxTurns": 1, **agent})
    rollout.model.card["max_model_len"] = context
    trajectory = await rollout.play()
    (output,) = (message.content for message in trajectory.messages if message.role == "tool")
    assert limit <= len(output) <= limit + 100, "with a note about what is left out"


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


@pytest.fixture
def extensions() -> Registry:
    return Registry({AGENTS: {"replaying": ReplayingAgent}})


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


class Playing:
    """What limits need of an agent's context: its episode, whose turn can be cut."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.cut = 0

    async def cut_turn(self) -> None:
        self.cut += 1

    def truncate(self, reason: str) -> None:
        self.episode.truncate(reason)


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
    playing: Any = Playing(episode)
    limits = RunLimits(session, playing)
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
    playing: Any = Playing(episode)
    limits = RunLimits(session, playing)
    words = "no backend answered until Run's limit of 0.01 s; last: refused"
    blamed = nullcontext() if silence is None else pytest.raises(BackendUnavailable, match=words)
    with blamed:
        async with limits.within(0.01):
            await asyncio.Event().wait()
    assert episode.truncated_reason == ("RunTimeout" if silence is None else "")
    assert playing.cut == (silence is None), "a turn that is sampled keeps its tokens"
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
    context: Any = Playing(episode)
    agent, limits = Waiting(), RunLimits(None, context)
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
