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


CACHE = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",effective_attention_block_size="32",engine="0",\
hash_block_size="None",kv_cache_dtype_skip_layers="[]",kv_cache_max_concurrency="341.328125",\
kv_cache_memory_bytes="1073741824",kv_cache_size_tokens="699040",mamba_block_size="None",\
num_gpu_blocks="21845",num_gpu_blocks_override="None",user_specified_block_size="True"} 1.0
""".replace(b"\\\n", b"")
"""As vLLM 0.32 writes it, which logs `CPU KV cache size: 699,040 tokens`."""


def test_the_size_of_the_kv_cache() -> None:
    assert parse(CACHE).cache_tokens == 699_040
    second = CACHE.replace(b'engine="0"', b'engine="1"')
    assert parse(CACHE + second).cache_tokens == 2 * 699_040, "each engine has a cache of its own"
    # Older versions say how many blocks all engines have together.
    older = CACHE.replace(b"kv_cache_size_tokens", b"other")
    assert parse(older + older.replace(b'engine="0"', b'engine="1"')).cache_tokens == 21_845 * 32


@pytest.mark.parametrize(
    "text",
    [
        CACHE.replace(b"699040", b"None").replace(b"21845", b"None"),
        CACHE.replace(b"699040", b"0").replace(b"21845", b"0"),
        CACHE.replace(b"699040", b"9" * 40).replace(b"21845", b"-1"),
        b"vllm:cache_config_info 1.0\n",
        b'# vllm:cache_config_info{kv_cache_size_tokens="5"} 1.0\n',
        b'vllm:cache_config_info{not_kv_cache_size_tokens="5"} 1.0\n',
        b"",
    ],
)
def test_a_size_that_is_not_known(text: bytes) -> None:
    assert parse(text).cache_tokens is None
