"""Groups become rows, and rows become padded tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from rollyard import Group

from tinygrpo.batch import Row, advantages, microbatches, padded, rows_of
from tinygrpo.versions import PolicyVersions

MakeGroup = Callable[..., Group]
RUN = PolicyVersions("run")


def test_advantages_have_mean_zero_and_deviation_one() -> None:
    found = advantages([1.0, 0.0, 0.0, 0.0])
    assert found.mean() == pytest.approx(0.0, abs=1e-6)
    assert found.std() == pytest.approx(1.0, abs=1e-5)
    assert found.tolist() == pytest.approx([3**0.5] + [-(3**-0.5)] * 3, abs=1e-5)


def test_a_row_holds_prompt_and_response(group: MakeGroup) -> None:
    first, second = rows_of(group(labels=["run-4"]), RUN)
    assert first.ids.tolist() == [5, 6, 7, 8, 9]
    assert first.mask.tolist() == [False, False, True, False, True]
    assert first.behaviour.tolist() == [0.0, 0.0, -0.5, 0.0, -0.25]
    assert first.updates.tolist() == [-1, -1, 4, -1, 4]
    assert (first.advantage, second.advantage) == (
        pytest.approx(-1.0, abs=1e-5),
        pytest.approx(1.0, abs=1e-5),
    )


def test_a_rollout_without_a_reward_is_left_out(group: MakeGroup) -> None:
    rows = rows_of(group(rewards=(0.0, None, 1.0)), RUN)
    assert [round(row.advantage) for row in rows] == [-1, 1]


def row(length: int, first: int, advantage: float = 1.0) -> Row:
    mask = np.arange(length) >= first
    return Row(
        np.arange(length),
        mask,
        np.where(mask, -1.0, 0.0).astype(np.float32),
        np.where(mask, 2, -1),
        advantage,
    )


def test_padding_is_masked_out_and_flat_tensors_follow_the_mask() -> None:
    batch = padded([row(3, 1, 1.0), row(5, 3, -1.0)])
    assert batch.ids.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert batch.mask.tolist() == [[False, True, True, False, False], [False, False, False, True, True]]
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0, -1.0]
    assert batch.updates.tolist() == [2, 2, 2, 2]
    assert batch.behaviour.tolist() == [-1.0] * 4


def test_microbatches_are_bounded_and_hold_every_row_once() -> None:
    rows = [row(length, 1) for length in (9, 3, 40, 5, 7, 2)]
    found = list(microbatches(rows, 20))
    assert sorted(place for chosen in found for place in chosen) == list(range(6))
    for chosen in found:
        width = max(len(rows[place].ids) for place in chosen)
        assert len(chosen) == 1 or width * len(chosen) <= 20
    assert [2] in found  # The row that is too long comes alone.
