"""Every adapter hands on each sampled token once, with its mask and its log-probability."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollyard.integrations import arrow, nemo, prime_rl, skyrl, slime, trl, verl
from rollyard.integrations.errors import TrainerMismatch
from rollyard.integrations.sequences import is_scored, sequences
from rollyard_crds.trajectory import SamplingRecord, Segment, Trajectory, Turn
from rollyard_testing.crds.conversations import TRAINED, harness_record
from rollyard_testing.integrations.rollouts import PAD, Sampled, batches, sampled, trained


def of_trl(batch: list[Trajectory]) -> Sampled:
    output = trl.rollout_output(batch, pad_token_id=PAD)
    assert {len(values) for values in output.values()} == {len(batch)}
    found: Sampled = Sampled()
    for place, one in enumerate(batch):
        assert output["rollout_id"][place] == one.id
        assert output["completion_ids"][place]
        found += trained(
            one.id, output["completion_ids"][place], output["env_mask"][place], output["logprobs"][place],
            len(output["prompt_ids"][place]),
        )  # fmt: skip
    return found


def of_verl(batch: list[Trajectory]) -> Sampled:
    found: Sampled = Sampled()
    for row in verl.output_fields(batch, pad_token_id=PAD):
        found += trained(
            row["extra_fields"]["rollout_id"], row["response_ids"], row["response_mask"],
            row["response_logprobs"], len(row["prompt_ids"]),
        )  # fmt: skip
    return found


def of_slime(batch: list[Trajectory]) -> Sampled:
    found: Sampled = Sampled()
    for group in slime.sample_fields(batch, pad_token_id=PAD):
        for row in group:
            length = row["response_length"]
            prompt = len(row["tokens"]) - length
            found += trained(
                row["session_id"], row["tokens"][prompt:], row["loss_mask"], row["rollout_log_probs"], prompt
            )
    return found


def of_prime_rl(batch: list[Trajectory]) -> Sampled:
    found: Sampled = Sampled()
    for row in prime_rl.sample_fields(batch, env_name="shell"):
        assert len(row["temperatures"]) == len(row["token_ids"])
        found += trained(row["sample_id"].rpartition("/")[0], row["token_ids"], row["mask"], row["logprobs"])
    return found


def of_skyrl(batch: list[Trajectory]) -> Sampled:
    names = [one.id for one in batch]
    output = skyrl.generator_output(batch, pad_token_id=PAD, step_wise=True, trajectory_ids=names)
    found: Sampled = Sampled()
    for place, name in enumerate(output["trajectory_ids"]):
        found += trained(
            name, output["response_ids"][place], output["loss_masks"][place],
            output["rollout_logprobs"][place], len(output["prompt_token_ids"][place]),
        )  # fmt: skip
    return found


def of_nemo_gym(batch: list[Trajectory]) -> Sampled:
    found: Sampled = Sampled()
    for one in batch:
        for answer in nemo.run_answers(one):
            seen: list[int] = []
            for item in answer["response"]["output"]:
                # NeMo-RL joins the items so, and refuses one that does not begin with what it has seen.
                prompt, ids = item["prompt_token_ids"], item["generation_token_ids"]
                assert prompt[: len(seen)] == seen
                found += trained(one.id, ids, [1] * len(ids), item["generation_log_probs"], len(prompt))
                seen = prompt + ids
    return found


EXAMPLES = 50
ONE_ROW_EACH = (of_trl,)
ANY_ROWS = (of_verl, of_slime, of_prime_rl, of_skyrl, of_nemo_gym)


@pytest.mark.parametrize("read", ANY_ROWS)
@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_each_sampled_token_is_trained_on_once(
    read: Callable[[list[Trajectory]], Sampled], batch: list[Trajectory]
) -> None:
    assert read(batch) == sampled(batch)


@pytest.mark.parametrize("read", ONE_ROW_EACH)
@settings(max_examples=EXAMPLES)
@given(batch=batches(most_segments=1))
def test_the_same_where_a_rollout_has_one_row(
    read: Callable[[list[Trajectory]], Sampled], batch: list[Trajectory]
) -> None:
    assert read(batch) == sampled(batch)


@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_trl_counts_what_it_leaves_out_or_refuses(batch: list[Trajectory]) -> None:
    rows = sequences(batch)
    if any(not row.last for row in rows):
        with pytest.raises(TrainerMismatch, match=r"has \d segments"):
            trl.rollout_output(batch, pad_token_id=PAD)
    for several in ("longest", "last"):
        output = trl.rollout_output(batch, pad_token_id=PAD, several=several)  # type: ignore[arg-type]
        for place, one in enumerate(batch):
            kept = sum(output["env_mask"][place]) if is_scored(one) else None
            if kept is not None:
                assert kept + output["tokens_left_out"][place] == one.sampled_tokens
            if several == "longest" and kept is not None:
                assert kept == max((sum(segment.loss_mask) for segment in one.segments), default=0)


@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_trl_gets_no_reward_where_there_is_none(batch: list[Trajectory]) -> None:
    output = trl.rollout_output(batch, pad_token_id=PAD, several="last")
    assert output["reward"] == [one.reward for one in batch]
    assert trl.rollyard_reward([], [], reward=output["reward"]) == output["reward"]
    for place, one in enumerate(batch):
        if one.reward is None:
            assert not any(output["env_mask"][place])


@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_verl_knows_versions_and_rewards(batch: list[Trajectory]) -> None:
    rows = verl.output_fields(batch, pad_token_id=PAD)
    for row, source in zip(rows, sequences(batch, pad_token_id=PAD), strict=True):
        extra = row["extra_fields"]
        assert row["reward_score"] == source.reward
        assert len(row["response_mask"]) == len(row["response_ids"]) == len(row["response_logprobs"])
        steps = [int(version.rpartition("-")[2]) for version in extra["policy_versions"]]
        assert extra["min_global_steps"] == min(steps, default=None)
        assert extra["max_global_steps"] == max(steps, default=None)
        assert extra["reward_extra_info"] == source.trajectory.reward_components


@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_slime_keeps_the_rows_of_a_rollout_together(batch: list[Trajectory]) -> None:
    groups = slime.sample_fields(batch, pad_token_id=PAD, first_group=5, first_index=100)
    assert [group[0]["group_index"] for group in groups] == list(range(5, 5 + len(groups)))
    numbers = [row["rollout_id"] for group in groups for row in group]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(100, 100 + len(batch)))
    by_id = {one.id: one for one in batch}
    for group in groups:
        for row in group:
            one = by_id[row["session_id"]]
            assert (row["remove_sample"], row["status"] in ("failed", "aborted")) in (
                (not is_scored(one), not is_scored(one)),
                (True, False),  # It is scored, but the policy sampled nothing.
            )
            if row["status"] == "truncated":
                assert one.truncated
            assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == row["response_length"] > 0


@pytest.mark.parametrize("read", [*ONE_ROW_EACH, *ANY_ROWS])
def test_tokens_of_servers_that_name_no_version_are_trained_on(
    read: Callable[[list[Trajectory]], Sampled],
) -> None:
    """The loss mask decides, and not whether a token has a version."""
    segment = Segment(
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        loss_mask=[1, 0, 1],
        logprobs=[-1.0, 0.0, -0.5],
        policy_versions=["", "", ""],
    )
    turns = [Turn(segment=0, start=place, end=place + 1, finish_reason="stop") for place in (0, 2)]
    one = Trajectory(
        id="a", job="j", task_id="t", group_id="g", sample_index=0, reward=1.0, segments=[segment],
        turns=turns, sampling=SamplingRecord(temperature=0.5, top_p=1.0, max_tokens=8, seed=0),
    )  # fmt: skip
    assert read([one]) == sampled([one])
    assert len(sampled([one])) == 2


@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_prime_rl_gets_advantages_that_sum_to_nothing(batch: list[Trajectory]) -> None:
    rows = prime_rl.sample_fields(batch, env_name="shell")
    by_rollout = {row["sample_id"].rpartition("/")[0]: row for row in rows}
    for row in rows:
        assert row["advantage"] == by_rollout[row["sample_id"].rpartition("/")[0]]["advantage"]
        assert set(row["temperatures"]) == {0.5}
    for group in {one.group_id for one in batch}:
        members = [one for one in batch if one.group_id == group and is_scored(one)]
        if members and all(one.id in by_rollout for one in members):
            assert sum(by_rollout[one.id]["advantage"] for one in members) == pytest.approx(0, abs=1e-6)


def test_prime_rl_needs_the_temperature() -> None:
    segment = Segment(prompt_ids=[1], response_ids=[2], loss_mask=[1], logprobs=[-1.0], policy_versions=["0"])
    one = Trajectory(
        id="a", job="j", task_id="t", group_id="g", sample_index=0, reward=1.0, segments=[segment]
    )
    with pytest.raises(TrainerMismatch, match="temperature"):
        prime_rl.sample_fields([one], env_name="shell")


@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_nemo_gym_masks_what_was_not_measured(batch: list[Trajectory]) -> None:
    for one in batch:
        answers = nemo.run_answers(one, decode=lambda ids: " ".join(map(str, ids)))
        assert answers
        for answer in answers:
            assert isinstance(answer["reward"], float)
            assert [item["role"] for item in answer["responses_create_params"]["input"]] == ["system", "user"]
            if not is_scored(one):
                assert (answer["mask_sample"], answer["response"]["output"]) == (True, [])
            for item in answer["response"]["output"]:
                text = item["content"][0]["text"]
                assert text == " ".join(map(str, item["generation_token_ids"]))


@settings(max_examples=EXAMPLES)
@given(batch=batches())
def test_arrow_and_back_is_the_same_rollout(batch: list[Trajectory]) -> None:
    table = arrow.table(batch)
    assert [(field.name, str(field.type).replace("item: ", "")) for field in table.schema] == [
        (name, _arrow_name(kind)) for name, kind in arrow.COLUMNS
    ]
    assert list(arrow.read(table)) == batch


def _harness_rollouts(*changes: dict[str, Any]) -> list[Trajectory]:
    """Return a group of rollouts of a harness, with the rewards 0, 1, 2, …"""
    return [
        Trajectory.model_validate(
            harness_record(id=f"job.g.{sample}", sample_index=sample, group_id="g", **change)
            | {"reward": float(sample), "sampling": {"temperature": 0.5, "top_p": 1.0, "seed": 0}}
        )
        for sample, change in enumerate(changes)
    ]


@pytest.mark.parametrize("read", ANY_ROWS)
def test_untrained_conversations_of_a_harness_are_not_trained_on(
    read: Callable[[list[Trajectory]], Sampled],
) -> None:
    batch = _harness_rollouts({}, {})
    found = read(batch)
    assert found == sampled(batch)
    ids = sorted(token for (_, _, token, *_), n in found.items() for _ in range(n))
    assert ids == sorted([10, 11, 12, 13, 14, 20, 21, 22, 23, 50, 51, 52] * 2), (
        "no title, no call of the policy"
    )


def test_all_trained_conversations_of_a_harness_have_one_reward_which_counts_once() -> None:
    batch = _harness_rollouts({}, {}, {"segments": harness_record()["segments"]})
    rows = sequences(batch, pad_token_id=PAD)
    assert [(row.trajectory.sample_index, row.index, row.reward) for row in rows] == [
        (sample, segment, float(sample)) for sample in range(3) for segment in TRAINED
    ]
    for row in prime_rl.sample_fields(batch, env_name="shell"):
        assert row["advantage"] == row["reward"] - 1.0, "the mean is that of rollouts, and not of rows"
    (group,) = slime.sample_fields(batch, pad_token_id=PAD)
    assert [row["rollout_id"] for row in group] == [0] * 3 + [1] * 3 + [2] * 3
    output = skyrl.generator_output(batch, pad_token_id=PAD, step_wise=True, trajectory_ids=[0, 1, 2])
    assert output["rewards"] == [0.0] * 5 + [1.0] + [0.0, 0.0, 2.0], "SkyRL gives it to the rows before"
    assert output["rollout_metrics"]["rollyard/turns"] == 18.0
    for row in verl.output_fields(batch, pad_token_id=PAD):
        assert row["reward_score"] == float(row["extra_fields"]["rollout_id"][-1])
    answers = nemo.run_answers(batch[1])
    assert [(answer["reward"], answer["mask_sample"]) for answer in answers] == [(1.0, False)] * 3


def test_trl_keeps_one_segment_of_a_harness_of_its_own_conversation() -> None:
    batch = _harness_rollouts({})
    with pytest.raises(TrainerMismatch, match="has 3 segments"):
        trl.rollout_output(batch, pad_token_id=PAD)
    (last,) = trl.rollout_output(batch, pad_token_id=PAD, several="last")["completion_ids"]
    assert last == [50, 51, 52]
    # A sub-agent that began later does not replace it.
    turns = [{"segment": 0, "start": 0, "end": 3, "finish_reason": "stop"}]
    batch = _harness_rollouts({"turns": turns, "branches": [], "continues": None})
    output = trl.rollout_output(batch, pad_token_id=PAD, several="last")
    assert (output["completion_ids"], output["tokens_left_out"]) == ([[10, 11, 12, 9, 13, 14]], [7])


def test_arrow_keeps_all_of_a_harness_rollout() -> None:
    batch = _harness_rollouts({}, {})
    table = arrow.table(batch)
    assert list(arrow.read(table)) == batch
    masks = [any(mask) for mask in table["loss_mask"].to_pylist()]
    assert [place % 5 for place, trains in enumerate(masks) if trains] == TRAINED * 2


def _arrow_name(kind: str) -> str:
    return kind.replace("element: ", "").replace(
        "dictionary<int32, string>", "dictionary<values=string, indices=int32, ordered=0>"
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(batch=st.lists(batches(), max_size=2))
def test_parquet_and_back_is_the_same_rollout(batch: list[list[Trajectory]], tmp_path: Path) -> None:
    every = [one for part in batch for one in part]
    path = tmp_path / "rollouts.parquet"
    assert arrow.write_parquet(every, path) == sum(max(1, len(one.segments)) for one in every)
    assert list(arrow.read(path)) == every


def test_a_table_with_rows_missing_is_refused(tmp_path: Path) -> None:
    segment = Segment(prompt_ids=[1], response_ids=[2], loss_mask=[1], logprobs=[-1.0], policy_versions=["0"])
    one = Trajectory(
        id="a", job="j", task_id="t", group_id="g", sample_index=0, reward=1.0, segments=[segment, segment]
    )
    table = arrow.table([one])
    for part in (table.slice(0, 1), table.slice(1, 1)):
        with pytest.raises(TrainerMismatch, match="rollout a has the rows"):
            list(arrow.read(part))
    with pytest.raises(TrainerMismatch, match="no column record"):
        list(arrow.read(table.drop_columns(["record"])))
    for column, value in (("record", "[1"), ("record", '{"sampling": 3}'), ("loss_mask", [2])):
        rows = table.to_pylist()
        rows[0][column] = value
        with pytest.raises(TrainerMismatch, match="rollout a cannot be read"):
            list(arrow.read(table.from_pylist(rows, schema=table.schema)))
    (tmp_path / "x.parquet").write_bytes(b"not a table at all")
    with pytest.raises(TrainerMismatch, match="is not a Parquet file"):
        list(arrow.read(tmp_path / "x.parquet"))
