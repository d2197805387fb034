"""Turns whose answers come as streams: they may take as long as they take, and what was cut is kept."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
import pytest
from aiohttp import web
from rollyard_crds.lease import BackendAssignment, LiveTurn, RouteResponse, StageTimes
from rollyard_inference.errors import BackendMismatch, BackendRefused, BackendUnavailable
from rollyard_pipeline.backends import BackendClient, Sampling, client
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.single_rollouts import Rollout, UseModel
from rollyard_testing.waiting import eventually

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)
SPANS = [{"version": "w1", "start": 0, "end": 2}, {"version": "w2", "start": 2, "end": 3}]


def metrics(values: Iterator[int]) -> Callable[[], web.Response]:
    return lambda: web.Response(text=f"vllm:iteration_tokens_total_sum {next(values)}\n")


def still() -> Callable[[], web.Response]:
    """Return the metrics of a server that computes nothing."""
    return metrics(itertools.repeat(7))


class Router:
    """The control plane's part, which gives one backend, and keeps what was reported to it."""

    def __init__(self, to: BackendAssignment) -> None:
        self.to = to
        self.asked: list[tuple[str, bool]] = []

    async def __call__(self, url: str, error: str, blame: bool) -> RouteResponse:
        self.asked.append((error, blame))
        return RouteResponse(backend=self.to)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at silent backends every few milliseconds instead of seconds."""
    for name in ("_PAUSE_POLL", "_LABEL_POLL", "_PULSE_POLL"):
        monkeypatch.setattr(client, name, 0.02)


async def test_events_add_up_to_one_answer(backend: Any) -> None:
    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        usage = {"choices": [], "usage": {"prompt_tokens": len(body["token_ids"])}}
        last = server.event(body, 6, finish_reason="stop", weight_versions=SPANS)
        return server.stream(b": a comment\n\n", server.event(body, 4, 5), last, usage)

    async with backend(generate=reply) as server, BackendClient() as backends:
        sample = await backends.sample(server.assignment, [1, 2, 3], SAMPLING)
    assert sample.token_ids == (4, 5, 6)
    assert sample.logprobs == (-0.5, -0.625, -0.75)
    assert sample.policy_versions == ("w1", "w1", "w2")
    assert sample.finish_reason == "stop"
    assert server.requests[0][1]["stream"] is True


async def test_the_tokens_of_a_stream_that_is_cut_are_continued(backend: Any) -> None:
    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        if len(server.requests) == 1:
            return server.stream(server.event(body, 4, 5), server.event(body, 6), end="cut")
        return server.stream(server.event(body, 7, finish_reason="stop"))

    async with backend(generate=reply) as server, BackendClient() as backends:
        talk = server.session(backends)
        sample = await talk.turn([1, 2], 8, 0)
    assert sample.token_ids == (4, 5, 6, 7)
    assert sample.logprobs == (-0.5, -0.625, -0.75, -0.875)
    assert sample.policy_versions == ("assigned",) * 4
    first, second = (body for _, body in server.requests)
    assert second["token_ids"] == [1, 2, 4, 5, 6]
    assert second["sampling_params"]["max_tokens"] == 5
    assert second["sampling_params"]["seed"] != first["sampling_params"]["seed"]
    assert (talk.stats.sampled_tokens, talk.stats.discarded_tokens) == (4, 0)


@pytest.mark.parametrize("spans", [SPANS, None])
@pytest.mark.parametrize("end", ["cut", "freeze"])
async def test_a_turn_that_ended_before_its_stream_broke_is_whole(backend: Any, spans: Any, end: str) -> None:
    """Nothing may be sampled after the token that ended the turn."""

    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        last = server.event(body, 6, finish_reason="stop", weight_versions=spans)
        return server.stream(server.event(body, 4, 5), last, end=end)

    states = {"/metrics": still()}
    async with backend(generate=reply, states=states) as server, BackendClient(stall_timeout=0.3) as backends:
        sample = await server.session(backends, Router(server.assignment)).turn([1, 2], 8, 0)
    assert (sample.token_ids, sample.finish_reason) == ((4, 5, 6), "stop")
    assert sample.policy_versions == (("w1", "w1", "w2") if spans else ("assigned",) * 3)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        # The label before the request, and those that the backend names when it is asked while it samples.
        ("w1", 4),  # Nothing has changed when the stream is cut.
        ("w2", 2),  # An update came after the first two tokens, at a time that nobody knows.
        (None, 2),  # The backend has ended.
    ],
)
async def test_cut_tokens_are_kept_only_if_their_weights_are_certain(
    backend: Any, after: str | None, kept: int
) -> None:
    labels: list[Any] = ["w1"]
    looked = asyncio.Event()

    def label() -> Any:
        if labels[-1] is None:
            return web.Response(status=500)
        looked.set()
        return {"weight_version": labels[-1]}

    async def reply(body: dict[str, Any]) -> Any:
        if len(server.requests) > 1:
            return await server.stream(server.event(body, 9, finish_reason="stop", weight_versions=spans))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(server.request)
        await answer.write(b"data: " + orjson.dumps(server.event(body, 4, 5)) + b"\n\n")
        for _ in range(2):  # The second look begins after the two tokens have come.
            looked.clear()
            await asyncio.wait_for(looked.wait(), patience(10))
        labels.append(after)
        await answer.write(b"data: " + orjson.dumps(server.event(body, 6, 7)) + b"\n\n")
        await asyncio.sleep(0.1)
        server.request.transport.close()
        return answer

    spans = [{"version": "w3", "start": 0, "end": 1}]
    async with backend(generate=reply, states={"/weight_info": label}) as server, BackendClient() as backends:
        talk = server.session(backends, Router(server.assignment))
        sample = await talk.turn([1], 8, 0)
    assert sample.token_ids == (*(4, 5, 6, 7)[:kept], 9)
    assert sample.policy_versions == (*["w1"] * kept, "w3")
    assert talk.stats.discarded_tokens == 4 - kept


async def test_a_server_that_freezes_in_the_middle_is_left_with_what_it_gave(backend: Any) -> None:
    def freeze(body: dict[str, Any]) -> Awaitable[Any]:
        return frozen.stream(frozen.event(body, 4, 5), end="freeze")

    frozen = backend(generate=freeze, states={"/metrics": still()})
    sound = backend(generate=backend.generated)
    async with frozen, sound, BackendClient(stall_timeout=0.3) as backends:
        router = Router(sound.assignment)
        talk = frozen.session(backends, router)
        sample = await talk.turn([1], 8, 0)
    assert sample.token_ids == (4, 5, 5, 6)
    ((error, blame),) = router.asked
    assert blame
    assert "after 2 of them, and no sign that the server computes" in error
    assert len(frozen.requests) == 1, "a hung server was asked again before another one"
    assert sound.requests[0][1]["token_ids"] == [1, 4, 5]


@pytest.mark.parametrize("states", [True, False])
async def test_a_silent_server_that_computes_is_not_hung(backend: Any, states: bool) -> None:
    """A request may wait long for its turn: in the server's queue, or preempted by others."""

    async def reply(body: dict[str, Any]) -> Any:
        await asyncio.sleep(1.0)
        return await server.stream(
            server.event(body, 4, 5), server.event(body, 6, finish_reason="stop"), pause=1.0
        )

    looks = {"/metrics": metrics(itertools.count())} if states else {}
    async with backend(generate=reply, states=looks) as server, BackendClient(stall_timeout=0.3) as backends:
        sample = await server.session(backends).turn([1], 8, 0)
    assert sample.token_ids == (4, 5, 6)
    assert len(server.requests) == 1


