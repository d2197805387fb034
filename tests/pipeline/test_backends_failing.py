"""Backends that are overloaded, broken, gone, endless or slow: every one has its outcome."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_inference.errors import BackendMismatch, BackendUnavailable
from rollyard_pipeline.backends import BackendClient, BackendSession
from rollyard_testing.pace import patience


class Router:
    """The control plane's part, which gives one backend, and keeps what was reported to it."""

    def __init__(self, to: BackendAssignment | None) -> None:
        self.to = to
        self.asked: list[tuple[str, str, bool]] = []

    async def __call__(self, url: str, error: str, blame: bool) -> RouteResponse:
        self.asked.append((url, error, blame))
        return RouteResponse(backend=self.to, retry_after=0.05)


def _status(status: int, **headers: str) -> Callable[[Any], Any]:
    def reply(body: dict[str, Any]) -> Any:
        return web.Response(
            status=status, text="busy", headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return reply


async def _cut(server: Any, *, chunks: int, pause: float) -> web.StreamResponse:
    """Announce a long answer, send a part of it byte by byte, and close the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(server.request)
    for _ in range(chunks):
        await response.write(b'{"choices": [')
        await asyncio.sleep(pause)
    server.request.transport.close()
    return response


async def test_errors_are_retried_then_another_backend_goes_on_from_the_same_ids(backend: Any) -> None:
    broken, sound = backend(generate=_status(500)), backend(generate=backend.generated)
    async with broken, sound, BackendClient() as client:
        router = Router(sound.assignment)
        talk = broken.session(client, router)
        sample = await talk.turn([1, 2, 3], 8, 0)
        assert talk.backend.url == sound.url
        assert talk.failing is None
    assert sample.token_ids == (5, 6)
    assert len(broken.requests) == 2
    ((url, error, blame),) = router.asked
    assert (url, blame) == (broken.url, True)
    assert "500" in error
    assert sound.requests[0][1] == broken.requests[0][1]
    assert talk.stats.requests == 1
    assert talk.stats.sampled_tokens == 2


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (lambda body: web.Response(text="<html>"), "not JSON"),
        (lambda body: web.Response(text='{"choices": [{"tok'), "not JSON"),
        (lambda body: [], "the answer is list"),
        (_status(302, Location="http://elsewhere/"), "a redirect to http://elsewhere/"),
        (_status(204), "expected 200"),
        (
            lambda body: {"choices": [{"token_ids": [5]}], "usage": {"prompt_tokens": 1}},
            "logprobs is missing",
        ),
    ],
)
async def test_an_impossible_answer_is_blamed_and_asked_of_another(
    backend: Any, reply: Callable[[Any], Any], says: str
) -> None:
    liar, sound = backend(generate=reply), backend(generate=backend.generated)
    async with liar, sound, BackendClient() as client:
        router = Router(sound.assignment)
        sample = await liar.session(client, router).turn([1], 8, 0)
        assert sample.token_ids == (5, 6)
        assert len(liar.requests) == 1
        ((_, error, blame),) = router.asked
        assert blame
        assert says in error

        alone = liar.session(client, Router(liar.assignment))
        with pytest.raises(BackendMismatch, match=says):
            await alone.turn([1], 8, 0)
    assert len(liar.requests) == 4, "an impossible answer was asked for without end"


@pytest.mark.parametrize("status", [429, 503])
async def test_overload_is_waited_for_as_long_as_the_server_says(backend: Any, status: int) -> None:
    times: list[float] = []

    def reply(body: dict[str, Any]) -> Any:
        times.append(time.monotonic())
        return backend.generated(body) if len(times) > 1 else _status(status, Retry_After="0.7")(body)

    async with backend(generate=reply) as server, BackendClient() as client:
        talk = server.session(client)
        waited: list[float] = []
        talk.on_wait = waited.append
        sample = await talk.turn([1], 8, 0)
    assert sample.token_ids == (5, 6)
    assert times[1] - times[0] >= 0.7
    assert waited == [0.7], "the wait for an overloaded backend was taken for the policy's own time"
    assert talk.model_seconds < times[1] - times[0]


@pytest.mark.parametrize(
    ("status", "headers", "blame"),
    [
        (429, {}, False),
        (503, {"Retry_After": "0"}, False),
        (503, {}, True),
        (500, {"Retry_After": "0"}, True),
    ],
)
async def test_overload_is_no_blame(backend: Any, status: int, headers: dict[str, str], blame: bool) -> None:
    busy, free = backend(generate=_status(status, **headers)), backend(generate=backend.generated)
    async with busy, free, BackendClient() as client:
        router = Router(free.assignment)
        await busy.session(client, router).turn([1], 8, 0)
    assert [said for _, _, said in router.asked] == [blame]


async def test_connections_that_break_and_trickle_are_left(backend: Any) -> None:
    closes = backend(generate=lambda body: _cut(closes, chunks=3, pause=0.0))
    drips = backend(generate=lambda body: _cut(drips, chunks=200, pause=0.05))
    floods = backend(generate=lambda body: web.Response(body=b" " * 200_000))
    sound = backend(generate=backend.generated)
    bounds: dict[str, Any] = {"request_timeout": 2.0, "max_answer_bytes": 100_000}
    async with closes, drips, floods, sound, BackendClient(**bounds) as client:
        for server, says in (
            (closes, "ClientPayloadError"),
            (drips, "no answer within 2 s"),
            (floods, "longer than 100000 bytes"),
        ):
            router = Router(sound.assignment)
            sample = await server.session(client, router).turn([1], 8, 0)
            assert sample.token_ids == (5, 6)
            assert says in router.asked[0][1]


async def test_without_any_backend_the_rollout_gives_up(unused_port: int) -> None:
    nowhere = BackendAssignment(pool="p", url=f"http://127.0.0.1:{unused_port}", model="tiny", tokenizer="t")
    async with BackendClient() as client:
        talk = _session(client, nowhere, budget=0.5)
        with pytest.raises(BackendUnavailable, match=r"no backend answered for 0\.5 s") as caught:
            await talk.turn([1], 8, 0)
        assert talk.failing is not None
    assert caught.value.retryable


def _session(client: BackendClient, backend: BackendAssignment, budget: float) -> BackendSession:
    return BackendSession(
        client, backend, Router(None), SamplingSpec(), task_id="t", sample_index=0, budget=budget
    )


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_turn_cut_off_is_the_policys_own_only_if_the_backend_answers(
    backend: Any, hangs: bool
) -> None:
    asked = 0

    async def slow(body: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        if hangs or asked == 1:
            await asyncio.sleep(60)
        content = [{"token_id": 5, "logprob": -0.5}]
        choice = {"token_ids": [5], "logprobs": {"content": content}, "finish_reason": "length"}
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["token_ids"])}}

    async with backend(generate=slow) as server, BackendClient() as client:
        talk = server.session(client, probe_seconds=0.3)
        assert await talk.silence() is None, "nothing was asked yet"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await talk.turn([1, 2], 8, 0)
        silence = await talk.silence()
    assert silence == (f"{server.url}: not one token within 0.3 s" if hangs else None)


async def test_a_cancelled_turn_closes_its_request_at_once(backend: Any) -> None:
    gone = asyncio.Event()

    async def hang(body: dict[str, Any]) -> Any:
        transport = server.request.transport
        while not transport.is_closing():  # noqa: ASYNC110 - another task closes it
            await asyncio.sleep(0.01)
        gone.set()

    server = backend(generate=hang)
    async with server, BackendClient() as client:
        turn = asyncio.ensure_future(server.session(client).turn([1], 8, 0))
        async with asyncio.timeout(patience(10)):
            while not server.requests:  # noqa: ASYNC110 - the server notes it
                await asyncio.sleep(0.01)
            turn.cancel()
            await gone.wait()
        with pytest.raises(asyncio.CancelledError):
            await turn


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
