"""Pausing, weight versions, aborts, disconnects and bounds of a real server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_testing.waiting import eventually

# Without max_tokens a request continues until the context is full, which is long enough to act on it.
LONG = {"ignore_eos": True, "logprobs": 0, "seed": 1}


def generate_body(first: int, **sampling: Any) -> dict[str, Any]:
    """Return a request of three prompt tokens. The first one tells requests apart."""
    return {"token_ids": [first, 5, 6], "sampling_params": {**LONG, **sampling}}


async def metric(client: httpx.AsyncClient, name: str) -> float:
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith(name if "{" in name else name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


async def running(client: httpx.AsyncClient, number: int) -> None:
    async def holds() -> bool:
        return await metric(client, "vllm:num_requests_running") == number

    await eventually(holds)


async def sampled_more_than(client: httpx.AsyncClient, number: float) -> None:
    async def holds() -> bool:
        return await metric(client, "vllm:generation_tokens_total") > number

    await eventually(holds)


async def test_a_disconnected_client_frees_its_slot(own_server: Any) -> None:
    async with own_server.client() as client:
        for stream in (False, True):
            before = await metric(client, "vllm:num_requests_running")
            body = generate_body(3) | {"stream": stream}
            request = asyncio.create_task(client.post("/inference/v1/generate", json=body))
            await running(client, 1)
            request.cancel()
            await running(client, 0)
            assert before == 0
        assert await metric(client, 'vllm:request_success_total{engine="0",finished_reason="abort"') == 2


async def test_abort_by_the_prefixed_id_returns_the_partial_output(own_server: Any) -> None:
    async with own_server.client() as client:
        body = generate_body(3) | {"request_id": "mine"}
        request = asyncio.create_task(client.post("/inference/v1/generate", json=body))
        await sampled_more_than(client, 0)
        raw = await client.post("/inference/v1/abort_requests", json={"request_ids": ["mine"]})
        assert raw.status_code == 200
        await running(client, 1)
        await client.post("/inference/v1/abort_requests", json={"request_ids": ["generate-tokens-mine"]})
        choice = (await request).json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) > 0
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_pause_abort_returns_partials_and_later_requests_wait(own_server: Any) -> None:
    async with own_server.client() as client:
        first = asyncio.create_task(client.post("/inference/v1/generate", json=generate_body(3)))
        await sampled_more_than(client, 0)
        assert (await client.post("/pause?mode=abort")).json() == {"status": "paused"}
        assert (await first).json()["choices"][0]["finish_reason"] == "abort"
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        later = asyncio.create_task(
            client.post("/inference/v1/generate", json=generate_body(4, max_tokens=3))
        )
        await eventually(lambda: _equals(metric(client, "vllm:num_requests_waiting"), 1))
        assert (await client.get("/health")).status_code == 200
        assert not later.done()
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        assert len((await later).json()["choices"][0]["token_ids"]) == 3


async def _equals(value: Awaitable[float], wanted: float) -> bool:
    return await value == wanted


async def test_pause_wait_returns_after_the_running_ones(own_server: Any) -> None:
    async with own_server.client() as client:
        body = generate_body(3, max_tokens=400) | {"stream": True}
        async with client.stream("POST", "/inference/v1/generate", json=body) as stream:
            lines = stream.aiter_lines()
            events = [await anext(lines)]
            await client.post("/pause?mode=wait")
            assert await metric(client, "vllm:num_requests_running") == 0
            events += [line async for line in lines]
        choices = [
            json.loads(event.removeprefix("data: "))["choices"][0]
            for event in events
            if event.startswith("data: {")
        ]
        assert sum(len(choice["token_ids"]) for choice in choices) == 400
        assert choices[-1]["finish_reason"] == "length"
        assert (await client.get("/is_paused")).json() == {"is_paused": True}


async def test_keep_resumes_under_new_weights_and_every_token_knows_its_version(
    own_server: Any, other_weights: Path
) -> None:
    async with own_server.client() as client:
        request = asyncio.create_task(client.post("/inference/v1/generate", json=generate_body(3)))
        await sampled_more_than(client, 20)
        await client.post("/pause?mode=keep")
        frozen = await metric(client, "vllm:generation_tokens_total")
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(other_weights)}}
        assert (await client.post("/collective_rpc", json=rpc)).status_code == 200
        labelled = await client.post("/update_weight_version", json={"new_version": "v2"})
        assert labelled.json() == {"success": True, "new_version": "v2"}
        assert (await client.get("/weight_info")).json() == {"weight_version": "v2"}
        assert await metric(client, "vllm:generation_tokens_total") == frozen
        await client.post("/resume")
        await sampled_more_than(client, frozen + 20)
        await client.post("/abort_requests", json={})
        choice = (await request).json()["choices"][0]
    cut, end = int(frozen), len(choice["token_ids"])
    assert choice["weight_versions"] == [
        {"version": "v1", "start": 0, "end": cut},
        {"version": "v2", "start": cut, "end": end},
    ]
    assert 20 < cut < cut + 20 < end


def test_lora_adapters_are_refused(server: Any) -> None:
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/tmp/a"})
    assert answer.status_code == 400
    assert "has no LoRA adapters" in answer.json()["error"]["message"]


def test_a_folder_that_does_not_load_leaves_the_old_weights_serving(
    own_server: Any, model_dir: Path, tmp_path: Path
) -> None:
    before = own_server.complete([5, 6, 7], max_tokens=5, seed=1)
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    (broken / "model.onnx").write_bytes(b"not a model")
    for folder, said in (
        (tmp_path / "missing", "does not exist"),
        (empty, "has no genai_config.json"),
        (broken, "does not load"),
    ):
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        answer = own_server.post("/collective_rpc", rpc)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
        assert str(folder) in answer.json()["error"]["message"]
    own_server.post("/reset_prefix_cache")
    assert own_server.complete([5, 6, 7], max_tokens=5, seed=1)["token_ids"] == before["token_ids"]


async def test_a_full_queue_refuses_with_a_time_to_come_back(own_server: Any) -> None:
    async with own_server.client() as client:
        await client.post("/pause?mode=keep")
        held = [
            asyncio.create_task(client.post("/inference/v1/generate", json=generate_body(3 + index)))
            for index in range(4)  # These are two slots and two places in the queue.
        ]
        await eventually(lambda: _equals(metric(client, "vllm:num_requests_waiting"), 4))
        refused = await client.post("/inference/v1/generate", json=generate_body(9))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert refused.json()["error"]["code"] == 503
        aborted = await client.post("/abort_requests", json={})
        assert aborted.json() == {"status": "aborted", "aborted": 4}
        for request in held:
            assert (await request).json()["choices"][0]["finish_reason"] == "abort"
        await client.post("/resume")
        accepted = await client.post("/inference/v1/generate", json=generate_body(9, max_tokens=2))
        assert accepted.status_code == 200


@pytest.mark.parametrize("path", ["/pause?mode=later", "/pause?clear_cache=perhaps"])
def test_a_wrong_pause_is_refused_by_name(server: Any, path: str) -> None:
    answer = server.post(path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in path
    assert server.get("/is_paused").json() == {"is_paused": False}
