"""Sampling one token from logits, with the log-probability of what was sampled.

Log-probabilities are vLLM's ``processed_logprobs``: log-softmax after temperature, top-k and top-p, over
the tokens that these leave. Greedy requests (temperature below 1e-5) have no processing: their
log-probabilities are the log-softmax of the raw logits, as in ``vllm/v1/sample/sampler.py`` (0.32).
Those of prompt tokens are of the raw logits in every mode, as vLLM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollyard_engine.errors import GenerationFailed

Logits: TypeAlias = NDArray[np.float32]

GREEDY_BELOW = 1e-5
"""Temperatures below this sample greedily; vLLM's ``_SAMPLING_EPS``."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample a sequence.

    ``top_k`` 0 and ``top_p`` 1.0 switch the truncation off. ``logprobs`` is the number of most likely
    alternatives to report beside the sampled token, or ``None`` to report no log-probabilities;
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
    """One token of a prompt as the tokens before it predict it; the fields are a ``SampledToken``'s."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token.

    ``rank`` counts from 1 (the most likely token); ``top`` holds the alternatives asked for as
    ``(token id, logprob)``, most likely first; ``version`` labels the weights whose logits chose it.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    version: str


class Sampler:
    """The random stream of one sequence.

    One uniform draw a token from a stream of its own, so that a seed gives the same tokens alone or beside
    other sequences. Without a seed the stream starts from the operating system's entropy.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        seed = None if params.seed is None else params.seed % 2**64
        self._random = np.random.Generator(np.random.PCG64(seed))

    def sample(self, logits: Logits, version: str) -> SampledToken:
        """Sample from ``logits`` (shape ``[vocabulary]``); computed in float64.

        Raises ``GenerationFailed`` if the logits are not finite numbers.
        """
        params = self._params
        scores = logits.astype(np.float64)
        if not math.isfinite(float(scores.sum())):
            raise GenerationFailed("the model's logits are not finite numbers")
        if params.temperature < GREEDY_BELOW:
            scores -= scores.max()
            chosen = int(scores.argmax())
            norm = math.log(float(np.exp(scores).sum()))
        else:
            scores /= params.temperature
            _truncate(scores, params.top_k, params.top_p)
            scores -= scores.max()
            cumulative = np.exp(scores).cumsum()
            total = float(cumulative[-1])
            # "right" skips tokens of zero mass; the draw is below 1, so the bound only guards rounding.
            point = self._random.random() * total
            chosen = int(np.searchsorted(cumulative, point, side="right"))
            if chosen >= len(scores):
                chosen = int(np.flatnonzero(scores > -np.inf)[-1])
            norm = math.log(total)
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
    """How likely the raw ``logits`` (shape ``[vocabulary]``) make ``token_id``; computed in float64.

    Raises ``GenerationFailed`` if the logits are not finite numbers.
    """
    scores = logits.astype(np.float64)
    if not math.isfinite(float(scores.sum())):
        raise GenerationFailed("the model's logits are not finite numbers")
    scores -= scores.max()
    norm = math.log(float(np.exp(scores).sum()))
    own = scores[token_id]
    return PromptToken(
        token_id=token_id,
        logprob=float(own) - norm,
        rank=int(np.count_nonzero(scores >= own)),
        top=_top(scores, norm, alternatives),
    )


def _truncate(scores: NDArray[np.float64], top_k: int, top_p: float) -> None:
    """Set what top-k, then top-p, cut off to minus infinity, in place; ties with the k-th token stay."""
    size = len(scores)
    if 0 < top_k < size:
        kth = np.partition(scores, size - top_k)[size - top_k]
        scores[scores < kth] = -np.inf
    if top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        mass = np.exp(scores[order] - scores[order[0]])
        cumulative = mass.cumsum()
        # A token stays while the mass of the likelier ones is below top_p; the first one always stays.
        before = cumulative - mass
        cut = before >= top_p * cumulative[-1]
        cut[0] = False
        scores[order[cut]] = -np.inf


def _top(scores: NDArray[np.float64], norm: float, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most likely tokens and their log-probabilities, most likely first."""
    if count <= 0:
        return ()
    count = min(count, len(scores))
    candidates = np.argpartition(-scores, count - 1)[:count]
    ordered = candidates[np.argsort(-scores[candidates], kind="stable")]
    return tuple((int(index), float(scores[index]) - norm) for index in ordered)
