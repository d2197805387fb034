"""The gateway's session of a rollout, on the embedded engine with the shipped policy."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import AgentSpec, SamplingSpec
from rollyard_crds.task import Message, Task
from rollyard_crds.token_arrays import PackedSegment
from rollyard_inference.errors import BackendUnavailable
from rollyard_pipeline.agents.base import AgentContext
from rollyard_pipeline.backends import BackendClient, BackendSession
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.errors import NoToolParser
from rollyard_pipeline.gateway import session as session_module
from rollyard_pipeline.gateway.calls import Delta, HistoryCall, HistoryMessage, ModelCall, ModelReply
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.pending import SampledReply
from rollyard_pipeline.gateway.session import Chat, GatewaySession
from rollyard_pipeline.tool_parsers.json_calls import HermesParser
from rollyard_pipeline.tools.base import ToolContext
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.recorder import TrajectoryRecorder
from rollyard_process.telemetry.scope import RolloutScope, entered
from rollyard_testing.crds.segments import lists
from rollyard_testing.pace import patience
from rollyard_testing.traces.kept import Kept

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "engine/src/rollyard_engine/models/tiny-policy"
TOOLS: tuple[Mapping[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": name, "parameters": {
        "type": "object", "properties": {argument: {"type": "string"}}}}}
    for name, argument in (("bash", "command"), ("submit", "answer"))
)  # fmt: skip
TASKS = [
    json.loads(line)["prompt"] for line in (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()
]
PROTOCOL = "openai-chat"


@asynccontextmanager
async def serving(model: Path, folder: Path) -> AsyncIterator[str]:
    """Start the embedded engine with a model, and yield its URL."""
    port_file = folder / "port"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard_engine", "--model", str(model), "--port", "0", "--port-file",
        str(port_file), "--policy-version", "v1", "--served-model-name", "tiny-policy",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(patience(60)):
            while not port_file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(patience(30)):
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Yield the URL of the engine with the shipped policy."""
    async with serving(POLICY, tmp_path_factory.mktemp("engine")) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chatty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Yield the URL of an engine with weights that make nonsense, which hardly ever ends."""
    folder = tmp_path_factory.mktemp("chatty")
    shutil.copytree(POLICY, folder / "model")
    data = folder / "model/model.onnx.data"
    numbers = np.fromfile(data, dtype=np.float32)
    (numbers * np.random.default_rng(0).normal(0.0, 1.0, numbers.shape).astype(np.float32)).tofile(data)
    async with serving(folder / "model", folder) as url:
        yield url


@dataclass
class Yard:
    """What a Run worker has."""

    client: BackendClient
    url: str
    formats: FormatCache = field(default_factory=FormatCache)
    made: int = 0
    """The number of backend sessions."""

    def backend(self, sampling: SamplingSpec, url: str = "", **options: Any) -> BackendSession:
        async def route(failed: str, error: str, blame: bool) -> RouteResponse:
            return RouteResponse(backend=None, retry_after=0.1)

        self.made += 1
        assignment = BackendAssignment(
            pool="p", url=url or self.url, model="tiny-policy", tokenizer=str(POLICY), policy_version="v1"
        )
        return BackendSession(
            self.client, assignment, route, sampling, task_id="t", sample_index=0,
            **{"budget": patience(20.0), **options},
        )  # fmt: skip

    async def chat(self, tools: Sequence[Mapping[str, Any]]) -> Chat:
        format = await self.formats.get(str(POLICY), tools)
        return Chat(format, "hermes" if tools else "", HermesParser() if tools else None)

    def session(self, *, url: str = "", context: int = 1024, **options: Any) -> GatewaySession:
        """Return the session of a new rollout."""
        spec = AgentSpec(max_turns=options.pop("max_turns", 20))
        sampling = SamplingSpec(max_tokens=options.pop("max_tokens", 64), seed=options.pop("seed", 0))
        backend = options.pop("backend", {})
        episode = Episode([Message(role="user", content=TASKS[0])])
        return GatewaySession(
            spec=spec, sampling=sampling, episode=episode, key="k", model="m", context=context,
            sessions=lambda: self.backend(sampling, url, **backend), **{"chats": self.chat, **options},
        )  # fmt: skip


@pytest.fixture
async def yard(engine: str) -> AsyncIterator[Yard]:
    async with BackendClient() as client:
        yield Yard(client, engine)


def user(text: str) -> HistoryMessage:
    return HistoryMessage("user", text)


def call(*messages: HistoryMessage, tools: bool = True, **fields: Any) -> ModelCall:
    return ModelCall(messages, TOOLS if tools else (), **fields)


def said(reply: ModelReply) -> HistoryMessage:
    """Return a reply as a harness repeats it."""
    calls = tuple(HistoryCall(made.id, made.name, made.arguments) for made in reply.calls)
    return HistoryMessage("assistant", reply.text, reply.thought, calls)


def results(reply: ModelReply, number: int) -> list[HistoryMessage]:
    """Return what a harness appends to a reply."""
    outputs = [
        HistoryMessage("tool", observation(number, index), call_id=made.id)
        for index, made in enumerate(reply.calls)
    ]
    return [said(reply), *(outputs or [user(f"and now? {number}")])]


def observation(turn: int, index: int) -> str:
    return f"output {turn}.{index}: 7\n"


async def play(session: GatewaySession, prompt: str, turns: int) -> list[ModelReply]:
    """Play a usual harness."""
    history, replies = [user(prompt)], []
    for number in range(turns):
        reply = await (await session.answer(call(*history), PROTOCOL)).reply()
        replies.append(reply)
        history += results(reply, number)
    return replies


async def native(yard: Yard, prompt: str, turns: int, seed: int) -> Episode:
    """Play the same as `play` with our own agent."""
    chat = await yard.chat(TOOLS)
    episode = Episode([Message(role="user", content=prompt)])
    episode.recorder = TrajectoryRecorder(chat.format, chat.format.opening(episode.messages))
    sampling = SamplingSpec(max_tokens=64, seed=seed)
    context = AgentContext(
        task=Task(id="t", prompt=prompt), spec=AgentSpec(max_context_tokens=1024), sampling=sampling,
        episode=episode, tools={}, parser=chat.parser, session=yard.backend(sampling),
        tool_context=ToolContext(client=None, timeout=1.0, max_output_bytes=100),
    )  # fmt: skip
    for number in range(turns):
        turn = await context.turn()
        assert turn is not None
        episode.truncated_reason, episode.finished = "", False
        for index, made in enumerate(turn.calls):
            episode.add_observation(made, observation(number, index), None, 0.0)
        if not turn.calls:
            episode.add_user(f"and now? {number}")
    return episode


def own(session: GatewaySession) -> list[PackedSegment]:
    record = session.conversations.branches()
    assert record.branches == []
    return record.segments


@pytest.mark.parametrize("seed", range(4))
async def test_the_ids_are_those_of_our_own_agent(yard: Yard, seed: int) -> None:
    session = yard.session(seed=seed)
    replies = await play(session, TASKS[seed], 4)
    await session.close(CallError("ended", "the harness has ended"))
    expected = await native(yard, TASKS[seed], 4, seed)
    assert expected.recorder is not None
    assert lists(own(session)) == lists(expected.recorder.segments())
    episode = session._episode
    # The last reply has had no results.
    assert episode.messages == expected.messages[: len(episode.messages)]
    assert [turn.finish_reason for turn in episode.turns] == [turn.finish_reason for turn in expected.turns]
    sampled = sum(turn.end - turn.start for turn in episode.turns)
    stats = session.stats
    assert stats.gateway is not None
    assert stats.sampled_tokens == sampled == sum(reply.usage.sampled for reply in replies)
    assert (stats.requests, stats.gateway.calls, stats.gateway.conversations) == (
        4,
        {PROTOCOL: 4},
        {"main": 1},
    )
    last = replies[-1].usage
    assert stats.gateway.tokenized == last.prompt + last.sampled - sampled
    assert episode.tool_parser == "hermes"
    assert session.model_seconds > 0
    assert session.turns == 4


async def test_a_repeated_call_has_the_same_reply(yard: Yard) -> None:
    """It does whether the first one is done or not, and whether they stream or not."""
    session = yard.session()
    first = call(user(TASKS[0]))
    early, late = await asyncio.gather(
        session.answer(first, PROTOCOL), session.answer(replace(first, stream=True, model="x"), PROTOCOL)
    )
    assert early is late
    reply = await early.reply()
    again = await session.answer(replace(first, details={"stream_options": {}}), PROTOCOL)
    assert await again.reply() is reply
    other = await session.answer(first, "anthropic-messages")
    assert other is not early, "another protocol is another call"
    await other.reply()
    asked = await session.answer(replace(first, asked={"temperature": 0.5}), PROTOCOL)
    assert asked is not early
    await asked.reply()
    gateway = session.stats.gateway
    assert gateway is not None
    assert (gateway.repeats, session.stats.requests, session.turns) == (2, 3, 3)
    assert gateway.calls == {PROTOCOL: 4, "anthropic-messages": 1}


async def test_what_was_asked_is_recorded_and_the_job_s_sampling_holds(yard: Yard) -> None:
    session = yard.session(max_tokens=40)
    asked = {"temperature": 0.0, "max_tokens": 3}
    reply = await (await session.answer(call(user(TASKS[0]), max_tokens=3, asked=asked), PROTOCOL)).reply()
    assert (reply.finish, reply.usage.sampled) == ("length", 3)
    assert session._episode.turns[0].asked == asked
    history = [user(TASKS[0]), *results(reply, 0)]
    whole = await (await session.answer(call(*history, max_tokens=500), PROTOCOL)).reply()
    assert whole.usage.sampled <= 40
    cut = await (await session.answer(call(user("a title"), tools=False, max_tokens=1), PROTOCOL)).reply()
    assert (cut.finish, whole.finish) == ("length", "tool_calls")
    await session.close(CallError("ended", "the harness has ended"))
    assert session._episode.truncated_reason == "", "only the own conversation's last turn says so"


@pytest.mark.parametrize(("context", "most", "reason"), [(1024, 3, "MaxTokens"), (60, None, "MaxContext")])
async def test_a_last_turn_that_its_limit_cuts_truncates(
    yard: Yard, chatty: str, context: int, most: int | None, reason: str
) -> None:
    session = yard.session(context=context, max_tokens=most, url=chatty)
    prompt = user("Hi.")
    room = context - await session.count_tokens(call(prompt, tools=False))
    reply = await (await session.answer(call(prompt, tools=False), PROTOCOL)).reply()
    assert (reply.finish, reply.usage.sampled) == ("length", most or room)
    await session.close(CallError("ended", "the harness has ended"))
    assert session._episode.truncated_reason == reason


async def test_calls_at_the_same_time(yard: Yard) -> None:
    """Each has its own backend session, as that holds the state of one turn."""
    session = yard.session()
    pending = await asyncio.gather(
        *(session.answer(call(user(f"{TASKS[number]} {number}")), PROTOCOL) for number in range(6))
    )
    replies = await asyncio.gather(*(one.reply() for one in pending))
    assert yard.made == 6
    assert len({made.id for reply in replies for made in reply.calls}) == sum(
        len(reply.calls) for reply in replies
    )
    record = session.conversations.branches()
    segments = lists(record.segments)
    assert len(segments) == 6
    spans = [(turn.segment, turn.start, turn.end) for turn in session._episode.turns] + [
        (turn.segment, turn.start, turn.end) for branch in record.branches for turn in branch.turns
    ]
    assert sorted(spans) == [(number, 0, len(segments[number].response_ids)) for number in range(6)]
    assert len(session._sampler._seeds) == 1, "one of them is the main conversation"
    # The sessions are used again.
    await play(session, "another one", 2)
    assert yard.made == 6


async def test_seeds_differ_between_conversations(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    original = BackendSession.turn

    async def turn(self: BackendSession, prompt: Sequence[int], most: int, number: int) -> Any:
        turns.append(number)
        return await original(self, prompt, most, number)

    monkeypatch.setattr(BackendSession, "turn", turn)
    session = yard.session()
    await play(session, TASKS[0], 2)
    for number in range(3):
        await (await session.answer(call(user(f"Title {number}?"), tools=False), PROTOCOL)).reply()
    await play(session, TASKS[1], 2)
    assert turns[:2] == [0, 1]
    assert len(set(turns)) == len(turns) == 7
    assert all(0 <= turn < 1 << 32 for turn in turns)


async def test_a_seed_is_used_once_though_a_call_between_has_failed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, failing, original = [], asyncio.Event(), BackendSession.turn

    async def turn(self: BackendSession, prompt: Sequence[int], most: int, number: int) -> Any:
        if len(turns) == 1 and not failing.is_set():
            await failing.wait()
            raise BackendUnavailable("gone")
        turns.append(number)
        return await original(self, prompt, most, number)

    monkeypatch.setattr(BackendSession, "turn", turn)
    session = yard.session()
    history = [user(TASKS[0])]
    history += results(await (await session.answer(call(*history), PROTOCOL)).reply(), 0)
    other = await session.answer(call(user(TASKS[0]), user("rewritten")), PROTOCOL)
    await asyncio.sleep(0)
    turns.append(-1)
    history += results(await (await session.answer(call(*history), PROTOCOL)).reply(), 1)
    failing.set()
    with pytest.raises(CallError):
        await other.reply()
    await (await session.answer(call(*history), PROTOCOL)).reply()
    assert len(set(turns)) == len(turns) == 4


async def test_a_client_that_hangs_up_neither_ends_nor_loses_a_turn(yard: Yard) -> None:
    session = yard.session()
    pending = await session.answer(call(user(TASKS[0]), stream=True), PROTOCOL)

    async def read() -> None:
        async for _ in pending.deltas():
            pass

    reader = asyncio.create_task(read())
    await pending.started()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    reply = await (await session.answer(call(user(TASKS[0])), PROTOCOL)).reply()
    assert session.stats.requests == 1
    assert session._episode.turns[0].end == reply.usage.sampled


async def test_turns_are_limited(yard: Yard) -> None:
    session = yard.session(max_turns=2)
    replies = await play(session, TASKS[0], 2)
    with pytest.raises(CallError, match=r"2 turns \(agent\.maxTurns\)") as refused:
        await session.answer(call(user("more")), PROTOCOL)
    assert (refused.value.problem, refused.value.status) == ("limit", 400)
    assert session.refused is refused.value
    repeated = await session.answer(call(user(TASKS[0])), PROTOCOL)
    assert await repeated.reply() is replies[0], "a repeat needs no turn"
    await session.close(CallError("ended", "the harness has ended"))
    assert session._episode.truncated_reason == "MaxTurns"
    gateway = session.stats.gateway
    assert gateway is not None
    assert (gateway.refused, gateway.repeats, session.turns) == (1, 1, 2)


async def test_the_context_is_limited(yard: Yard) -> None:
    session = yard.session(context=200)
    with pytest.raises(CallError, match="leaves no room") as refused:
        await session.answer(call(user("x y z " * 100)), PROTOCOL)
    assert refused.value.problem == "context"
    assert refused.value.tokens is not None
    tokens, limit = refused.value.tokens
    assert tokens >= limit == 200
    assert tokens == await session.count_tokens(call(user("x y z " * 100)))
    assert session.conversations.kinds() == []
    reply = await (await session.answer(call(user("Count to 1000.")), PROTOCOL)).reply()
    assert reply.usage.prompt + reply.usage.sampled <= 200
    with pytest.raises(CallError, match="leaves no room"):
        await session.answer(call(user("another agent " * 100)), PROTOCOL)
    assert session._sampler.truncated == "", "that is not the own conversation"
    with pytest.raises(CallError, match="leaves no room"):
        await session.answer(call(user("Count to 1000."), said(reply), user("x y z " * 100)), PROTOCOL)
    await session.close(CallError("ended", "the harness has ended"))
    assert session._episode.truncated_reason == "MaxContext"


async def test_the_server_s_own_context_is_an_error_of_the_call(yard: Yard) -> None:
    session = yard.session(context=1_000_000)
    pending = await session.answer(call(user("x y z " * 3000)), PROTOCOL)
    for wait in (pending.started, pending.reply):
        with pytest.raises(CallError) as refused:
            await wait()
        assert refused.value.problem == "context"
        assert refused.value.tokens is not None
    assert (session.turns, session.failure, session.conversations.kinds()) == (0, None, [])


async def test_calls_in_flight_are_limited(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_CALLS_IN_FLIGHT", 2)
    session = yard.session()
    pending = [await session.answer(call(user(f"{number}")), PROTOCOL) for number in range(2)]
    with pytest.raises(CallError) as refused:
        await session.answer(call(user("third")), PROTOCOL)
    assert (refused.value.status, refused.value.retry_after) == (429, 1.0)
    await asyncio.gather(*(one.reply() for one in pending))
    await (await session.answer(call(user("third")), PROTOCOL)).reply()


async def tokens_came(pending: SampledReply, session: GatewaySession, count: int) -> None:
    """Wait until a turn has some tokens."""
    await pending.started()
    async with asyncio.timeout(patience(20)):
        while len((session.sampled_now() or ((), 0.0))[0]) < count:
            assert not pending.ended, "the policy has ended its turn before"
            await asyncio.sleep(0)


@pytest.mark.parametrize("problem", ["ended", "limit"])
async def test_a_turn_that_the_end_cuts_keeps_its_tokens(yard: Yard, chatty: str, problem: Any) -> None:
    session = yard.session(max_tokens=1900, context=2000, url=chatty)
    prompt = TASKS[0]
    pending = await session.answer(call(user(prompt)), PROTOCOL)
    await tokens_came(pending, session, 3)
    shown = session.sampled_now()
    assert shown is not None
    await session.close(CallError(problem, "the end"))
    with pytest.raises(CallError, match="the end"):
        await pending.reply()
    (turn,) = session._episode.turns
    (segment,) = lists(own(session))
    assert tuple(segment.response_ids[: len(shown[0])]) == shown[0]
    assert turn.finish_reason == "length"
    assert set(segment.policy_versions) == {"v1"}
    assert turn.end == len(segment.response_ids) == session.stats.sampled_tokens
    assert session._episode.truncated_reason == "", "the stage says why it ended"
    assert await session.silence() is None
    for refused in (call(user(prompt)), call(user("another"))):
        with pytest.raises(CallError, match="the end") as late:
            await session.answer(refused, PROTOCOL)
        assert late.value.problem == problem
    await session.close(CallError("ended", "once more"))
    assert session.turns == 1


async def test_the_first_end_says_whether_the_last_turn_truncates(yard: Yard, chatty: str) -> None:
    """A turn that a limit of tokens has cut is not how a rollout ends whose time is up later."""
    session = yard.session(context=2000, url=chatty)
    first = await (await session.answer(call(user("Hi."), max_tokens=3), PROTOCOL)).reply()
    assert (first.finish, session._sampler.truncated) == ("length", "MaxTokens")
    await session.answer(call(user("Hi."), said(first), user("more")), PROTOCOL)
    await session.close(CallError("limit", "the time is up"))
    await session.close(CallError("ended", "the harness has ended"))
    assert session._episode.truncated_reason == ""


async def test_who_closes_may_be_cancelled(yard: Yard, chatty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cutting, released, original = asyncio.Event(), asyncio.Event(), BackendSession.cut

    async def cut(self: BackendSession) -> Any:
        cutting.set()
        await released.wait()
        return await original(self)

    monkeypatch.setattr(BackendSession, "cut", cut)
    session = yard.session(max_tokens=1900, context=2000, url=chatty)
    pending = await session.answer(call(user(TASKS[0])), PROTOCOL)
    await tokens_came(pending, session, 3)
    closing = asyncio.create_task(session.close(CallError("ended", "the end")))
    await cutting.wait()
    closing.cancel()
    await asyncio.wait([closing])
    released.set()
    with pytest.raises(CallError, match="the end"):
        await pending.reply()
    (turn,) = session._episode.turns
    assert turn.end == session.stats.sampled_tokens >= 3


async def test_a_further_harness_repeats_no_call_of_the_first_one(yard: Yard) -> None:
    session = yard.session()
    first = await (await session.answer(call(user(TASKS[0])), PROTOCOL)).reply()
    await session.close(CallError("ended", "the harness has ended"))
    session.reopen()
    again = await (await session.answer(call(user(TASKS[0])), PROTOCOL)).reply()
    assert again.id != first.id
    assert (session.turns, session.stats.requests) == (2, 2)


async def test_the_end_before_a_task_has_begun(yard: Yard) -> None:
    session = yard.session()
    pending = await session.answer(call(user(TASKS[0])), PROTOCOL)
    await session.close(CallError("ended", "the end"))
    with pytest.raises(CallError, match="the end"):
        await pending.reply()
    assert (session.turns, session.conversations.branches().segments) == (0, [])
    session.reopen()
    assert (await (await session.answer(call(user(TASKS[0])), PROTOCOL)).reply()).usage.sampled > 0


async def test_a_backend_that_does_not_answer_is_a_failure_and_the_call_can_be_repeated(
    yard: Yard, free_port: int
) -> None:
    urls = [f"http://127.0.0.1:{free_port}", yard.url]
    session = yard.session(url=urls[0], backend={"budget": 0.2})
    first = call(user(TASKS[0]))
    pending = await session.answer(first, PROTOCOL)
    with pytest.raises(CallError) as failed:
        await pending.reply()
    assert (failed.value.status, failed.value.retry_after) == (503, 2.0)
    assert isinstance(session.failure, BackendUnavailable)
    assert (session.turns, session.conversations.kinds()) == (0, [])
    session._backends._all[0].backend = session.backend.model_copy(update={"url": urls[1]})
    again = await session.answer(first, PROTOCOL)
    assert again is not pending
    await again.reply()
    assert session.failure is None
    assert session.turns == 1
    gateway = session.stats.gateway
    assert gateway is not None
    assert (gateway.calls, gateway.refused, gateway.repeats) == ({PROTOCOL: 2}, 1, 0)


@pytest.fixture
def free_port(unused_tcp_port_factory: Callable[[], int]) -> int:
    """Return a port on which nothing listens."""
    return unused_tcp_port_factory()


async def test_tools_that_no_parser_reads(yard: Yard) -> None:
    """The policy may offer them in a call of its own, so they end no rollout that has begun."""

    async def chats(tools: Sequence[Mapping[str, Any]]) -> Chat:
        if tools:
            raise NoToolParser("no parser knows the calls of this model")
        return await yard.chat(tools)

    session = yard.session(chats=chats)
    with pytest.raises(CallError, match="no parser") as refused:
        await session.answer(call(user("a")), PROTOCOL)
    assert refused.value.problem == "invalid"
    assert isinstance(session.failure, NoToolParser)
    await (await session.answer(call(user("a"), tools=False), PROTOCOL)).reply()
    with pytest.raises(CallError, match="no parser"):
        await session.answer(call(user("a")), PROTOCOL)
    assert session.failure is None


async def collected(pending: SampledReply) -> list[Delta]:
    return [delta async for delta in pending.deltas()]


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_streamed_is_the_reply(yard: Yard, seed: int) -> None:
    session = yard.session(seed=seed)
    history = [user(TASKS[seed])]
    for number in range(3):
        pending = await session.answer(call(*history, stream=True), PROTOCOL)
        first, second = await asyncio.gather(collected(pending), collected(pending))
        late = await collected(pending)
        reply = await pending.reply()
        for deltas in (first, second, late):
            assert "".join(delta.text for delta in deltas) == reply.text
            assert "".join(delta.thought for delta in deltas) == reply.thought
            assert tuple(delta.call for delta in deltas if delta.call is not None) == reply.calls
            assert all(bool(one.text) + bool(one.thought) + (one.call is not None) == 1 for one in deltas)
        history += results(reply, number)


@pytest.mark.parametrize("seed", range(4))
async def test_a_long_answer_comes_in_pieces(yard: Yard, chatty: str, seed: int) -> None:
    """The turns have broken characters and marks at any place."""
    session = yard.session(max_tokens=400, seed=seed, url=chatty)
    pending = await session.answer(call(user(TASKS[0]), tools=False, stream=True), PROTOCOL)
    deltas = await collected(pending)
    reply = await pending.reply()
    assert "".join(delta.text for delta in deltas) == reply.text
    assert len(deltas) > 2
    assert reply.usage.sampled > 100


async def test_a_weight_update_in_the_middle(yard: Yard, chatty: str) -> None:
    """The versions are those of each token, and a stream continues. Some turns end before the update."""
    async with httpx.AsyncClient(base_url=chatty, timeout=patience(30)) as http:
        try:
            for number in range(20):
                before, after = f"v{number + 1}", f"v{number + 2}"
                if await updated(yard, chatty, http, before, after):
                    return
        finally:
            await http.post("/resume")
            await http.post("/update_weight_version", json={"new_version": "v1"})
    raise AssertionError("no update came in the middle of a turn")


async def updated(yard: Yard, url: str, http: httpx.AsyncClient, before: str, after: str) -> bool:
    """Play a turn in which the weights are updated, and return whether the update cut it."""
    session = yard.session(max_tokens=1500, context=2000, url=url)
    pending = await session.answer(call(user(TASKS[0]), tools=False, stream=True), PROTOCOL)
    streamed = asyncio.create_task(collected(pending))
    await pending.started()
    await http.post("/pause", params={"mode": "abort"})
    await http.post("/update_weight_version", json={"new_version": after})
    await http.post("/resume")
    reply = await pending.reply()
    assert "".join(delta.text for delta in await streamed) == reply.text
    (segment,) = lists(own(session))
    versions = segment.policy_versions
    first = versions.count(before)
    assert versions == [before] * first + [after] * (len(versions) - first)
    assert len(versions) == reply.usage.sampled
    return 0 < first < len(versions) and session.stats.requests == 2


async def test_tokens_that_are_thrown_away_end_the_stream_and_a_repeat_has_the_reply(
    yard: Yard, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that names no version for its tokens makes them worthless if its label changes."""
    now, released = {"label": "v0"}, asyncio.Event()
    ids = [(await yard.chat(())).format.tokenizer.encode(text) for text in ("first text", "other text")]

    async def reply(body: dict[str, Any]) -> Any:
        first = len(server.requests) == 1
        mine = ids[0 if first else 1]
        await released.wait() if not first else None
        events = [backend.event(body, token) for token in mine]
        events[-1]["choices"][0]["finish_reason"] = "stop"
        if first:
            now["label"] = "v1"
        return await server.stream(*events, pause=0.01)

    server = backend(
        generate=reply,
        models=[{"id": "tiny-policy", "max_model_len": 1000, "logprobs_mode": "processed_logprobs"}],
        states={"/weight_info": lambda: {"weight_version": now["label"]}},
    )
    async with server:
        session = yard.session(url=server.url)
        pending = await session.answer(call(user("a"), tools=False, stream=True), PROTOCOL)

        async def read() -> None:
            async for delta in pending.deltas():
                assert delta.text
                released.set()

        with pytest.raises(CallError) as failed:
            await read()
        assert failed.value.problem == "unavailable"
        again = await session.answer(call(user("a"), tools=False), PROTOCOL)
        assert again is pending
        whole = await again.reply()
        assert whole.text == "other text"
        assert [delta.text for delta in await collected(pending)] == ["other text"]
    assert session.stats.discarded_tokens == len(ids[0])


