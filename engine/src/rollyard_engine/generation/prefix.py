"""Finished sequences' KV caches, kept so that the next turn of a rollout continues from them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollyard_engine.generation.model import KVCache

MIN_SHARED_TOKENS = 32
"""A shorter common prefix is recomputed rather than taken from another conversation's cache."""

DONOR_IDLE_SECONDS = 1.0
"""A cache is truncated for another prompt only after it was idle this long: its conversation may continue."""


@dataclass(frozen=True, slots=True)
class KeptCache:
    """A KV cache, the ids it holds (length ``kv.length``) and when it was kept (monotonic seconds)."""

    token_ids: NDArray[np.int32]
    kv: KVCache
    kept_at: float


class PrefixCache:
    """KV caches, oldest first, at most ``max_entries`` of them; the caller bounds their memory."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[int, KeptCache] = OrderedDict()
        self._next_key = 0
        self.capacity_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, token_ids: NDArray[np.int32], kv: KVCache, now: float) -> None:
        """Keep ``kv``, which holds ``token_ids``; the oldest is dropped when there are too many."""
        if self._max_entries == 0 or kv.length == 0:
            return
        while len(self._entries) >= self._max_entries:
            self.drop_oldest()
        self._entries[self._next_key] = KeptCache(token_ids[: kv.length].copy(), kv, now)
        self._next_key += 1
        self.capacity_tokens += kv.capacity

    def take(self, prompt: NDArray[np.int32], capacity: int, now: float) -> KVCache | None:
        """Take out the best cache for ``prompt``, cut back to what both share; ``None`` if there is none.

        A cache that ``prompt`` wholly extends is best (the longest such). Otherwise one that shares at
        least ``MIN_SHARED_TOKENS`` and was idle for ``DONOR_IDLE_SECONDS``: cutting back a fresh one would
        cost its own rollout the next turn's hit. The last prompt token is always left to be computed,
        since its logits are needed. Only caches with room for ``capacity`` tokens qualify.
        """
        best_key, best_shared, best_extends = -1, 0, False
        for key, entry in self._entries.items():
            if entry.kv.capacity < capacity:
                continue
            shared = shared_prefix(entry.token_ids, prompt)
            extends = shared == len(entry.token_ids)
            if not extends and (shared < MIN_SHARED_TOKENS or now - entry.kept_at < DONOR_IDLE_SECONDS):
                continue
            if (extends, shared) > (best_extends, best_shared):
                best_key, best_shared, best_extends = key, shared, extends
        usable = min(best_shared, len(prompt) - 1)
        if best_key < 0 or usable <= 0:
            return None
        kv = self._entries.pop(best_key).kv
        self.capacity_tokens -= kv.capacity
        kv.rewind(usable)
        return kv

    def drop_oldest(self) -> bool:
        """Drop the cache that was kept longest ago; whether there was one."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        self.capacity_tokens -= entry.kv.capacity
        return True

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.capacity_tokens = 0


def shared_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """How many leading ids two sequences share."""
    size = min(len(left), len(right))
    if size == 0 or left[0] != right[0]:
        return 0
    different = left[:size] != right[:size]
    first = int(different.argmax())
    return first if different[first] else size
