"""The backend client against a server that behaves, misbehaves, hangs and moves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_pipeline.backends import BackendClient, BackendSession, Sampling
from rollyard_pipeline.errors import BackendMismatch, BackendRefused, BackendUnavailable
from rollyard_pipeline.seeds import request_seed

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)
Reply = Callable[[dict[str, Any]], Any]


def generated(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.25}]},
        "weight_versions": [{"version": "w1", "start": 0, "end": 1}, {"version": "w2", "start": 1, "end": 2}],
    }
    return {"choices": [choice | changes]}


def completed(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    choice = {
        "prompt_token_ids": body["prompt"],
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
    }
    return {"choices": [choice | changes]}


class Server:
    """A backend whose answers the test decides."""

    def __init__(self, *, generate: Reply | None = None, completions: Reply | None = None) -> None:
        self.generate = generate
        self.completions = completions
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny", "max_model_len": 64}]})
        body = await request.json()
        self.requests.append((request.path, body))
        reply = self.generate if request.path == "/inference/v1/generate" else self.completions
        if reply is None:
            return web.json_response({"error": "not here"}, status=404)
        answer = reply(body)
        if isinstance(answer, Awaitable):
            answer = await answer
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[BackendAssignment]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield BackendAssignment(
            pool="p", url=server.url, model="tiny", tokenizer="t", policy_version="assigned"
        )
    finally:
        await runner.cleanup()


async def test_generate_gives_versions_per_token() -> None:
    server = Server(generate=generated)
    async with serving(server) as backend, BackendClient() as client:
        sample = await client.sample(backend, [1, 2, 3], SAMPLING)
    assert sample.token_ids == (5, 6)
    assert sample.logprobs == (-0.5, -0.25)
    assert sample.policy_versions == ("w1", "w2")
    path, body = server.requests[0]
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 8, "seed": 7, "logprobs": 0,
    }  # fmt: skip


async def test_a_server_without_generate_is_asked_once() -> None:
    server = Server(completions=completed)
    async with serving(server) as backend, BackendClient() as client:
        for _ in range(3):
            sample = await client.sample(backend, [1, 2, 3], SAMPLING)
    assert sample.policy_versions == ("assigned", "assigned")
    assert [path for path, _ in server.requests] == ["/inference/v1/generate", *["/v1/completions"] * 3]
    body = server.requests[-1][1]
    assert body["prompt"] == [1, 2, 3]
    assert body["return_token_ids"] is True


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_token_ids": [1, 2]}, "read 2 prompt ids, 3 were sent"),
        ({"prompt_token_ids": [1, 9, 3]}, "prompt id 1 is 9"),
        ({"prompt_token_ids": None}, "return_token_ids"),
        ({"token_ids": [5, 6, 7]}, "3 token_ids but 2 logprobs"),
        ({"token_ids": [5, "6"]}, "token_ids[1] is '6'"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "no token sampled"),
        ({"token_ids": list(range(9)), "logprobs": {"token_logprobs": [-1.0] * 9}}, "max_tokens was 8"),
        ({"logprobs": None}, "logprobs is missing"),
        ({"logprobs": {"token_logprobs": [-0.5, None]}}, "logprob 1 is None"),
        ({"logprobs": {"token_logprobs": [-0.5, 0.5]}}, "above 0"),
        ({"finish_reason": "error"}, "finish_reason is 'error'"),
    ],
)
async def test_an_answer_that_contradicts_itself_is_refused(changes: dict[str, Any], says: str) -> None:
    server = Server(completions=lambda body: completed(body, **changes))
    async with serving(server) as backend, BackendClient() as client:
        with pytest.raises(BackendMismatch) as caught:
            await client.sample(backend, [1, 2, 3], SAMPLING)
    assert says in str(caught.value)
    assert caught.value.reason == "BackendMismatch"


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]}},
        {"logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 7, "logprob": -0.5}]}},
        {"weight_versions": [{"version": "w", "start": 0, "end": 3}]},
        {"prompt_token_ids": [4]},
    ],
)
async def test_generate_answers_are_checked_too(changes: dict[str, Any]) -> None:
    server = Server(generate=lambda body: generated(body, **changes))
    async with serving(server) as backend, BackendClient() as client:
        with pytest.raises(BackendMismatch):
            await client.sample(backend, [1, 2, 3], SAMPLING)


async def test_logprobs_that_are_not_finite_are_refused() -> None:
    logprobs = '{"content": [{"logprob": NaN}]}'
    text = f'{{"choices": [{{"token_ids": [5], "finish_reason": "stop", "logprobs": {logprobs}}}]}}'
    server = Server(generate=lambda body: web.Response(text=text, content_type="application/json"))
    async with serving(server) as backend, BackendClient() as client:
        with pytest.raises(BackendMismatch):
            await client.sample(backend, [1], SAMPLING)


async def test_a_refusal_is_not_retried() -> None:
    server = Server(generate=lambda body: web.json_response({"error": "too long"}, status=400))
    async with serving(server) as backend, BackendClient() as client:
        with pytest.raises(BackendRefused, match="too long"):
            await session(client, backend, never_route).turn([1], 8, 0)
    assert len(server.requests) == 1


async def never_route(url: str, error: str) -> RouteResponse:
    raise AssertionError(f"asked for a route away from {url}: {error}")


def session(
    client: BackendClient,
    backend: BackendAssignment,
    route: Callable[[str, str], Awaitable[RouteResponse]],
    budget: float = 20.0,
    probe_seconds: float = 10.0,
) -> BackendSession:
    return BackendSession(
        client, backend, route, SamplingSpec(seed=3), task_id="t", sample_index=1, budget=budget,
        probe_seconds=probe_seconds,
    )  # fmt: skip


async def test_errors_are_retried_then_another_backend_goes_on_from_the_same_ids() -> None:
    broken = Server(generate=lambda body: web.json_response({}, status=500))
    sound = Server(generate=generated)
    asked: list[tuple[str, str]] = []
    async with serving(broken) as first, serving(sound) as second, BackendClient() as client:

        async def route(url: str, error: str) -> RouteResponse:
            asked.append((url, error))
            return RouteResponse(backend=second)

        talk = session(client, first, route)
        sample = await talk.turn([1, 2, 3], 8, 0)
        assert talk.backend.url == sound.url
        assert talk.failing is None
    assert sample.token_ids == (5, 6)
    assert len(broken.requests) == 2
    assert asked[0][0] == broken.url
    assert "500" in asked[0][1]
    assert sound.requests[0][1] == broken.requests[0][1]


async def test_a_hanging_backend_is_left() -> None:
    async def hang(body: dict[str, Any]) -> Any:
        await asyncio.sleep(60)

    async with (
        serving(Server(generate=hang)) as first,
        serving(Server(generate=generated)) as second,
        BackendClient(request_timeout=0.2) as client,
    ):

        async def route(url: str, error: str) -> RouteResponse:
            assert "no answer within 0.2 s" in error
            return RouteResponse(backend=second)

        sample = await session(client, first, route).turn([1], 8, 0)
    assert sample.token_ids == (5, 6)


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_turn_cut_off_is_the_policys_own_only_if_the_backend_answers(hangs: bool) -> None:
    asked = 0

    async def slow(body: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        if hangs or asked == 1:
            await asyncio.sleep(60)
        choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "length"}
        return web.json_response({"choices": [choice]})

    async with serving(Server(generate=slow)) as backend, BackendClient() as client:
        talk = session(client, backend, never_route, probe_seconds=0.3)
        assert await talk.silence() is None, "nothing was asked yet"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await talk.turn([1, 2], 8, 0)
        silence = await talk.silence()
    assert silence == (f"{backend.url}: not one token within 0.3 s" if hangs else None)


async def test_without_any_backend_the_rollout_gives_up(unused_port: int) -> None:
    nowhere = BackendAssignment(pool="p", url=f"http://127.0.0.1:{unused_port}", model="tiny", tokenizer="t")

    async def route(url: str, error: str) -> RouteResponse:
        return RouteResponse(backend=None, retry_after=0.05)

    async with BackendClient() as client:
        talk = session(client, nowhere, route, budget=0.5)
        with pytest.raises(BackendUnavailable, match=r"no backend answered for 0\.5 s") as caught:
            await talk.turn([1], 8, 0)
        assert talk.failing is not None
    assert caught.value.retryable


async def test_an_aborted_turn_goes_on_from_its_tokens() -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        if len(body["token_ids"]) == 3:
            return generated(body, finish_reason="abort")
        return generated(body, weight_versions=None)

    server = Server(generate=reply)
    async with serving(server) as backend, BackendClient() as client:
        sample = await session(client, backend, never_route).turn([1, 2, 3], 8, 0)
    assert sample.token_ids == (5, 6, 5, 6)
    assert sample.policy_versions == ("w1", "w2", "assigned", "assigned")
    second = server.requests[1][1]
    assert second["token_ids"] == [1, 2, 3, 5, 6]
    assert second["sampling_params"]["max_tokens"] == 6
    assert second["sampling_params"]["seed"] != server.requests[0][1]["sampling_params"]["seed"]


async def test_the_models_own_context_length_is_known() -> None:
    async with serving(Server(generate=generated)) as backend, BackendClient() as client:
        assert await client.max_model_len(backend) == 64


def test_seeds_differ_and_repeat() -> None:
    seeds = {
        request_seed(base, task, sample, turn)
        for base in (0, 1)
        for task in ("a", "b", "ab")
        for sample in range(8)
        for turn in range(8)
    }
    assert len(seeds) == 2 * 3 * 8 * 8
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert request_seed(0, "a", 1, 2) == request_seed(0, "a", 1, 2)


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
