"""A server with ProRL's `/generate` alone is recognized, checked and asked like any other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from rollyard_inference.capabilities import probe
from rollyard_inference.errors import BackendMismatch, BackendRefused, BackendUnavailable
from rollyard_inference.health import check_alive, check_model, first_request
from rollyard_inference.sampling.call import parsed
from rollyard_inference.sampling.prorl import ProrlGenerate
from rollyard_inference.sampling.request import Sampling, ServedModel
from rollyard_inference.transports.interface import Transport
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_testing.inference.scripted import ProrlShaped, SglangShaped, VllmShaped

SAMPLING = Sampling(temperature=0.5, top_p=0.9, top_k=-1, max_tokens=3, seed=7)
MODEL = ServedModel("policy")


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield HttpxTransport(client, connect_seconds=30.0)


@pytest.fixture(params=["explains", "not-found"])
def server(request: pytest.FixtureRequest) -> Iterator[ProrlShaped]:
    made = ProrlShaped(allows=request.param == "explains")
    yield made
    made.close()


async def test_it_is_healthy_without_health_and_models(transport: Transport, server: ProrlShaped) -> None:
    await check_alive(transport, server.url, 20.0)
    await check_model(transport, server.url, "anything", 20.0)
    assert await first_request(transport, server.url, "anything", 20.0) is None
    path, body = server.bodies[-1]
    assert path == "/generate"
    assert body == {"prompt_ids": [1], "max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    can = await probe(transport, server.url + "/")
    assert isinstance(can.call, ProrlGenerate)
    assert (can.models, can.limit("x"), can.weights.label) == (None, None, None)
    assert can.serves("x")
    server.failing["/generate"] = 4
    with pytest.raises(BackendUnavailable):
        await first_request(transport, server.url, "x", 20.0)


async def test_other_servers_are_still_what_they_are(transport: Transport) -> None:
    for shape in (VllmShaped, SglangShaped):
        server = shape()
        try:
            assert not isinstance((await probe(transport, server.url)).call, ProrlGenerate)
        finally:
            server.close()


def test_requests_and_answers() -> None:
    call = ProrlGenerate()
    sent = {"prompt_ids": [5, 6], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7}
    assert call.body(MODEL, (5, 6), SAMPLING) == sent
    short = parsed(call, {"response_ids": [1, 2], "logprobs": [-0.5, 0.0]}, (5,), SAMPLING)
    assert (short.token_ids, short.logprobs, short.finish_reason) == ((1, 2), (-0.5, 0.0), "stop")
    assert short.versions is None
    full = parsed(call, {"response_ids": [1, 2, 3], "logprobs": [-1, -1, -1]}, (5,), SAMPLING)
    assert full.finish_reason == "length"
    assert call.mode(call.mode_probes(MODEL, (1, 2)), (1, 2)) == "unknown"
    for wrong in (Sampling(1.0, 1.0, 5, 3, 0), Sampling(1.0, 1.0, -1, 3, 0, allowed=(4,))):
        with pytest.raises(BackendRefused, match="leave it out"):
            call.body(MODEL, (5,), wrong)


@pytest.mark.attack(
    "tokens, lengths or log-probabilities that cannot be",
    boundary="prorl",
    surface="answers of a server with `/generate`",
    stopped_by="every answer is checked, as for other servers",
)
@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"response_ids": [1]},
        {"response_ids": [1], "logprobs": []},
        {"response_ids": [1], "logprobs": [0.5]},
        {"response_ids": [1], "logprobs": [None]},
        {"response_ids": [1.5], "logprobs": [-1.0]},
        {"response_ids": [-1], "logprobs": [-1.0]},
        {"response_ids": [1 << 32], "logprobs": [-1.0]},
        {"response_ids": "1", "logprobs": [-1.0]},
        {"response_ids": [1, 1, 1, 1], "logprobs": [-1.0] * 4},
        {"response_ids": [], "logprobs": []},
        {"response_ids": [1], "logprobs": "x"},
    ],
    ids=str,
)
def test_impossible_answers_are_refused(answer: Any) -> None:
    with pytest.raises(BackendMismatch):
        parsed(ProrlGenerate(), answer, (5,), SAMPLING)