async def test_malformed_calls_are_calls_with_an_error(yard: Yard, backend: Any) -> None:
    chat = await yard.chat(TOOLS)
    text = 'Look.\n<tool_call>\n{"name": "bash", "arguments": {"command": ls}}\n</tool_call>'

    def reply(body: dict[str, Any]) -> Any:
        mine = chat.format.tokenizer.encode(text + "<|im_end|>")
        content = [{"token_id": token, "logprob": -0.5} for token in mine]
        return backend.generated(body, token_ids=mine, logprobs={"content": content}, weight_versions=None)

    models = [{"id": "tiny-policy", "max_model_len": 1000, "logprobs_mode": "processed_logprobs"}]
    async with backend(generate=reply, models=models) as server:
        session = yard.session(url=server.url)
        answer = await (await session.answer(call(user("a")), PROTOCOL)).reply()
    (made,) = answer.calls
    assert (answer.text, answer.finish, made.name) == ("Look.", "tool_calls", "unknown")
    assert made.arguments == text.removeprefix("Look.\n")
    assert made.error.startswith("malformed tool call")
    assert answer.usage.thought == 0


async def test_waits_at_the_same_time_count_once(yard: Yard) -> None:
    session = yard.session()
    extended: list[float] = []
    session.on_wait = extended.append
    one, two = session._backends.take(), session._backends.take()
    for waiting, begin, seconds in ((one, 10.0, 2.0), (two, 11.0, 2.0), (one, 11.5, 1.0), (two, 20.0, 1.0)):
        waiting._passed(begin, seconds)
    assert extended == [2.0, 1.0, 1.0]
    assert session.waited_seconds == 4.0


