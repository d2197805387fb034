"""The spans of turns and tool calls, and the header with which requests name their turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from rollyard_crds.lease import RouteResponse
from rollyard_inference.errors import BackendRefused
from rollyard_pipeline.backends import BackendClient, Sampling
from rollyard_process.telemetry.identity import NOT_SAMPLED, stage_span_id, trace_id
from rollyard_process.telemetry.scope import RolloutScope, entered
from rollyard_testing.traces.kept import Kept

ROLLOUT = "job-0a1b2c3d-0-0"


def scope(sink: Kept | None) -> RolloutScope:
    return RolloutScope("default", "job", ROLLOUT, "run", 7, 0, sink)


async def test_each_request_names_its_turn(backend: Any) -> None:
    headers: list[str] = []

    def reply(body: dict[str, Any]) -> Any:
        headers.append(server.request.headers["traceparent"])
        return backend.generated(body)

    sink = Kept()
    async with backend(generate=reply) as server, BackendClient() as client:
        talk = server.session(client)
        with entered(scope(sink)):
            for turn in range(2):
                await talk.turn([1, 2, 3], 8, turn)
        with entered(scope(None)):
            await talk.turn([1, 2, 3], 8, 2)
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)
        await client.sample(server.assignment, [1], sampling)
    first, second = sink.spans
    stage = stage_span_id(ROLLOUT, "run", 7)
    assert (first.trace, first.parent, first.name, first.client) == (
        trace_id(ROLLOUT),
        stage,
        "chat tiny",
        True,
    )
    assert first.attributes["gen_ai.usage.input_tokens"] == 3
    assert first.attributes["gen_ai.usage.output_tokens"] == 2
    assert first.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert first.attributes["rollyard.policy_version"] == "w2"
    assert headers[:2] == [f"00-{first.trace}-{first.id}-01", f"00-{first.trace}-{second.id}-01"]
    assert headers[2].startswith(f"00-{first.trace}-")
    assert headers[2].endswith("-00"), "a rollout that is not sampled silences the server"
    assert headers[3] == NOT_SAMPLED


async def test_a_turn_that_is_refused_is_an_error(backend: Any) -> None:
    def refuse(body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=400)

    sink = Kept()
    async with backend(generate=refuse) as server, BackendClient() as client:
        with entered(scope(sink)), pytest.raises(BackendRefused):
            await server.session(client).turn([1], 8, 0)
    (span,) = sink.spans
    assert span.error == "BackendRefused"
    assert "gen_ai.usage.output_tokens" not in span.attributes


async def test_a_pause_of_the_weights_is_a_span_below_the_turn(backend: Any) -> None:
    """The request hangs while the backend is paused for more than two seconds."""
    resumed = asyncio.Event()

    async def reply(body: dict[str, Any]) -> Any:
        await resumed.wait()
        return backend.generated(body)

    states = {"/is_paused": lambda: {"is_paused": not resumed.is_set()}}
    sink = Kept()
    async with backend(generate=reply, states=states) as server, BackendClient() as client:
        with entered(scope(sink)):
            turn = asyncio.create_task(server.session(client).turn([1], 8, 0))
            await asyncio.sleep(2.5)
            resumed.set()
            await turn
    pause, chat = sink.spans
    assert (pause.name, pause.parent) == ("weights pause", chat.id)
    assert chat.start <= pause.start <= pause.end <= chat.end
    assert 1.0 <= pause.end - pause.start <= chat.end - chat.start


async def test_waiting_for_room_is_one_span(backend: Any) -> None:
    """A backend that is too busy three times makes one wait, and not three."""
    answers = iter([503, 503, 503])

    def reply(body: dict[str, Any]) -> Any:
        if (status := next(answers, None)) is not None:
            return web.json_response({"error": "busy"}, status=status, headers={"Retry-After": "0.1"})
        return backend.generated(body)

    async def route(url: str, error: str, blame: bool) -> Any:
        return RouteResponse(backend=server.assignment)

    sink = Kept()
    async with backend(generate=reply) as server, BackendClient() as client:
        with entered(scope(sink)):
            await server.session(client, route).turn([1], 8, 0)
    *waits, chat = sink.spans
    assert [span.name for span in waits] == ["backend wait"]
    assert waits[0].parent == chat.id
    assert chat.attributes["rollyard.requests"] == 1
