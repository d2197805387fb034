"""The ids of traces and spans, which are derived from rollouts and not kept anywhere.

A rollout has one trace. The ids of its trace, of its root span and of the spans of its stages are hashes of
what every process knows: the rollout's id, the stage and the fencing token of the lease. A process can
therefore name the parent of a span that another process sends, and neither a restart nor a second attempt
changes an id. The ids have the sizes of W3C Trace Context: 16 and 8 bytes, written as lower-case hexadecimal.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

NOT_SAMPLED: Final = f"00-{'0' * 31}1-{'0' * 15}1-00"
"""A `traceparent` that asks a server to record nothing, for requests that belong to no rollout."""
_SCALE: Final = float(1 << 64)


def trace_id(rollout: str) -> str:
    """Return the id of a rollout's trace: 32 hexadecimal digits."""
    return _hash("trace", rollout)[:32]


def root_span_id(rollout: str) -> str:
    """Return the id of the span of a whole rollout, which is the root of its trace."""
    return span_id("rollout", rollout)


def stage_span_id(rollout: str, stage: str, token: int) -> str:
    """Return the id of the span of one stage under one lease, whose fencing token is `token`."""
    return span_id("stage", rollout, stage, str(token))


def queue_span_id(rollout: str, stage: str, since: float) -> str:
    """Return the id of the span of one wait in a stage's queue.

    `since` is when the wait began, in seconds since the epoch.
    """
    return span_id("queue", rollout, stage, repr(since))


def span_id(*parts: str) -> str:
    """Return the id of the span that `parts` name: 16 hexadecimal digits."""
    return _hash("span", *parts)[:16]


def traceparent(trace: str, span: str, sampled: bool) -> str:
    """Return the header `traceparent` (W3C Trace Context, version 00) of requests within a span."""
    return f"00-{trace}-{span}-{'01' if sampled else '00'}"


def is_sampled(rollout: str, fraction: float) -> bool:
    """Return whether the group of a rollout is among the fraction of groups whose traces are exported.

    The id of a rollout is that of its group, a hyphen and the number of the sample. All samples of a group
    are therefore traced, or none of them is, and every process comes to the same result.

    Args:
        rollout: The id of the rollout.
        fraction: The fraction of groups, from 0 to 1.
    """
    if fraction >= 1.0:
        return True
    if fraction <= 0.0:
        return False
    return int(_hash("group", rollout.rpartition("-")[0])[:16], 16) < fraction * _SCALE


def _hash(*parts: str) -> str:
    return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
