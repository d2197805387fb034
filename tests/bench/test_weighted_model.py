"""The instrument of the overlap: its tokens carry the label of the weights, and a pause lets requests end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from rollyard_bench.model_servers import WeightedModel
from rollyard_bench.stats import pairs_median

REQUEST = orjson.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 64})


async def call(model: WeightedModel, path: str, body: bytes = b"") -> Any:
    status, answer = await model.respond(path, body, time.perf_counter())
    assert status == 200, answer
    return answer


def labels(answer: Any) -> set[str]:
    (choice,) = answer["choices"]
    (span,) = choice["weight_versions"]
    assert (span["start"], span["end"]) == (0, len(choice["token_ids"]))
    return {span["version"]}


async def test_a_request_in_flight_ends_before_the_pause_and_a_later_one_after_it() -> None:
    model = WeightedModel(latency=0.2, turns=4)
    early = asyncio.create_task(call(model, "/v1/completions", REQUEST))
    await asyncio.sleep(0)
    begin = time.perf_counter()
    await call(model, "/pause")
    assert early.done() or time.perf_counter() - begin >= 0.1
    assert labels(await early) == {"default"}
    assert await call(model, "/is_paused") == {"is_paused": True}
    late = asyncio.create_task(call(model, "/v1/completions", REQUEST))
    await call(model, "/update_weight_version", orjson.dumps({"new_version": "step-1"}))
    assert await call(model, "/weight_info") == {"weight_version": "step-1"}
    await asyncio.sleep(0)
    assert not late.done()
    resumed = time.perf_counter()
    await call(model, "/resume")
    assert labels(await late) == {"step-1"}
    assert time.perf_counter() - resumed >= 0.2, "its time begins when the server samples again"


async def test_other_paths_are_those_of_the_latency_model() -> None:
    model = WeightedModel(latency=0.0, turns=4)
    assert await call(model, "/health") == {}
    assert (await model.respond("/unknown", b"", 0.0))[0] == 404


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 9.0, 4.0], (4.0, 2.0)), ([1.0, 9.0], (9.0, 2.0)), ([3.0], (3.0, 2.0))]
)
def test_the_pair_with_the_median_ratio_counts(values: list[float], expected: tuple[float, float]) -> None:
    assert pairs_median(values, [2.0] * len(values)) == expected
