"""The KV caches of finished sequences, which are kept for the next turn of the same rollout."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollyard_engine.generation.model import KVCache

MIN_SHARED_TOKENS: Final = 32
"""The shortest common prefix, in tokens, that is taken from another conversation's cache rather than
recomputed."""

DONOR_IDLE_SECONDS: Final = 1.0
"""The seconds that a cache must have been idle before it is truncated for another prompt, because its own
conversation may continue."""


@dataclass(frozen=True, slots=True)
class KeptCache:
    """A KV cache, the ids that it holds, and the time at which it was kept.

    There are ``kv.length`` ids. The time is in monotonic seconds.
    """

    token_ids: NDArray[np.int32]
    kv: KVCache
    kept_at: float


class PrefixCache:
    """A collection of at most ``max_entries`` KV caches, ordered from the oldest to the newest.

    The caller bounds their memory.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[int, KeptCache] = OrderedDict()
        self._next_key = 0
        self.capacity_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, token_ids: NDArray[np.int32], kv: KVCache, now: float) -> None:
        """Keep ``kv``, which holds ``token_ids``.

        The oldest cache is dropped if there are too many.
        """
        if self._max_entries == 0 or kv.length == 0:
            return
        while len(self._entries) >= self._max_entries:
            self.drop_oldest()
        self._entries[self._next_key] = KeptCache(token_ids[: kv.length].copy(), kv, now)
        self._next_key += 1
        self.capacity_tokens += kv.capacity

    def take(self, prompt: NDArray[np.int32], capacity: int, now: float) -> KVCache | None:
        """Remove the best cache for ``prompt``, truncate it to the common prefix, and return it.

        The best cache is the longest one that ``prompt`` wholly extends. If there is none, it is one that
        shares at least ``MIN_SHARED_TOKENS`` and was idle for ``DONOR_IDLE_SECONDS``, since truncating a
        recently used one would cost its own rollout the hit of the next turn. The last prompt token is always
        left to be computed, because its logits are needed. Only caches with room for ``capacity`` tokens
        qualify. The result is ``None`` if there is no such cache.
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
        """Drop the cache that was kept longest ago, and return whether there was one."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        self.capacity_tokens -= entry.kv.capacity
        return True

    def clear(self) -> None:
        """Drop all caches."""
        self._entries.clear()
        self.capacity_tokens = 0


def shared_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Return the number of leading ids that two sequences share."""
    size = min(len(left), len(right))
    if size == 0 or left[0] != right[0]:
        return 0
    different = left[:size] != right[:size]
    first = int(different.argmax())
    return first if different[first] else size
