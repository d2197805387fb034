"""The order in which sequences compute: continuous scheduling of many sequences over one model.

The scheduler is not thread-safe and does no I/O; ``rollyard_engine.generation.thread`` runs it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollyard_engine.errors import EngineError
from rollyard_engine.generation.model import KVCache, PolicyModel
from rollyard_engine.generation.sequence import FinishReason, Sequence

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]

PREFILL_CHUNK: Final = 128
"""The number of prompt tokens in one call of the model. It is constant, so the same prompt gives the same
logits."""

PREFILL_BUDGET: Final = 512
"""The number of prompt tokens that are computed between two decoding steps of the running sequences."""

SLICE_SECONDS: Final = 0.02
"""The seconds that a step may take. It may exceed them by one call of the model."""

MIN_SHARED_TOKENS: Final = 32
"""The shortest common prefix, in tokens, that is taken from another conversation's cache rather than
recomputed."""

DONOR_IDLE_SECONDS: Final = 1.0
"""The seconds that a cache must have been idle before it is truncated for another prompt, because its own
conversation may continue."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of the scheduler.

    They are the tokens of a sequence, the sequences that run at the same time, the caches that are kept, and
    the bytes of all caches.
    """

    max_model_len: int
    max_num_seqs: int
    max_kept: int
    cache_bytes: int


@dataclass(slots=True)
class Stats:
    """The counters since the start, in tokens unless their names say otherwise.

    One thread writes them, and other threads read them.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished_requests: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )


