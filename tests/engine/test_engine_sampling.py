"""Sampling against its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rollyard_engine.errors import EngineError
from rollyard_engine.generation.sampling import Sampler, SamplingParams

SIZE = 50
LOGITS = np.random.default_rng(7).normal(0, 3, SIZE).astype(np.float32)


def processed(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Return the distribution by definition: a sort and loops that share nothing with the code under test."""
    scores = [float(x) / params.temperature for x in logits]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept = order[: params.top_k] if params.top_k else order
    weights = {i: np.exp(scores[i] - scores[order[0]]) for i in kept}
    total = sum(weights.values())
    nucleus: list[int] = []
    mass = 0.0
    for index in kept:
        if mass >= params.top_p and nucleus:
            break
        nucleus.append(index)
        mass += weights[index] / total
    left = sum(weights[i] for i in nucleus)
    return np.array([weights[i] / left if i in nucleus else 0.0 for i in range(len(scores))])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, temperature=1.7, top_p=0.8),
        SamplingParams(1, top_k=5),
        SamplingParams(1, temperature=0.9, top_k=12, top_p=0.7),
        SamplingParams(1, top_p=0.01),
        SamplingParams(1, top_k=1),
    ],
)
def test_frequencies_and_logprobs_follow_the_processed_distribution(params: SamplingParams) -> None:
    expected = processed(LOGITS, params)
    sampler = Sampler(SamplingParams(1, params.temperature, params.top_p, params.top_k, seed=3))
    draws = 20_000
    counts = np.zeros(SIZE)
    logprobs: dict[int, float] = {}
    for _ in range(draws):
        token = sampler.sample(LOGITS, "v")
        counts[token.token_id] += 1
        assert logprobs.setdefault(token.token_id, token.logprob) == token.logprob
    for index, logprob in logprobs.items():
        assert np.exp(logprob) == pytest.approx(expected[index], rel=1e-9)
    # The bound is five standard deviations of a binomial count, for each of the tokens.
    bound = 5 * np.sqrt(draws * expected * (1 - expected)) + 1e-9
    assert (np.abs(counts - draws * expected) <= bound).all()


def test_greedy_takes_the_best_and_reports_the_unprocessed_logprob() -> None:
    token = Sampler(SamplingParams(1, temperature=0.0, top_p=0.1, top_k=3, logprobs=2)).sample(LOGITS, "v")
    reference = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert token.token_id == int(LOGITS.argmax())
    assert token.rank == 1
    assert token.logprob == pytest.approx(reference.max(), abs=1e-12)
    best = np.argsort(-LOGITS)[:2]
    assert [index for index, _ in token.top] == best.tolist()
    assert [value for _, value in token.top] == pytest.approx(reference[best].tolist(), abs=1e-12)


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_seed_repeats(seed: int) -> None:
    first, second = (Sampler(SamplingParams(1, seed=seed)) for _ in range(2))
    assert [first.sample(LOGITS, "v") for _ in range(20)] == [second.sample(LOGITS, "v") for _ in range(20)]


def test_seeds_differ_and_no_seed_differs_each_time() -> None:
    streams = [
        tuple(sampler.sample(LOGITS, "v").token_id for _ in range(30))
        for sampler in (
            *(Sampler(SamplingParams(1, seed=s)) for s in range(5)),
            *(Sampler(SamplingParams(1)),) * 2,
        )
    ]
    assert len(set(streams)) == len(streams)


def test_rank_counts_likelier_tokens() -> None:
    sampler = Sampler(SamplingParams(1, seed=0))
    for _ in range(200):
        token = sampler.sample(LOGITS, "v")
        assert token.rank == 1 + int((LOGITS[token.token_id] < LOGITS).sum())


class Draws:
    """A random stream whose draws are the ends of the unit interval."""

    def __init__(self) -> None:
        self._next = itertools.cycle((0.0, 1.0 - 2.0**-53))

    def random(self) -> float:
        return next(self._next)


@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 1e-300])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("spread", [1e-3, 3.0, 1e3, 1e37])
def test_a_sampled_token_always_has_a_probability(
    temperature: float, top_p: float, top_k: int, spread: float
) -> None:
    # The token at the end is never likely, and those at the beginning have hardly any or no mass.
    logits = (np.linspace(-1, 0, SIZE) * spread + LOGITS).astype(np.float32)
    logits[-1] = -spread
    sampler = Sampler(SamplingParams(1, temperature, top_p, top_k, logprobs=20))
    sampler._random = Draws()
    for _ in range(4):
        token = sampler.sample(logits, "v")
        assert -746 - np.log(SIZE) <= token.logprob <= 0.0
        assert np.isfinite([value for _, value in token.top]).all()
        assert token.token_id in dict(token.top) or len(token.top) == 20


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = LOGITS.copy()
    logits[4] = bad
    with pytest.raises(EngineError, match="not finite") as failed:
        Sampler(SamplingParams(1)).sample(logits, "v")
    assert failed.value.reason == "GenerationFailed"
