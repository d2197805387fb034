"""The tokens of a record by range, compact: runs for mask and version, one byte a log-probability."""

from __future__ import annotations

import base64
from typing import Any, Final

from rollyard_api.core.problems import NotFound
from rollyard_api.views.rollout.records import CompactRecord, CompactSegment, cut

MAX_TOKENS: Final = 20_000
"""The number of tokens in one answer."""
STEP: Final = 20
"""A byte v from 1 to 255 stands for a log-probability of about -(v - 1) / STEP nats, so the lowest is -12.7.
The byte 0 stands for a token without one."""


def quantized(logprobs: list[float], mask: list[tuple[Any, int]]) -> str:
    """Return log-probabilities as one byte each, in base64; tokens outside the loss mask have 0."""
    values = bytearray(len(logprobs))
    at = 0
    for value, n in mask:
        if value:
            for place in range(at, at + n):
                logprob = min(max(logprobs[place], -12.7), 0.0)
                values[place] = min(255, max(1, round(-logprob * STEP) + 1))
        at += n
    return base64.b64encode(bytes(values)).decode()


def segment_of(record: CompactRecord, number: int) -> CompactSegment:
    """Return a segment of a record.

    Raises:
        NotFound: The record has no such segment.
    """
    if number >= len(record.segments):
        raise NotFound(
            f"the record has {len(record.segments)} segments, and none with number {number}",
            reason="SegmentNotFound",
        )
    return record.segments[number]


def page(record: CompactRecord, number: int, start: int, limit: int, *, exact: bool) -> dict[str, Any]:
    """Return a range of a segment's tokens without their texts. Positions count from the first of the prompt.

    Raises:
        NotFound: The record has no such segment.
    """
    segment = segment_of(record, number)
    end = min(start + limit, segment.total)
    # The prompt is outside the loss mask and has neither log-probabilities nor versions.
    outside = max(0, min(end, segment.prompt) - start)
    first, last = max(0, start - segment.prompt), max(0, end - segment.prompt)
    mask = cut(segment.mask, first, last)
    versions = cut(segment.versions, first, last)
    logprobs = segment.logprobs[first:last].tolist()
    if outside:
        mask = [(0, outside), *mask]
        versions = [("", outside), *versions]
        logprobs = [0.0] * outside + logprobs
    return {
        "segment": number,
        "segments": len(record.segments),
        "start": start,
        "total": segment.total,
        "prompt": segment.prompt,
        "ids": segment.ids[start:end].tolist(),
        "mask": _joined(mask),
        "versions": _joined(versions),
        "logprobs": logprobs if exact else quantized(logprobs, mask),
    }


def _joined(given: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Return runs in which neighbours differ."""
    found: list[tuple[Any, int]] = []
    for value, n in given:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + n)
        else:
            found.append((value, n))
    return found
