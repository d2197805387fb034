"""The sampling of one token from logits, with the log-probability of the sampled token.

Log-probabilities are vLLM's ``processed_logprobs``: the log-softmax after temperature, top-k and top-p, over
the tokens that these leave. The other tokens have none, and are not reported as alternatives (vLLM reports
them with -9999). Greedy requests (temperature below 1e-5) have no processing. Their log-probabilities are the
log-softmax of the raw logits, as in ``vllm/v1/sample/sampler.py`` (0.32). The log-probabilities of prompt
tokens come from the raw logits in every mode, as in vLLM.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollyard_engine.errors import EngineError

Logits: TypeAlias = NDArray[np.float32]

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this value sample greedily. It equals vLLM's ``_SAMPLING_EPS``."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters that a sequence is sampled with.

    ``top_k`` 0 and ``top_p`` 1.0 disable the truncation. ``logprobs`` is the number of most likely
    alternatives to report in addition to the sampled token, or ``None`` to report no log-probabilities.
    ``prompt_logprobs`` is the same for the prompt's tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt, as predicted by the tokens before it.

    ``rank`` counts from 1 (the most likely token). ``top`` holds the requested alternatives as ``(token id,
    logprob)``, the most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken(PromptToken):
    """One sampled token. ``version`` is the label of the weights whose logits chose the token."""

    version: str


class Sampler:
    """The random stream of one sequence.

    Each token takes one uniform draw from the sequence's own stream. A seed therefore gives the same tokens
    whether the sequence runs alone or beside others. Without a seed, the stream starts from the operating
    system's entropy.

    Args:
        params: The parameters.
        forced: The ids that the first tokens are to have, whatever is drawn. Truncation does not cut off
            such a token, so it has a log-probability in any case.
    """

    def __init__(self, params: SamplingParams, forced: Sequence[int] = ()) -> None:
        self._params = params
        self._forced = deque(forced)
        seed = None if params.seed is None else params.seed % 2**64
        self._random = np.random.Generator(np.random.PCG64(seed))

    def sample(self, logits: Logits, version: str) -> SampledToken:
        """Return a token sampled from ``logits`` (shape ``[vocabulary]``). It is computed in float64.

        Raises:
            EngineError: The logits are not finite numbers.
        """
        params = self._params
        forced = self._forced.popleft() if self._forced else None
        scores = _scores(logits)
        if params.temperature < GREEDY_BELOW:
            scores -= scores.max()
            chosen = int(scores.argmax())
            norm = math.log(float(np.exp(scores).sum()))
        else:
            scores /= params.temperature
            kept = None if forced is None else scores[forced]
            _truncate(scores, params.top_k, params.top_p)
            if forced is not None:
                scores[forced] = kept
            scores -= scores.max()
            cumulative = np.exp(scores).cumsum()
            total = float(cumulative[-1])
            # Neither side finds a token of zero mass: "right" skips those before the point, and the first
            # token with the whole mass is the last that has any. The draw is below 1, so the second only
            # guards against rounding.
            point = self._random.random() * total
            chosen = int(np.searchsorted(cumulative, point, side="right"))
            chosen = min(chosen, int(np.searchsorted(cumulative, total)))
            norm = math.log(total)
        if forced is not None:
            chosen = forced
        score = scores[chosen]
        rank = int(np.count_nonzero(scores >= score))
        return SampledToken(
            token_id=chosen,
            logprob=float(score) - norm,
            rank=rank,
            top=_top(scores, norm, params.logprobs or 0),
            version=version,
        )


def score(logits: Logits, token_id: int, alternatives: int) -> PromptToken:
    """Return how likely the raw ``logits`` (shape ``[vocabulary]``) make ``token_id``.

    It is computed in float64.

    Raises:
        EngineError: The logits are not finite numbers.
    """
    scores = _scores(logits)
    scores -= scores.max()
    norm = math.log(float(np.exp(scores).sum()))
    own = scores[token_id]
    return PromptToken(
        token_id=token_id,
        logprob=float(own) - norm,
        rank=int(np.count_nonzero(scores >= own)),
        top=_top(scores, norm, alternatives),
    )


def _scores(logits: Logits) -> NDArray[np.float64]:
    """Return the logits in float64.

    Raises:
        EngineError: The logits are not finite numbers.
    """
    scores = logits.astype(np.float64)
    if not math.isfinite(float(scores.sum())):
        raise EngineError("the model's logits are not finite numbers", reason="GenerationFailed")
    return scores


def _truncate(scores: NDArray[np.float64], top_k: int, top_p: float) -> None:
    """Set the scores that top-k, and then top-p, cut off to minus infinity, in place.

    Tokens that tie with the k-th token are kept.
    """
    size = len(scores)
    if 0 < top_k < size:
        kth = np.partition(scores, size - top_k)[size - top_k]
        scores[scores < kth] = -np.inf
    if top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        mass = np.exp(scores[order] - scores[order[0]])
        cumulative = mass.cumsum()
        # A token is kept while the mass of the likelier ones is below top_p. The first token is always kept.
        before = cumulative - mass
        cut = before >= top_p * cumulative[-1]
        cut[0] = False
        scores[order[cut]] = -np.inf


def _top(scores: NDArray[np.float64], norm: float, count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` most likely tokens and their log-probabilities, the most likely first.

    There are fewer where fewer tokens can be sampled.
    """
    if count <= 0:
        return ()
    count = min(count, len(scores))
    candidates = np.argpartition(-scores, count - 1)[:count]
    ordered = candidates[np.argsort(-scores[candidates], kind="stable")]
    return tuple((int(index), float(scores[index]) - norm) for index in ordered if scores[index] > -np.inf)
