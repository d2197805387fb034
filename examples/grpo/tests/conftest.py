"""What the tests of the trainer share: the shipped policy, and groups as the control plane delivers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rollyard import Group, Segment, Trajectory
from transformers import PreTrainedModel

from tinygrpo.batch import Row, padded
from tinygrpo.policy import load_policy, sampled_logprobs

ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT / "examples" / "tiny-policy" / "hf"
ONNX = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
MakeGroup = Callable[..., Group]


@pytest.fixture
def base() -> Path:
    return BASE


@pytest.fixture
def onnx_folder() -> Path:
    return ONNX


@pytest.fixture
def policy() -> PreTrainedModel:
    torch.manual_seed(0)
    return load_policy(BASE)


@pytest.fixture
def group() -> MakeGroup:
    """Return a maker of groups, whose rollouts have three response tokens each."""

    def make(
        name: str = "g0",
        rewards: Sequence[float | None] = (0.0, 1.0),
        labels: Sequence[str] = ("run-0",),
        delivered: bool = True,
    ) -> Group:
        members = []
        for index, reward in enumerate(rewards):
            label = labels[index % len(labels)]
            segment = Segment(
                prompt_ids=[5, 6],
                response_ids=[7, 8, 9],
                loss_mask=[1, 0, 1],
                logprobs=[-0.5, 0.0, -0.25],
                policy_versions=[label, "", label],
            )
            members.append(
                Trajectory(
                    id=f"{name}-{index}", job="run", task_id=name, group_id=name, sample_index=index,
                    status="failed" if reward is None else "succeeded",
                    reason="SandboxLost" if reward is None else "", reward=reward, segments=[segment],
                )
            )  # fmt: skip
        informative = len({reward for reward in rewards if reward is not None}) > 1
        return Group(name, name, delivered, delivered and informative, "", members)

    return make


@pytest.fixture
def sampled_rows(policy: PreTrainedModel) -> list[list[Row]]:
    """Return four groups of two rows each, whose recorded log-probabilities are the policy's own."""
    draw = np.random.default_rng(0)
    groups = []
    for _ in range(4):
        rows = []
        for advantage in (1.0, -1.0):
            length = int(draw.integers(12, 40))
            mask = np.zeros(length, bool)
            mask[length // 2 :] = True
            rows.append(
                Row(
                    draw.integers(7, 1068, length), mask, np.zeros(length, np.float32),
                    np.where(mask, 3, -1).astype(np.int64), advantage,
                )
            )  # fmt: skip
        groups.append([recorded(policy, row) for row in rows])
    return groups


def recorded(policy: PreTrainedModel, row: Row) -> Row:
    """Return the row with the log-probabilities that the policy gives."""
    with torch.no_grad():
        logprobs = sampled_logprobs(policy, padded([row])).numpy()
    behaviour = np.zeros(len(row.ids), np.float32)
    behaviour[row.mask] = logprobs
    return Row(row.ids, row.mask, behaviour, row.updates, row.advantage)
