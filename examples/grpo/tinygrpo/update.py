"""One update of the weights: from the rows of a step to an optimiser that has taken its steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from tinygrpo.batch import Row, microbatches, padded
from tinygrpo.errors import PolicyMismatch
from tinygrpo.loss import LossSettings, dapo_loss, importance
from tinygrpo.policy import proximal_logprobs, sampled_logprobs


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How the weights are changed by one step's groups."""

    learning_rate: float = 3e-4
    minibatches: int = 4
    """The optimiser's steps; each sees a part of the groups."""
    gradient_norm: float = 1.0
    """Longer gradients are scaled down to this norm."""
    microbatch_tokens: int = 8192
    """The tokens that are computed at once, padding included. It bounds memory and changes no result."""
    ratio_tolerance: float = 1e-3
    """By how much the importance ratio of a token of the newest weights may differ from 1. The embedded
    engine and torch were seen to differ by less than 1e-4."""
    loss: LossSettings = field(default_factory=LossSettings)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update was like. Means are over sampled tokens."""

    loss: float
    gradient_norm: float
    """The mean over the optimiser's steps, before they were scaled down."""
    clipped: float
    """The share of tokens whose gain the clip range bounded."""
    tokens: int
    surprise: float
    """The mean negative log-probability of the sampled tokens, an estimate of the entropy."""
    importance: float
    """The mean importance ratio over all tokens."""
    fresh_ratio_error: float
    """The largest difference from 1 among tokens that the newest weights sampled."""
    old_tokens: float
    """The share of tokens that older weights sampled."""


def make_optimizer(model: PreTrainedModel, learning_rate: float) -> torch.optim.Optimizer:
    """Return the optimiser: Adam without weight decay."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def update_policy(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Row]],
    newest: int,
    shuffle: random.Random,
    settings: UpdateSettings,
) -> UpdateResult:
    """Train on the groups of one step, each of them once.

    Args:
        model: The policy, whose weights are those of the update `newest`.
        optimizer: Its optimiser.
        groups: The rows of each group.
        newest: The number of updates that the weights have had.
        shuffle: It decides which groups share a minibatch.
        settings: The sizes of steps.

    Raises:
        PolicyMismatch: Tokens that claim to be sampled by the newest weights have other log-probabilities.
    """
    order = list(range(len(groups)))
    shuffle.shuffle(order)
    rows = [row for place in order for row in groups[place]]
    proximal: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for place, logprobs in proximal_logprobs(model, rows, settings.microbatch_tokens):
        proximal[place] = logprobs
    everything = torch.cat(proximal)
    behaviour = torch.cat([torch.from_numpy(row.behaviour[row.mask]) for row in rows])
    fresh = torch.cat([torch.from_numpy(row.updates[row.mask]) for row in rows]) == newest
    ratio = importance(everything, behaviour)
    error = float((ratio[fresh] - 1).abs().max()) if bool(fresh.any()) else 0.0
    if not error <= settings.ratio_tolerance:
        raise PolicyMismatch(
            f"tokens of the newest weights have an importance ratio that differs from 1 by {error:.2g}; "
            f"{settings.ratio_tolerance:g} is allowed. The servers have other weights than the trainer, or "
            "they sample at another temperature than 1, or with top-k or top-p"
        )
    bounds = [round(len(order) * part / settings.minibatches) for part in range(settings.minibatches + 1)]
    starts = [0]
    for place in order:
        starts.append(starts[-1] + len(groups[place]))
    loss, norms, clipped = 0.0, [], 0
    for first, last in itertools.pairwise(bounds):
        places = range(starts[first], starts[last])
        if not places:
            continue
        tokens = sum(int(rows[place].mask.sum()) for place in places)
        optimizer.zero_grad(set_to_none=True)
        for chosen in microbatches([rows[place] for place in places], settings.microbatch_tokens):
            batch = padded([rows[places[one]] for one in chosen])
            sums = dapo_loss(
                sampled_logprobs(model, batch),
                torch.cat([proximal[places[one]] for one in chosen]),
                batch.behaviour,
                batch.advantages,
                settings.loss,
            )
            (sums.loss / tokens).backward()
            loss += float(sums.loss.detach())
            clipped += sums.clipped
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm)))
        optimizer.step()
    return UpdateResult(
        loss=loss / len(everything),
        gradient_norm=sum(norms) / len(norms),
        clipped=clipped / len(everything),
        tokens=len(everything),
        surprise=-float(everything.mean()),
        importance=float(ratio.mean()),
        fresh_ratio_error=error,
        old_tokens=1 - float(fresh.float().mean()),
    )
