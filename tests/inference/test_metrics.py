"""Servers' `/metrics` under vLLM's names and under SGLang's."""

from __future__ import annotations

import pytest
from rollyard_inference.metrics import ServerMetrics, parse

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}b \\"c"} 3.0
vllm:num_requests_running{engine="1",model_name="a}b \\"c"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1.5e+03
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7952612544912148e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 1200.0 1795261254491
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 5.0
"""
SGLANG = b"""# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",model_name="a}b \\"c"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="a}b \\"c"} 2.0
sglang:num_running_reqs_offline_batch{model_name="tiny"} 4.0
sglang:num_queue_reqs{model_name="tiny"} 7.0
sglang:prompt_tokens_total{is_streaming="false",model_name="tiny"} 1.5e+03
sglang:prompt_tokens_histogram_sum{model_name="tiny"} 1.5e+03
sglang:cached_tokens_total{cache_source="device",model_name="tiny"} 1000.0
sglang:cached_tokens_total{cache_source="host",model_name="tiny"} 200.0
sglang:cache_hit_rate{model_name="tiny"} 0.3
"""


@pytest.mark.parametrize("text", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_both_shapes_read_the_same(text: bytes) -> None:
    assert parse(text) == ServerMetrics(running=5.0, waiting=7.0, prefix_queries=1500.0, prefix_hits=1200.0)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>",
        b"vllm:num_requests_running{} NaN\n",
        b"vllm:num_requests_running x\n",
        b"vllm:num_requests_waiting{} -1\n",
        b"sglang:num_running_reqs{} +Inf\n",
    ],
)
def test_what_is_no_number_is_left_out(text: bytes) -> None:
    assert parse(text) == ServerMetrics()


def test_names_without_labels() -> None:
    assert parse(b"vllm:num_requests_running 4\n") == ServerMetrics(running=4.0)