async def test_a_turn_that_was_cut_does_not_mix_the_kinds_of_log_probabilities(yard: Yard) -> None:
    """The kind is asked for when a turn is complete. A session whose only turn was cut knows none."""
    session = yard.session()
    assert session.logprobs_mode == "unknown"
    one, two = session._backends.take(), session._backends.take()
    one._modes, one.stats.requests, two.stats.requests = {"a": "processed_logprobs"}, 1, 1
    assert session.logprobs_mode == "processed_logprobs"
    two._modes = {"b": "raw_logprobs"}
    assert session.logprobs_mode == "mixed"


async def test_each_call_has_a_span(yard: Yard) -> None:
    sink = Kept()
    scope = RolloutScope("default", "job", "job-0a1b2c3d-0-0", "run", 7, 0, sink)
    with entered(scope):
        session = yard.session(max_turns=1)
    pending = await session.answer(call(user("secret words")), PROTOCOL)
    await pending.reply()
    await session.answer(call(user("secret words")), PROTOCOL)
    with pytest.raises(CallError):
        await session.answer(call(user("more")), PROTOCOL)
    turn, sampled, repeat, refused = sink.spans
    assert turn.name == "chat tiny-policy"
    assert (turn.parent, sampled.parent) == (sampled.id, scope.span)
    assert {span.name for span in (sampled, repeat, refused)} == {"gateway call"}
    outcomes = [span.attributes["rollyard.gateway.outcome"] for span in (sampled, repeat, refused)]
    assert outcomes == ["sampled", "repeat", "limit"]
    assert sampled.attributes["rollyard.gateway.conversation"] == "main"
    assert sampled.attributes["rollyard.gateway.protocol"] == PROTOCOL
    assert refused.error == "limit"
    assert len({span.id for span in sink.spans}) == 4
    assert "secret" not in repr(sink.spans)
