"""What servers say of themselves in `/metrics`, under vLLM's names and under SGLang's.

The embedded engine has vLLM's names.
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
_SAMPLE: Final = re.compile(rb"^(%s)(?:\{[^\n]*\})?[ \t]+([^\s]+)" % b"|".join(_NAMES), re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """One reading, each number summed over its labels (one for each engine of a server); None: not there."""

    running: float | None = None
    """Requests that are computed."""
    waiting: float | None = None
    """Requests in the server's queue."""
    prefix_queries: float | None = None
    """Prompt tokens that were looked up in the prefix cache since the server's start."""
    prefix_hits: float | None = None
    """Those of them that were found there."""


def parse(text: bytes) -> ServerMetrics:
    """Read an exposition in Prometheus's text format.

    Only the lines above are looked at: the whole text of a vLLM server is some 60 KB.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for match in _SAMPLE.finditer(text):
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            found[_NAMES[match[1]]] += value
    return ServerMetrics(**found)