class Scheduler:
    """The waiting and running sequences, the kept caches, the weights and the pause state."""

    def __init__(
        self, model: PolicyModel, version: str, eos_token_ids: Iterable[int], limits: SchedulerLimits
    ) -> None:
        self.limits = limits
        self.stats = Stats()
        self.version = version
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.paused = False
        self._draining: list[Callable[[], None]] = []
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self._kept = PrefixCache(limits.max_kept)
        self._progressed: list[Sequence] = []
        self._sweep: deque[Sequence] = deque()
        self._budget = PREFILL_BUDGET

    # -- state ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        if self.paused:
            return bool(self._draining)
        return bool(self.running or self.waiting)

    @property
    def cache_usage(self) -> float:
        """The share of the cache memory that running and kept sequences use, from 0 to 1."""
        return self._cache_bytes() / self.limits.cache_bytes

    def take_progressed(self) -> list[Sequence]:
        """Return the sequences that streamed tokens or finished since the last call."""
        progressed, self._progressed = self._progressed, []
        return progressed

    # -- requests ------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It waits while the scheduler is paused."""
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence with the tokens it has. This does nothing if the sequence has already ended."""
        if sequence.finished:
            return
        if sequence in self.running:
            self._finish(sequence, "abort")
        else:
            self.waiting.remove(sequence)
            sequence.finish_reason = "abort"
            self._ended(sequence, "abort")

    def abort_ids(self, request_ids: Iterable[str] | None) -> int:
        """Abort the requests with these external ids, and return how many were aborted.

        With ``None``, all requests are aborted.
        """
        ids = None if request_ids is None else set(request_ids)
        chosen = [
            sequence
            for sequence in (*self.running, *self.waiting)
            if ids is None or sequence.request_id in ids
        ]
        for sequence in chosen:
            self.abort(sequence)
        return len(chosen)

    def step(self) -> None:
        """Advance each running sequence by one token, or by one piece of its prompt.

        Waiting sequences are admitted first. If the time of ``SLICE_SECONDS`` does not suffice for all
        sequences, the next call advances the others. With a slow model, commands then do not wait for every
        sequence.
        """
        if not self._sweep:
            if not self.paused:
                self._admit()
            self._sweep.extend(self.running)
            self._budget = PREFILL_BUDGET
        until = time.monotonic() + SLICE_SECONDS
        while self._sweep:
            sequence = self._sweep.popleft()
            if sequence.finished:
                continue
            try:
                self._budget -= self._advance(sequence, self._budget)
            except (RuntimeError, EngineError) as error:  # onnxruntime raises RuntimeError.
                problem = f"the model failed on this request: {error}"
                sequence.error = EngineError(problem, reason="GenerationFailed")
                sequence.kv = None
                self._remove(sequence, "error")
            if time.monotonic() >= until:
                break
        self._finish_drain()

    # -- control -------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, *, clear_cache: bool, when_paused: Callable[[], None]) -> None:
        """Stop scheduling. ``when_paused`` is called once nothing runs any more.

        That is immediately, except for the mode ``wait``. The mode ``abort`` ends every request with its
        partial output, ``wait`` lets running requests finish, and ``keep`` freezes them until ``resume`` and
        ignores ``clear_cache``. Requests that are sent meanwhile wait.
        """
        self.paused = True
        if mode == "abort":
            self.abort_ids(None)

        def done() -> None:
            if clear_cache and mode != "keep":
                self._kept.clear()
            when_paused()

        if mode == "wait" and self.running:
            self._draining.append(done)
        else:
            done()
            self._finish_drain(force=True)

    def resume(self) -> None:
        """Continue scheduling."""
        self.paused = False
        self._finish_drain(force=True)

    def swap_model(self, model: PolicyModel) -> None:
        """Serve other weights from the next step on.

        The kept caches are dropped. A running sequence keeps its tokens, and its cache is computed again with
        the new weights before they sample.

        Raises:
            EngineError: The vocabulary differs, or the context is too short.
        """
        if model.folder.vocab_size != self._model.folder.vocab_size:
            raise EngineError(
                f"{model.folder.path} has a vocabulary of {model.folder.vocab_size} tokens, "
                f"the served model {self._model.folder.vocab_size}",
                param="weights_path",
                reason="ModelFolderInvalid",
            )
        if model.folder.context_length < self.limits.max_model_len:
            raise EngineError(
                f"{model.folder.path} has a context of {model.folder.context_length} tokens, "
                f"the server was started for {self.limits.max_model_len}",
                param="weights_path",
                reason="ModelFolderInvalid",
            )
        self._model = model
        self.reset_prefix_cache(running_too=True)

    def reset_prefix_cache(self, *, running_too: bool) -> None:
        """Drop the kept caches.

        With ``running_too``, running sequences also compute their caches again.
        """
        self._kept.clear()
        if running_too:
            for sequence in self.running:
                sequence.kv = None

    # -- the inside ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            tokens = len(sequence.prompt) + sequence.params.max_tokens
            if not sequence.scoring:  # A kept cache has no logits of the prompt tokens that it holds.
                sequence.kv = self._kept.take(sequence.prompt, tokens, time.monotonic())
            if sequence.kv is not None:
                sequence.capacity = sequence.kv.capacity
                sequence.cached_tokens = sequence.kv.length
            elif not self._make_room(sequence.capacity):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            self.stats.prefix_queries += len(sequence.prompt)
            self.stats.prefix_hits += sequence.cached_tokens
            self.stats.prompt_tokens += len(sequence.prompt)

    def _advance(self, sequence: Sequence, budget: int) -> int:
        """Compute the next piece of a sequence.

        Returns:
            The number of prompt tokens that this took from ``budget``.
        """
        if sequence.kv is None:
            sequence.kv = self._model.open(sequence.capacity)
            # The weights may have changed, and a prompt is scored by one set of weights only.
            if sequence.scoring:
                sequence.prompt_scores.clear()
        kv, ids = sequence.kv, sequence.token_ids
        pending = ids[kv.length :]
        if sequence.scoring:
            pending = pending[:1]  # The runtime returns only the logits after the last appended token.
        elif len(pending) > 1:
            if budget <= 0:
                return 0
            pending = pending[:PREFILL_CHUNK]
        logits = kv.append(pending)
        if sequence.scoring:
            sequence.score_prompt(logits)
        if kv.length == len(ids):
            sequence.accept(sequence.sampler.sample(logits, self.version), self._eos)
            self.stats.generation_tokens += 1
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)
            elif sequence.reports:
                self._progressed.append(sequence)
        return len(pending) if len(pending) > 1 else 0

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        kv, sequence.kv = sequence.kv, None
        self._remove(sequence, reason)
        if kv is not None and sequence.params.prompt_logprobs is None:
            self._kept.put(sequence.token_ids, kv, time.monotonic())

    def _remove(self, sequence: Sequence, outcome: str) -> None:
        self.running.remove(sequence)
        self._ended(sequence, outcome)

    def _ended(self, sequence: Sequence, outcome: str) -> None:
        self.stats.finished_requests[outcome] += 1
        self._progressed.append(sequence)

    def _finish_drain(self, *, force: bool = False) -> None:
        if self._draining and (force or not self.running):
            draining, self._draining = self._draining, []
            for callback in draining:
                callback()

    def _cache_bytes(self) -> int:
        tokens = self._kept.capacity_tokens + sum(sequence.capacity for sequence in self.running)
        return tokens * self._model.folder.kv_bytes_per_token

    def _make_room(self, capacity: int) -> bool:
        """Drop kept caches until a cache of ``capacity`` tokens fits.

        Returns:
            Whether the cache may be opened. It may always be opened if nothing runs and no cache is kept.
        """
        needed = capacity * self._model.folder.kv_bytes_per_token
        while self._cache_bytes() + needed > self.limits.cache_bytes:
            if not self._kept.drop_oldest():
                return not self.running
        return True


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
