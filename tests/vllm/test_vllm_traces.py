"""vLLM's own spans join the trace of the rollout for which they worked, by the header of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_pipeline.backends import BackendClient, BackendSession
from rollyard_process.telemetry.identity import trace_id
from rollyard_process.telemetry.scope import RolloutScope, entered
from rollyard_testing.pace import patience
from rollyard_testing.traces.kept import Kept
from rollyard_testing.traces.receiver import GotSpan, Receiver, receiving
from rollyard_testing.vllm.servers import SERVED, VllmServer

pytestmark = pytest.mark.nightly

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture(scope="module")
def traced_vllm(
    start_vllm: Callable[..., VllmServer], vllm_model: Path, receiver: Receiver
) -> Iterator[VllmServer]:
    """Yield a server that sends its spans to the receiver."""
    server = start_vllm(
        vllm_model,
        0,
        arguments=("--otlp-traces-endpoint", f"{receiver.url}/v1/traces"),
        environment={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"},
    )
    yield server
    server.stop()


async def _play(server: VllmServer, rollout: str, sink: Kept | None, turns: int = 2) -> None:
    async def route(url: str, error: str, blame: bool) -> RouteResponse:
        raise AssertionError(f"asked for a route away from {url}: {error}")

    backend = BackendAssignment(pool="p", url=server.url, model=SERVED, tokenizer="t", policy_version="v")
    spec = SamplingSpec(seed=11)
    with entered(RolloutScope("default", "job", rollout, "run", 3, 0, sink)):
        async with BackendClient() as client:
            session = BackendSession(client, backend, route, spec, task_id="t", sample_index=0)
            for turn in range(turns):
                sample = await session.turn(PROMPT, 8, turn)
                assert 1 <= len(sample.token_ids) <= 8


def _requests(spans: list[GotSpan], rollout: str) -> list[GotSpan]:
    return [span for span in spans if span.name == "llm_request" and span.trace == trace_id(rollout)]


async def test_the_servers_spans_lie_below_the_turns(traced_vllm: VllmServer, receiver: Receiver) -> None:
    sink = Kept()
    await _play(traced_vllm, "job-1-0-0", sink)
    chats = [span for span in sink.spans if span.name == f"chat {SERVED}"]
    assert len(chats) == 2
    await asyncio.to_thread(receiver.until, lambda spans: len(_requests(spans, "job-1-0-0")) == 2)
    joined = _requests(receiver.spans, "job-1-0-0")
    assert sorted(span.parent for span in joined) == sorted(span.id for span in chats)
    for span in joined:
        chat = next(one for one in chats if one.id == span.parent)
        assert chat.start - 0.01 <= span.start <= span.end <= chat.end + 0.01, (
            "the same machine has one clock"
        )
        assert span.attributes["gen_ai.usage.prompt_tokens"] == chat.attributes["gen_ai.usage.input_tokens"]


async def test_a_rollout_that_is_not_sampled_silences_the_server(
    traced_vllm: VllmServer, receiver: Receiver
) -> None:
    """Requests that belong to no rollout, such as health checks and probes, are silent too."""
    before = len([span for span in receiver.spans if span.name == "llm_request"])
    await _play(traced_vllm, "job-1-1-0", None)
    async with BackendClient() as client:
        backend = BackendAssignment(pool="p", url=traced_vllm.url, model=SERVED, tokenizer="t")
        await client.logprobs_mode(backend)
    await _play(traced_vllm, "job-1-2-0", Kept())
    await asyncio.to_thread(receiver.until, lambda spans: len(_requests(spans, "job-1-2-0")) == 2)
    requests = [span for span in receiver.spans if span.name == "llm_request"][before:]
    assert {span.trace for span in requests} == {trace_id("job-1-2-0")}


async def test_concurrent_rollouts_keep_their_spans_apart(
    traced_vllm: VllmServer, receiver: Receiver
) -> None:
    sinks = {f"job-2-{number}-0": Kept() for number in range(8)}
    await asyncio.gather(*(_play(traced_vllm, rollout, sink, 3) for rollout, sink in sinks.items()))

    def all_there(spans: list[GotSpan]) -> bool:
        return all(len(_requests(spans, rollout)) == 3 for rollout in sinks)

    spans = await asyncio.to_thread(receiver.until, all_there)
    for rollout, sink in sinks.items():
        parents = {span.id for span in sink.spans}
        assert {span.parent for span in _requests(spans, rollout)} <= parents


async def test_a_request_without_the_header_is_traced(traced_vllm: VllmServer, receiver: Receiver) -> None:
    """The server does trace what names no parent. So the silence above is the header's doing."""

    def count(spans: list[GotSpan]) -> int:
        return sum(span.name == "llm_request" for span in spans)

    before = count(receiver.spans)
    body: dict[str, Any] = {"model": SERVED, "prompt": list(PROMPT), "max_tokens": 2}
    async with httpx.AsyncClient(timeout=patience(60.0), trust_env=False) as http:
        (await http.post(f"{traced_vllm.url}/v1/completions", json=body)).raise_for_status()
    await asyncio.to_thread(receiver.until, lambda spans: count(spans) > before)
