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
}
_CACHE: Final = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_CACHE_SIZES: Final = re.compile(rb'(?:^|,)(kv_cache_size_tokens|num_gpu_blocks|block_size)="([0-9]{1,15})"')
_SAMPLE: Final = re.compile(rb"^(%s)(?:\{[^\n]*\})?[ \t]+([^\s]+)" % b"|".join(_NAMES), re.MULTILINE)


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
    return ServerMetrics(**totals, cache_tokens=_cache_tokens(text))


def _cache_tokens(text: bytes) -> int | None:
    """Return the size of vLLM's KV caches, which labels of a metric say, with a line for each engine.

    The tokens are those of one engine. Versions without them have the number of blocks, which is the same in
    all lines, because vLLM adds up the blocks of all engines.
    """
    lines = [dict(_CACHE_SIZES.findall(line)) for line in _CACHE.findall(text)]
    tokens = sum(int(line.get(b"kv_cache_size_tokens", 0)) for line in lines)
    blocks = max(
        (int(line.get(b"num_gpu_blocks", 0)) * int(line.get(b"block_size", 0)) for line in lines), default=0
    )
    return tokens or blocks or None
