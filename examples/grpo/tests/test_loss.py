"""The loss: DAPO's gradient, its clip range, and the weight of old tokens."""

from __future__ import annotations

import math

import pytest
import torch

from tinygrpo.loss import LossSettings, dapo_loss, importance

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, truncation=2.0)


def gradient(logprob: float, proximal: float, behaviour: float, advantage: float) -> float:
    """Return the derivative of the loss of one token after its log-probability."""
    logprobs = torch.tensor([logprob], requires_grad=True)
    others = (torch.tensor([value]) for value in (proximal, behaviour, advantage))
    dapo_loss(logprobs, *others, SETTINGS).loss.backward()
    assert logprobs.grad is not None
    return float(logprobs.grad)


def test_a_fresh_token_has_the_gradient_of_reinforce() -> None:
    assert gradient(-1.0, -1.0, -1.0, 1.5) == pytest.approx(-1.5)
    assert gradient(-1.0, -1.0, -1.0, -0.5) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (0.7, 1.0, True),
        (0.81, -1.0, True),
        (0.79, -1.0, False),
        (1.5, -1.0, True),
    ],
)
def test_the_clip_range_stops_what_has_gone_far_enough(ratio: float, advantage: float, moves: bool) -> None:
    found = gradient(math.log(ratio) - 1, -1.0, -1.0, advantage)
    assert found == pytest.approx(-advantage * ratio if moves else 0.0)


@pytest.mark.parametrize(
    ("behaviour", "weight"), [(-1.0, 1.0), (-1.0 - math.log(1.5), 1.5), (-3.0, 2.0), (0.0, math.exp(-1))]
)
def test_an_old_token_is_weighed_by_the_truncated_ratio(behaviour: float, weight: float) -> None:
    assert gradient(-1.0, -1.0, behaviour, 1.0) == pytest.approx(-weight)


def test_clipped_tokens_are_counted() -> None:
    proximal = torch.zeros(4)
    logprobs = torch.log(torch.tensor([1.5, 1.1, 0.5, 0.5]))
    sums = dapo_loss(logprobs, proximal, proximal, torch.tensor([1.0, 1.0, -1.0, 1.0]), SETTINGS)
    assert sums.clipped == 2


def test_importance_is_one_for_the_policy_that_sampled() -> None:
    logprobs = torch.tensor([-0.1, -5.0])
    assert importance(logprobs, logprobs).tolist() == [1.0, 1.0]