async def test_a_request_that_a_sound_server_has_lost_is_sent_again(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LONGEST_SILENCE", 0.5)

    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        if len(server.requests) == 1:
            return server.stream(server.event(body, 4, 5), end="freeze")
        return server.stream(server.event(body, 6, finish_reason="stop"))

    looks = {"/metrics": metrics(itertools.count())}
    async with backend(generate=reply, states=looks) as server, BackendClient(stall_timeout=0.3) as backends:
        sample = await server.session(backends, Router(server.assignment)).turn([1], 8, 0)
    assert sample.token_ids == (4, 5, 6)


async def test_a_turn_that_is_cancelled_leaves_its_tokens(backend: Any) -> None:
    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        return server.stream(server.event(body, 4, 5), server.event(body, 6), end="freeze")

    async with backend(generate=reply) as server, BackendClient() as backends:
        talk = server.session(backends)
        turn = asyncio.ensure_future(talk.turn([1], 8, 0))
        async with asyncio.timeout(patience(10)):
            while (talk.sampled_now() or ((), 0.0))[0] != (4, 5, 6):  # noqa: ASYNC110 - the server sends it
                await asyncio.sleep(0.01)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert await talk.silence() is None, "a turn that progresses is the policy's own time"
        sample = await talk.cut()
        assert sample is not None
        assert (sample.token_ids, sample.finish_reason) == ((4, 5, 6), "length")
        assert sample.policy_versions == ("assigned",) * 3
        assert await talk.cut() is None, "its tokens were kept twice"
        assert talk.sampled_now() is None
    assert talk.stats.sampled_tokens == 3


@pytest.mark.parametrize(
    ("event", "error", "words"),
    [
        ({"error": {"message": "engine died", "code": 500}}, BackendUnavailable, "answered 500.*engine died"),
        ({"error": {"message": "no", "code": 400}}, BackendRefused, "answered 400: no"),
        ({"error": "odd"}, BackendUnavailable, "answered 500"),
        (b"data: {]\n\n", BackendMismatch, "the answer is not JSON"),
        (b"data: 5\n\n", BackendMismatch, "the answer is int, expected an object"),
    ],
)
async def test_events_that_are_errors(
    backend: Any, event: object, error: type[Exception], words: str
) -> None:
    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        return server.stream(server.event(body, 4, 5), event)

    async with backend(generate=reply) as server, BackendClient() as backends:
        with pytest.raises(error, match=words):
            await backends.sample(server.assignment, [1], SAMPLING)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": [4]}, "1 token_ids but 2 logprobs"),
        ({"token_ids": [4, 9]}, "is of token 5"),
        ({"logprobs": None}, "logprobs is missing"),
        ({"finish_reason": "odd"}, "finish_reason is 'odd'"),
    ],
)
async def test_each_event_is_checked(backend: Any, changes: dict[str, Any], words: str) -> None:
    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        return server.stream(server.event(body, 2, 3), server.event(body, 4, 5, **changes))

    async with backend(generate=reply) as server, BackendClient() as backends:
        with pytest.raises(BackendMismatch, match=words):
            await backends.sample(server.assignment, [1], SAMPLING)


