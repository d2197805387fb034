"""What every adapter begins with: which sequences are trained on, with which reward."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from rollyard.integrations.sequences import rewards, sequences, step_of, versions
from rollyard_crds.trajectory import Segment, Trajectory
from rollyard_testing.integrations.rollouts import PAD, Sampled, batches, sampled, segments, trained


def rollout(
    sample: int, reward: float | None, status: str = "succeeded", group: str = "g", **more: Any
) -> Trajectory:
    return Trajectory.model_validate(
        {"id": f"{group}.{sample}", "job": "job", "task_id": "task", "group_id": group,
         "sample_index": sample, "status": status, "reward": reward, **more}
    )  # fmt: skip


@given(batches())
def test_each_sampled_token_is_in_one_sequence(batch: list[Trajectory]) -> None:
    found: Sampled = Sampled()
    for row in sequences(batch):
        segment = row.segment
        found += trained(
            row.trajectory.id, segment.response_ids, row.loss_mask, segment.logprobs, len(segment.prompt_ids)
        )
    assert found == sampled(batch)


@given(batches())
def test_with_a_padding_token_each_rollout_has_a_row(batch: list[Trajectory]) -> None:
    rows = sequences(batch, pad_token_id=PAD)
    assert list(dict.fromkeys(row.trajectory.id for row in rows)) == [one.id for one in batch]
    assert sum(row.last for row in rows) == len(batch)
    for row in rows:
        assert row.segment.prompt_ids
        assert row.segment.response_ids
        if row.index == -1:
            assert (row.segment.response_ids, row.loss_mask) == ([PAD], [0])


@given(batches())
def test_what_has_no_reward_is_not_trained_on_and_does_not_move_the_baseline(batch: list[Trajectory]) -> None:
    filled = rewards(batch)
    for row in sequences(batch):
        if row.trajectory.reward is None:
            assert not any(row.loss_mask)
    for group in {one.group_id for one in batch}:
        scored = [one.reward for one in batch if one.group_id == group and one.reward is not None]
        given = [value for one, value in zip(batch, filled, strict=True) if one.group_id == group]
        if scored:
            assert sum(given) / len(given) == pytest.approx(sum(scored) / len(scored), abs=1e-9)


def test_a_failed_member_gets_the_mean_of_its_own_group() -> None:
    batch = [rollout(0, 1.0), rollout(1, 0.0), rollout(2, None, "failed"), rollout(0, 9.0, group="other")]
    assert rewards(batch) == [1.0, 0.0, 0.5, 9.0]
    assert rewards([rollout(0, None, "failed")]) == [0.0]
    # A group's name may come again in another job, or in a job of that name elsewhere.
    strangers = [rollout(3, 7.0, job="other"), rollout(4, 8.0, namespace="elsewhere")]
    assert rewards([*strangers, *batch]) == [7.0, 8.0, 1.0, 0.0, 0.5, 9.0]


def test_a_placeholder_has_the_prompt_of_its_own_group() -> None:
    def segment(prompt: int, sampled: int) -> Segment:
        return Segment(
            prompt_ids=[prompt], response_ids=[4], loss_mask=[sampled], logprobs=[0.0],
            policy_versions=["0" if sampled else ""],
        )  # fmt: skip

    batch = [
        rollout(0, 9.0, job="other", segments=[segment(9, 1)]),
        rollout(0, None, "failed"),
        rollout(1, 1.0, segments=[segment(1, 0), segment(2, 1), segment(3, 0), segment(4, 1), segment(5, 0)]),
        rollout(2, 0.0, segments=[segment(6, 0)]),
        rollout(0, 3.0, group="alone"),
    ]
    rows = sequences(batch, pad_token_id=PAD)
    assert [(row.segment.prompt_ids, row.index, row.last, row.trained, row.reward) for row in rows] == [
        ([9], 0, True, True, 9.0),
        ([1], -1, True, False, 0.5),
        ([2], 1, False, True, 1.0),
        ([4], 3, True, True, 1.0),
        ([1], -1, True, False, 0.0),
        ([PAD], -1, True, False, 3.0),
    ]
    assert all(row.segment.response_ids == [PAD] for row in rows if row.index < 0)
    assert [row.index for row in sequences(batch)] == [0, 1, 3]


def test_a_cancelled_rollout_with_a_reward_is_not_scored() -> None:
    assert rewards([rollout(0, 1.0, "cancelled"), rollout(1, 0.0)]) == [0.0, 0.0]


@given(segments())
def test_spans_are_the_sampled_tokens(segment: Segment) -> None:
    one = Trajectory(
        id="a", job="j", task_id="t", group_id="g", sample_index=0, reward=1.0, segments=[segment]
    )
    for row in sequences([one]):
        places = [place for begin, end in row.spans for place in range(begin, end)]
        assert places == [place for place, mask in enumerate(segment.loss_mask) if mask]
        assert all(end < begin for (_, end), (begin, _) in zip(row.spans, row.spans[1:], strict=False))


def test_versions_are_named_once_and_numbered_by_their_end() -> None:
    segment = Segment(
        prompt_ids=[1], response_ids=[1, 2, 3], loss_mask=[1, 0, 1], logprobs=[-1.0, 0.0, -1.0],
        policy_versions=["step-7", "", "step-8"],
    )  # fmt: skip
    other = segment.model_copy(update={"policy_versions": ["step-6", "", "step-8"]})
    assert versions(segment, segment) == ["step-7", "step-8"]
    assert versions(segment, other) == ["step-7", "step-8", "step-6"]
    texts = ("step-120", "0", "default", "v2-step-13", "7b-chat", "")
    assert [step_of(text) for text in texts] == [120, 0, None, 13, None, None]
