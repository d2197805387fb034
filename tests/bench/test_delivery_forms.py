"""The delivery figure reads what the control plane sends in every form, and refuses other lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from rollyard_api.trajectories import delivery as server
from rollyard_api.trajectories.packed import ARRAYS, repacked
from rollyard_bench import delivery


def page(form: str, *records: Any) -> bytes:
    made = [repacked(record) if form == ARRAYS else orjson.dumps(record) for record in records]
    return server.encode(made, form)


def record(number: int) -> dict[str, Any]:
    segment = delivery._segment(np.random.default_rng(number))
    return {
        "id": f"r{number}",
        "attempt": 0,
        "reward": 1.0,
        "reward_components": {},
        "timings": {},
        "segments": [segment],
    }


@pytest.mark.parametrize("name", list(delivery.FORMATS))
def test_each_form_is_read(name: str) -> None:
    form, decode = delivery.FORMATS[name]
    assert decode(page(form, record(1), record(2))) == 2


@pytest.mark.parametrize("name", list(delivery.FORMATS))
def test_a_page_with_a_shorter_response_is_no_result(name: str) -> None:
    form, decode = delivery.FORMATS[name]
    shorter = record(1)
    (segment,) = shorter["segments"]
    for field in ("response_ids", "loss_mask", "logprobs", "policy_versions"):
        segment[field] = segment[field][:-1]
    with pytest.raises(AssertionError):
        decode(page(form, shorter))


def test_a_rate_counts_the_seconds_of_both() -> None:
    rate = delivery.Rate(rollouts=100, megabytes=300.0, server=1.0, client=0.5)
    assert rate.value == 200.0
    assert "0.5 million tokens/s" in str(rate)
