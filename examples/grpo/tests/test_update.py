"""An update of the shipped policy: what it raises, what it refuses, and what changes no result."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tinygrpo.batch import Row, padded
from tinygrpo.errors import PolicyMismatch
from tinygrpo.policy import load_policy, proximal_logprobs, sampled_logprobs
from tinygrpo.update import UpdateSettings, make_optimizer, update_policy

SETTINGS = UpdateSettings(learning_rate=1e-4, minibatches=2)


def logprob_sum(policy: PreTrainedModel, rows: list[Row], advantage: float) -> float:
    chosen = [row for row in rows if row.advantage == advantage]
    with torch.no_grad():
        return float(sampled_logprobs(policy, padded(chosen)).sum())


def test_good_rollouts_become_likelier_than_bad_ones(
    policy: PreTrainedModel, sampled_rows: list[list[Row]]
) -> None:
    rows = [row for group in sampled_rows for row in group]
    before = logprob_sum(policy, rows, 1.0) - logprob_sum(policy, rows, -1.0)
    result = update_policy(policy, make_optimizer(policy, 1e-4), sampled_rows, 3, random.Random(0), SETTINGS)
    assert logprob_sum(policy, rows, 1.0) - logprob_sum(policy, rows, -1.0) > before + 1
    assert result.tokens == sum(int(row.mask.sum()) for row in rows)
    assert (result.old_tokens, result.importance) == (0.0, pytest.approx(1.0, abs=1e-4))
    assert result.fresh_ratio_error < 1e-4


def test_tokens_that_the_weights_did_not_sample_are_refused(
    policy: PreTrainedModel, sampled_rows: list[list[Row]]
) -> None:
    row = sampled_rows[1][0]
    sampled_rows[1][0] = replace(row, behaviour=row.behaviour - 0.01 * row.mask)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with pytest.raises(PolicyMismatch, match="differs from 1"):
        update_policy(policy, make_optimizer(policy, 1e-4), sampled_rows, 3, random.Random(0), SETTINGS)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_old_tokens_may_have_another_ratio(policy: PreTrainedModel, sampled_rows: list[list[Row]]) -> None:
    row = sampled_rows[1][0]
    sampled_rows[1][0] = replace(
        row, behaviour=row.behaviour - 0.5 * row.mask, updates=row.updates - row.mask
    )
    result = update_policy(policy, make_optimizer(policy, 1e-4), sampled_rows, 3, random.Random(0), SETTINGS)
    share = row.mask.sum() / sum(one.mask.sum() for group in sampled_rows for one in group)
    assert result.old_tokens == pytest.approx(share, abs=1e-6)
    assert result.importance > 1.01


def test_log_probabilities_that_are_no_numbers_are_refused(
    policy: PreTrainedModel, sampled_rows: list[list[Row]]
) -> None:
    row = sampled_rows[0][0]
    sampled_rows[0][0] = replace(row, behaviour=row.behaviour * float("nan"))
    with pytest.raises(PolicyMismatch):
        update_policy(policy, make_optimizer(policy, 1e-4), sampled_rows, 3, random.Random(0), SETTINGS)


def test_the_size_of_microbatches_changes_no_result(
    policy: PreTrainedModel, sampled_rows: list[list[Row]], base: Path
) -> None:
    other = load_policy(base)
    for model, tokens in ((policy, 8192), (other, 50)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        update_policy(
            model, optimizer, sampled_rows, 3, random.Random(0), replace(SETTINGS, microbatch_tokens=tokens)
        )
    for name, value in policy.state_dict().items():
        assert torch.allclose(value, other.state_dict()[name], atol=1e-6), name


def test_padding_changes_no_log_probability(policy: PreTrainedModel, sampled_rows: list[list[Row]]) -> None:
    rows = [row for group in sampled_rows for row in group]
    for place, logprobs in proximal_logprobs(policy, rows, 8192):
        alone = rows[place].behaviour[rows[place].mask]
        assert torch.allclose(logprobs, torch.from_numpy(alone), atol=1e-5)
