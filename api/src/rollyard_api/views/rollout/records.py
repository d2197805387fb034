"""Records of ended rollouts in a compact form, read once for the many pieces in which a page asks for them.

A record of 100,000 tokens takes some 20 MB as Python objects and 2 MB as arrays, so token lists are kept as
arrays, and masks and versions as runs. The newest records stay in memory, up to a number of bytes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from rollyard_crds.trajectory import turns_said

from rollyard_api.core.codec import loads

MAX_BYTES: Final = 128 << 20
"""The number of bytes that the kept records take together, by an estimate."""
MAX_ONE: Final = 32 << 20
"""The size of a record that is not kept."""
_LARGEST_ID: Final = (1 << 63) - 1

Run = tuple[Any, int]
"""A value, and how often it stands one after the other."""


@dataclass(frozen=True, slots=True)
class CompactSegment:
    """The tokens of a segment, prompt and response in one list."""

    prompt: int
    """The number of the prompt's tokens."""
    ids: array[int]
    """The ids of all tokens. One that no tokenizer has, because it is not in [0, 2^63), is -1."""
    logprobs: array[float]
    """The log-probabilities of the response's tokens, in nats."""
    mask: list[Run]
    """The loss mask of the response as runs."""
    versions: list[Run]
    """The policy versions of the response as runs."""

    @property
    def total(self) -> int:
        """The number of tokens of prompt and response."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class CompactRecord:
    """An ended rollout's record."""

    head: dict[str, Any]
    """The record without its segments and messages."""
    messages: list[dict[str, Any]]
    segments: list[CompactSegment]
    turn_of: dict[int, int]
    """The number of the turn that said a message, by the message's number."""
    size: int
    """The bytes that it takes, by an estimate."""


def compact(line: bytes) -> CompactRecord:
    """Return a record, given as JSON, in its compact form. This call belongs in a thread."""
    head = loads(line)
    segments = [_segment(one) for one in head.pop("segments", ())]
    messages = head.pop("messages", [])
    tokens = sum(one.total + len(one.logprobs) for one in segments)
    # What is not tokens is as long in memory as in JSON, give or take the objects around short texts.
    texts = len(line) - min(len(line), 12 * tokens)
    said = turns_said([message.get("role", "") for message in messages], len(head.get("turns") or ()))
    return CompactRecord(head, messages, segments, said, 8 * tokens + 2 * texts + 4096)


def _segment(document: dict[str, Any]) -> CompactSegment:
    prompt, response = document["prompt_ids"], document["response_ids"]
    return CompactSegment(
        len(prompt),
        _ids([*prompt, *response]),
        array("d", document["logprobs"]),
        runs(document["loss_mask"]),
        runs(document["policy_versions"]),
    )


def _ids(ids: list[int]) -> array[int]:
    try:
        return array("q", ids)
    except OverflowError:
        return array("q", [one if abs(one) <= _LARGEST_ID else -1 for one in ids])


def runs(values: Sequence[Any]) -> list[Run]:
    """Return a list as runs."""
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def cut(given: Sequence[Run], start: int, end: int) -> list[Run]:
    """Return the runs of the part [start, end) of what `given` stands for."""
    found: list[Run] = []
    at = 0
    for value, n in given:
        first, last = max(at, start), min(at + n, end)
        if first < last:
            found.append((value, last - first))
        at += n
        if at >= end:
            break
    return found


class KeptRecords:
    """The records that were read last."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[str, str], CompactRecord] = OrderedDict()
        self._bytes = 0

    def get(self, uid: str, rollout: str) -> CompactRecord | None:
        """Return the record of a rollout of the job with this uid, or None if it is not kept."""
        found = self._kept.get((uid, rollout))
        if found is not None:
            self._kept.move_to_end((uid, rollout))
        return found

    def put(self, uid: str, rollout: str, record: CompactRecord) -> None:
        """Keep a record, and forget the oldest ones for which there is no room."""
        if record.size > min(MAX_ONE, self._most) or (uid, rollout) in self._kept:
            return
        self._kept[uid, rollout] = record
        self._bytes += record.size
        while self._bytes > self._most:
            _, old = self._kept.popitem(last=False)
            self._bytes -= old.size
