"""The numbers that servers report in `/metrics`, under the names of vLLM and of SGLang.

The embedded engine uses vLLM's names.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_NAMES: Final[Mapping[bytes, str]] = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:prefix_cache_queries_total": "prefix_queries",
    b"vllm:prefix_cache_hits_total": "prefix_hits",
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:prompt_tokens_total": "prefix_queries",
    b"sglang:cached_tokens_total": "prefix_hits",
    # vLLM counts the tokens of each step, also those of a prompt that takes several steps.
    b"vllm:iteration_tokens_total_sum": "computed",
    b"vllm:generation_tokens_total": "computed",
    b"sglang:generation_tokens_total": "computed",
}
_SAMPLE: Final = re.compile(rb"^(%s)(?:\{[^\n]*\})?[ \t]+([^\s]+)" % b"|".join(_NAMES), re.MULTILINE)
_CACHE: Final = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(
    rb'\b(enable_prefix_caching|kv_cache_size_tokens|num_gpu_blocks|block_size)="([^"]{1,20})"'
)


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """One reading of a server's metrics.

    Each number is the sum over its labels, of which a server has one for each engine. It is None if the
    server does not report it.
    """

    running: float | None = None
    """The number of requests that are being computed."""
    waiting: float | None = None
    """The number of requests in the server's queue."""
    prefix_queries: float | None = None
    """The number of prompt tokens that were looked up in the prefix cache since the server started."""
    prefix_hits: float | None = None
    """The number of those tokens that were found in the prefix cache."""
    computed: float | None = None
    """A number that grows while the server computes tokens."""
    cache_tokens: int | None = None
    """The number of tokens that the KV caches of all engines hold. It is None if the server does not say."""


def parse(text: bytes) -> ServerMetrics:
    """Return the metrics in an exposition in Prometheus's text format.

    Only the metrics listed above are read, because the whole text of a vLLM server is about 60 KB.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    for match in _SAMPLE.finditer(text):
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            totals[_NAMES[match[1]]] += value
    return ServerMetrics(**totals, cache_tokens=cache_config(text).tokens)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a vLLM server reports about its KV cache. SGLang's metrics do not contain it."""

    prefix_caching: bool | None = None
    """Whether the server finds the prefixes of earlier prompts again."""
    tokens: int | None = None
    """The tokens for which the cache has room, over all engines of the server."""


def cache_config(text: bytes) -> CacheConfig:
    """Return the configuration of the KV cache in an exposition; its fields are None if it has none.

    There is a line for each engine, whose tokens are those of one engine. Versions without them have the
    number of blocks, which is the same in all lines, because vLLM adds up the blocks of all engines.
    """
    caching: bool | None = None
    tokens = blocks = 0
    for match in _CACHE.finditer(text):
        labels = {name.decode(): value.decode("ascii", "replace") for name, value in _LABEL.findall(match[1])}
        caching = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""), caching)
        tokens += _count(labels.get("kv_cache_size_tokens"))
        blocks = max(blocks, _count(labels.get("num_gpu_blocks")) * _count(labels.get("block_size")))
    return CacheConfig(caching, tokens or blocks or None)


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0