async def test_a_stream_has_no_more_tokens_than_were_asked_for(backend: Any) -> None:
    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        return server.stream(*(server.event(body, 2, 3) for _ in range(5)), end="freeze")

    async with backend(generate=reply) as server, BackendClient() as backends:
        with pytest.raises(BackendMismatch, match="10 tokens sampled, max_tokens was 8"):
            await backends.sample(server.assignment, [1], SAMPLING)


@pytest.mark.parametrize("incremental", [True, False])
async def test_sglang_repeats_what_came_before_or_does_not(backend: Any, incremental: bool) -> None:
    entries = [[-0.5, 12095, None], [-0.25, 13, None], [-0.125, 151645, None]]

    def event(body: dict[str, Any], first: int, last: int, finish: object = None) -> dict[str, Any]:
        since = first if incremental else 0
        pairs = copy.deepcopy(entries[since:last])
        meta = {"finish_reason": finish, "prompt_tokens": len(body["input_ids"]), "completion_tokens": last}
        meta |= {"output_token_logprobs": pairs, "weight_version": "w1"}
        return {"text": "", "output_ids": [token for _, token, _ in pairs], "meta_info": meta}

    def reply(body: dict[str, Any]) -> Awaitable[Any]:
        stop = {"type": "stop", "matched": 151645}
        return server.stream(event(body, 0, 1), event(body, 1, 2), event(body, 2, 3, stop))

    info = {"/model_info": lambda: {"model_path": "m", "weight_version": "w1"}}
    models = [{"id": "tiny", "max_model_len": 64}]
    async with backend(sglang=reply, models=models, states=info) as server, BackendClient() as backends:
        sample = await backends.sample(server.assignment, [1, 2], SAMPLING)
    assert sample.token_ids == (12095, 13, 151645)
    assert sample.logprobs == (-0.5, -0.25, -0.125)
    assert sample.policy_versions == ("w1",) * 3


async def test_a_turn_that_progresses_at_the_end_of_run_is_truncated_with_its_tokens(
    rollout: Rollout, model: UseModel
) -> None:
    words = "I think and think " * 40
    model(lambda prompt: words, stages={"run": {"timeoutSeconds": 1}}, sampling={"maxTokens": 2000})
    rollout.model.pause = 0.05
    trajectory = await rollout.play()
    assert (trajectory.truncated, trajectory.truncated_reason) == (True, "RunTimeout")
    (turn,) = trajectory.turns
    assert turn.finish_reason == "length"
    (segment,) = trajectory.segments
    assert 3 <= sum(segment.loss_mask) == turn.end - turn.start <= 30
    assert set(segment.logprobs) == {-0.125}
    said = trajectory.messages[-1]
    assert said.role == "assistant"
    assert isinstance(said.content, str)
    assert said.content
    assert words.startswith(said.content)
    assert rollout.ran is not None
    assert rollout.ran.stats.sampled_tokens == sum(segment.loss_mask)
    assert rollout.plane.routed == [], "a server that answers was blamed"


async def test_viewers_see_a_turn_grow(rollout: Rollout, model: UseModel) -> None:
    words = "I think and think " * 40
    model(lambda prompt: words, sampling={"maxTokens": 2000})
    rollout.model.pause = 0.02
    init = await rollout.stage("init")
    holding = HeldLease(rollout.lease("run", sandbox=init.sandbox, carry=init.carry))
    running = asyncio.ensure_future(rollout.stages.work(holding, StageTimes()))
    seen: list[LiveTurn] = []

    def grown() -> bool:
        turns = holding.live(0) if holding.live is not None else []
        if turns and turns[-1].running:
            seen.append(turns[-1])
        return len({turn.tokens for turn in seen if turn.text}) >= 3

    try:
        await eventually(grown)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert {turn.no for turn in seen} == {1}, "the prompt is number 0"
    assert all(words.startswith(turn.text) for turn in seen)
    assert [turn.tokens for turn in seen] == sorted(turn.tokens for turn in seen)
