"""Groups become rows of tokens with advantages, and rows become padded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from rollyard import Group
from torch import Tensor

from tinygrpo.versions import PolicyVersions

_STD_FLOOR: Final = 1e-6
"""What is added to a group's deviation, so that none divides by 0."""


@dataclass(frozen=True, slots=True)
class Row:
    """One segment of a rollout. The arrays are parallel and hold the prompt and the response together."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """True on the tokens that the policy sampled."""
    behaviour: NDArray[np.float32]
    """The recorded log-probabilities in nats, 0 where the mask is false."""
    updates: NDArray[np.int64]
    """The update that sampled each token, -1 where the mask is false."""
    advantage: float


def advantages(rewards: Sequence[float]) -> NDArray[np.float32]:
    """Return GRPO's advantages of a group: the rewards less their mean, over their standard deviation.

    The deviation is that of the whole population (GRPO: Shao et al. 2024, DeepSeekMath).
    """
    values = np.asarray(rewards, dtype=np.float32)
    result: NDArray[np.float32] = (values - values.mean()) / (values.std() + _STD_FLOOR)
    return result


def rows_of(group: Group, versions: PolicyVersions) -> list[Row]:
    """Return a row for each segment of a group with sampled tokens. A rollout's rows share its advantage."""
    rewarded = [one for one in group.trajectories if one.reward is not None]
    rows: list[Row] = []
    for trajectory, advantage in zip(
        rewarded, advantages([one.reward or 0.0 for one in rewarded]), strict=True
    ):
        for segment in trajectory.segments:
            if not any(segment.loss_mask):
                continue
            before = len(segment.prompt_ids)
            mask = np.concatenate([np.zeros(before, bool), np.asarray(segment.loss_mask, dtype=bool)])
            updates = [
                versions.update(label) if one else -1
                for label, one in zip(segment.policy_versions, segment.loss_mask, strict=True)
            ]
            rows.append(
                Row(
                    ids=np.asarray([*segment.prompt_ids, *segment.response_ids], dtype=np.int64),
                    mask=mask,
                    behaviour=np.concatenate(
                        [np.zeros(before, np.float32), np.asarray(segment.logprobs, dtype=np.float32)]
                    ),
                    updates=np.concatenate([np.full(before, -1), np.asarray(updates, dtype=np.int64)]),
                    advantage=float(advantage),
                )
            )
    return rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows: `ids` [rows, length] int64 and `mask` [rows, length] bool, padded at the right.

    The other tensors are flat, one entry for each true place of the mask in row-major order.
    """

    ids: Tensor
    mask: Tensor
    behaviour: Tensor
    """float32, the recorded log-probabilities."""
    advantages: Tensor
    """float32, each token has its rollout's."""
    updates: Tensor
    """int64, the update that sampled the token."""


def padded(rows: Sequence[Row]) -> Batch:
    """Return rows as one batch. Padding stands behind each row, where a causal model does not see it."""
    width = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), bool)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = row.ids
        mask[place, : len(row.ids)] = row.mask
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(mask),
        torch.from_numpy(np.concatenate([row.behaviour[row.mask] for row in rows])),
        torch.from_numpy(
            np.concatenate([np.full(int(row.mask.sum()), row.advantage, np.float32) for row in rows])
        ),
        torch.from_numpy(np.concatenate([row.updates[row.mask] for row in rows])),
    )


def microbatches(rows: Sequence[Row], tokens: int) -> Iterator[list[int]]:
    """Yield the places of rows, of like length together, with at most `tokens` tokens, padding included.

    A row that is longer comes alone.
    """
    chosen: list[int] = []
    for place in sorted(range(len(rows)), key=lambda one: len(rows[one].ids)):
        if chosen and (len(chosen) + 1) * len(rows[place].ids) > tokens:
            yield chosen
            chosen = []
        chosen.append(place)
    if chosen:
        yield chosen
