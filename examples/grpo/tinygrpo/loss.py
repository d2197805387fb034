"""DAPO's loss on tokens, with a correction for tokens that older weights sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossSettings:
    """How far one update may go. The clip range is DAPO's (Yu et al. 2025)."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    truncation: float = 2.0
    """The largest importance weight of an old token (truncated importance sampling)."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """The sums over the tokens of a batch: the loss (with a gradient), and how many tokens were clipped."""

    loss: Tensor
    clipped: int


def importance(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """Return the ratio of probabilities, the weights before the update over those that sampled, per token.

    It is 1, up to rounding, for tokens that the weights before the update sampled themselves.
    """
    return torch.exp(proximal - behaviour)


def dapo_loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, settings: LossSettings
) -> LossSums:
    """Return the sum of the tokens' losses. The caller divides by the number of tokens of the whole batch.

    The ratio of PPO is taken to the proximal policy, which is the weights at the start of the update, and the
    clip range bounds it there. A weight corrects for the policy that really sampled: `importance`, truncated.
    This is the decoupled objective of Hilton et al. 2022, as AReaL uses it (Fu et al. 2025). Where the
    proximal policy did the sampling, the weight is 1 and the loss is DAPO's.

    Args:
        logprobs: The log-probabilities under the weights that are being changed, in nats, with a gradient.
        proximal: The same under the weights at the start of the update.
        behaviour: The recorded ones, under the weights that sampled.
        advantages: One for each token. All tensors are flat and of one length.
        settings: The clip range and the largest weight.
    """
    ratio = torch.exp(logprobs - proximal)
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    weight = importance(proximal, behaviour).clamp(max=settings.truncation)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    clipped = int((bounded * advantages < ratio * advantages).sum())
    return LossSums(-(weight * gain).sum(), clipped)
