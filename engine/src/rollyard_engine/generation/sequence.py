"""One request on its way through the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollyard_engine.errors import EngineError
from rollyard_engine.generation.model import KVCache
from rollyard_engine.generation.sampling import (
    Logits,
    PromptToken,
    SampledToken,
    Sampler,
    SamplingParams,
    score,
)

FinishReason: TypeAlias = Literal["stop", "length", "abort"]

MIN_CAPACITY: Final = 512
"""The capacity of the smallest KV cache that is opened, in tokens."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The range ``[start, end)`` of tokens that were sampled by weights with the label ``version``."""

    version: str
    start: int
    end: int


class Sequence:
    """The tokens and the state of a request.

    Only the engine thread writes them. Other threads may read ``output`` (which is append-only) and, once
    ``finish_reason`` or ``error`` is set, everything.

    The ids in ``forced`` are those that its first tokens are to have.
    """

    __slots__ = (
        "_ids",
        "_size",
        "cached_tokens",
        "capacity",
        "error",
        "every",
        "finish_reason",
        "kv",
        "on_progress",
        "output",
        "params",
        "prompt",
        "prompt_scores",
        "request_id",
        "sampler",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt: NDArray[np.int32],
        params: SamplingParams,
        *,
        max_model_len: int,
        every: int,
        on_progress: Callable[[], None],
        forced: Iterable[int] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.every = every
        self.on_progress = on_progress
        self.sampler = Sampler(params, tuple(forced))
        self.output: list[SampledToken] = []
        self.prompt_scores: list[PromptToken] = []
        self.kv: KVCache | None = None
        self.capacity = cache_capacity(len(prompt) + params.max_tokens, max_model_len)
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: EngineError | None = None
        self._ids = np.empty(len(prompt) + params.max_tokens, dtype=np.int32)
        self._ids[: len(prompt)] = prompt
        self._size = len(prompt)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The prompt's ids and the ids sampled so far."""
        return self._ids[: self._size]

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None or self.error is not None

    @property
    def reports(self) -> bool:
        """Whether the token that was sampled last is to be reported before the sequence ends.

        The first token and every ``every``-th after it are reported, and none if ``every`` is 0.
        """
        return self.every > 0 and (len(self.output) - 1) % self.every == 0

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of prompt tokens remain to be computed.

        The first token of a prompt has none.
        """
        return self.params.prompt_logprobs is not None and len(self.prompt_scores) < len(self.prompt) - 1

    def score_prompt(self, logits: Logits) -> None:
        """Add the log-probability of the next prompt token, which ``logits`` predict."""
        token_id = int(self.prompt[len(self.prompt_scores) + 1])
        self.prompt_scores.append(score(logits, token_id, self.params.prompt_logprobs or 0))

    def accept(self, token: SampledToken, eos_token_ids: frozenset[int]) -> None:
        """Add a sampled token, and finish the sequence if the token or the length ends it.

        This corresponds to vLLM's ``check_stop``. An end-of-sequence token is part of the output and sets no
        ``stop_reason``. One of the request's own stop tokens sets ``stop_reason`` to its id.
        """
        self.output.append(token)
        self._ids[self._size] = token.token_id
        self._size += 1
        if token.token_id in eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif token.token_id in self.params.stop_token_ids:
            self.finish_reason = "stop"
            self.stop_reason = token.token_id
        elif len(self.output) >= self.params.max_tokens:
            self.finish_reason = "length"

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Return which weights sampled which tokens, as contiguous spans over ``output``."""
        spans: list[VersionSpan] = []
        for index, token in enumerate(self.output):
            if spans and spans[-1].version == token.version:
                spans[-1] = VersionSpan(token.version, spans[-1].start, index + 1)
            else:
                spans.append(VersionSpan(token.version, index, index + 1))
        return tuple(spans)


def cache_capacity(tokens: int, max_model_len: int) -> int:
    """Return the capacity of the cache to open for a sequence of at most ``tokens`` tokens.

    It is a power of two with room for as many tokens again. A conversation that grows over many turns then
    outgrows its cache, which has to be computed again, only a logarithmic number of times.
    """
    capacity = MIN_CAPACITY
    while capacity < 2 * tokens:
        capacity *= 2
    return max(min(capacity, max_model_len), tokens)
