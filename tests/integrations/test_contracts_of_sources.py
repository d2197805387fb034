"""Classes with the fields of their sources stand in for the frameworks.

slime and prime-rl are on no package index. verl, SkyRL and NeMo-RL need torch, for which numpy stands in;
`test_real_packages.py` has the real ones.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
from rollyard.integrations import arrow, nemo, prime_rl, skyrl, slime, trl, verl
from rollyard.integrations.errors import TrainerMismatch
from rollyard_crds.trajectory import SamplingRecord, Segment, Trajectory, Turn

SEGMENT = Segment(
    prompt_ids=[1, 2],
    response_ids=[3, 4, 5],
    loss_mask=[1, 0, 1],
    logprobs=[-0.5, 0.0, -0.25],
    policy_versions=["step-1", "", "step-2"],
)


def rollout(
    sample: int,
    reward: float | None,
    segments: int | list[Segment] = 1,
    status: str = "succeeded",
    **more: Any,
) -> Trajectory:
    return Trajectory.model_validate(
        {
            "id": f"r{sample}",
            "job": "job",
            "task_id": "task",
            "group_id": "g",
            "sample_index": sample,
            "status": status,
            "reward": reward,
            "segments": [SEGMENT] * segments if isinstance(segments, int) else segments,
            "sampling": SamplingRecord(temperature=0.7, top_p=1.0, max_tokens=8, seed=0),
            **more,
        }
    )


LATER = Segment(
    prompt_ids=[7, 8, 9],
    response_ids=[6, 5],
    loss_mask=[0, 1],
    logprobs=[0.0, -2.0],
    policy_versions=["", "step-11"],
)
TIMES = {
    "init": {"active_seconds": 1.0},
    "run": {"active_seconds": 20.0},
    "eval": {"active_seconds": 300.0},
    "model_seconds": 4.0,
    "tool_seconds": 5.0,
}
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "tool", "content": "t"},
]


def two_groups() -> list[Trajectory]:
    """Return a group with a rollout of two segments, one without a token and one that failed, and another."""
    return [
        rollout(
            0, 1.0, segments=[SEGMENT, LATER], timings=TIMES, messages=TALK, truncated=True,
            truncated_reason="MaxTurns", reward_components={"tests": 0.5},
        ),
        rollout(1, 0.0, segments=0, reward_reason="TestTimeout", messages=TALK[1:2] * 2 + TALK[3:]),
        rollout(2, None, status="failed", reason="BackendUnavailable"),
        rollout(3, 2.0, group_id="h", task_id="other", segments=[LATER]),
    ]  # fmt: skip


class Status(Enum):
    """The states of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """slime's sample, with the fields that an adapter may set."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None


Sample.Status = Status  # type: ignore[attr-defined]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Make a module importable, with the packages above it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        made = types.ModuleType(".".join(parts[:end]))
        made.__path__ = []
        monkeypatch.setitem(sys.modules, made.__name__, made)
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], made)
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


def test_slime_gets_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "slime.utils.types", Sample=Sample)
    batch = [rollout(0, 1.0, segments=2), rollout(1, 0.0), rollout(2, None, status="failed")]
    (group,) = slime.samples(batch, pad_token_id=0, labels={"task": "42"}, decode=lambda ids: f"{len(ids)}")
    assert [(row.index, row.rollout_id, row.status) for row in group] == [
        (0, 0, Status.COMPLETED),
        (0, 0, Status.COMPLETED),
        (1, 1, Status.COMPLETED),
        (2, 2, Status.FAILED),
    ]
    first, last = group[0], group[-1]
    assert (first.tokens, first.response_length, first.loss_mask) == ([1, 2, 3, 4, 5], 3, [1, 0, 1])
    assert (first.response, first.label, first.weight_versions) == ("3", "42", ["step-1", "step-2"])
    assert (last.loss_mask, last.remove_sample, last.reward) == ([0, 0, 0], True, 0.5)


def test_a_slime_without_rollout_ids_takes_one_segment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    older = make_dataclass(
        "Older",
        [(one.name, one.type, field(default=None)) for one in fields(Sample) if one.name != "rollout_id"],
    )
    older.Status = Status  # type: ignore[attr-defined]
    module(monkeypatch, "slime.utils.types", Sample=older)
    assert len(slime.samples([rollout(0, 1.0)], pad_token_id=0)[0]) == 1
    with pytest.raises(TrainerMismatch, match="no rollout_id"):
        slime.samples([rollout(0, 1.0, segments=2)], pad_token_id=0)


def struct(*names: str) -> type:
    """Return a class with the keywords and the list of fields that a msgspec struct has."""
    made = make_dataclass("TrainingSample", [(name, Any, field(default=None)) for name in names])
    made.__struct_fields__ = names  # type: ignore[attr-defined]
    return made


TOKENS = ("token_ids", "mask", "logprobs", "temperatures", "env_name", "ref_logprobs")


@pytest.mark.parametrize(
    ("names", "advantage"),
    [
        ((*TOKENS, "advantage", "reward"), ("advantage", 0.5)),
        ((*TOKENS, "reward", "advantages", "sample_id"), ("advantages", [0.5] * 5)),
    ],
)
def test_prime_rl_gets_training_samples(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], advantage: tuple[str, Any]
) -> None:
    module(monkeypatch, "prime_rl.transport.types", TrainingSample=struct(*names))
    batch = [rollout(0, 1.0), rollout(1, 0.0), rollout(2, None, status="failed")]
    rows = prime_rl.training_samples(batch, env_name="shell")
    assert len(rows) == 2
    assert rows[0].token_ids == [1, 2, 3, 4, 5]
    assert rows[0].mask == [False, False, True, False, True]
    assert rows[0].logprobs == [0.0, 0.0, -0.5, 0.0, -0.25]
    assert rows[0].temperatures == [0.7] * 5
    assert (rows[0].env_name, rows[0].reward) == ("shell", 1.0)
    assert getattr(rows[0], advantage[0]) == advantage[1]


def test_a_prime_rl_with_other_fields_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "prime_rl.transport.types", TrainingSample=struct("prompt_ids", "completion_ids"))
    with pytest.raises(TrainerMismatch, match="no token_ids, mask, logprobs, temperatures, env_name"):
        prime_rl.training_samples([rollout(0, 1.0)], env_name="shell")
    module(monkeypatch, "prime_rl.transport.types", TrainingSample=struct(*TOKENS), TrainingAdvantage=object)
    with pytest.raises(TrainerMismatch, match="takes advantages in a form"):
        prime_rl.training_samples([rollout(0, 1.0)], env_name="shell")
    module(monkeypatch, "prime_rl.transport.types", TrainingSample=struct(*TOKENS))
    with pytest.raises(TrainerMismatch, match="takes advantages in a form"):
        prime_rl.training_samples([rollout(0, 1.0)], env_name="shell")


def test_prime_rl_takes_the_advantages_that_it_is_given() -> None:
    batch = two_groups()
    rows = prime_rl.sample_fields(batch, env_name="shell")
    assert [(row["sample_id"], row["reward"], row["advantage"]) for row in rows] == [
        ("r0/0", 1.0, 0.5),
        ("r0/1", 1.0, 0.5),
        ("r3/0", 2.0, 0.0),
    ]
    given = {"r0": -3.0, "r1": 5.0, "r3": 0.0}
    rows = prime_rl.sample_fields(batch, env_name="shell", advantages=given)
    assert [row["advantage"] for row in rows] == [-3.0, -3.0, 0.0]


def test_slime_numbers_rollouts_over_all_groups() -> None:
    batch = two_groups()
    batch[0].turns = [Turn(segment=0, start=0, end=1, finish_reason="tool_calls")]
    batch[0], batch[2] = batch[2], batch[0]  # A group may come in any order.
    cancelled = rollout(4, None, status="cancelled", group_id="h", task_id="other", messages=TALK)
    groups = slime.sample_fields(
        [*batch, cancelled], pad_token_id=0, first_group=5, first_index=10, labels={"other": "42"},
        decode=lambda ids: f"{len(ids)} ids",
    )  # fmt: skip
    names = (
        "group_index",
        "index",
        "rollout_id",
        "session_id",
        "status",
        "remove_sample",
        "response",
        "label",
    )
    assert [[tuple(row[name] for name in names) for row in group] for group in groups] == [
        [
            (5, 10, 10, "r0", "truncated", False, "3 ids", None),
            (5, 10, 10, "r0", "truncated", False, "2 ids", None),
            (5, 11, 11, "r1", "completed", True, "", None),
            (5, 12, 12, "r2", "failed", True, "3 ids", None),
        ],
        [
            (6, 13, 13, "r3", "completed", False, "2 ids", "42"),
            (6, 14, 14, "r4", "aborted", True, "3 ids", "42"),
        ],
    ]
    first, second, *_ = groups[0]
    assert [first["metadata"]["rollyard"]["segment"], second["metadata"]["rollyard"]["segment"]] == [0, 1]
    assert second["metadata"]["rollyard"]["policy_versions"] == ["", "step-11"]
    assert (second["weight_versions"], second["reward"]) == (["step-11"], 1.0)
    # The prompt ends where the policy begins, which may be after an assistant's messages of the task.
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert [message["role"] for message in groups[1][1]["prompt"]] == ["system", "user", "assistant", "tool"]
    assert first["metadata"]["rollyard"]["truncated_reason"] == "MaxTurns"
    assert [row["metadata"]["rollyard"]["scored"] for row in groups[0]] == [True, True, True, False]


@dataclass
class TrajectoryID:
    """SkyRL's name of a row."""

    instance_id: str
    repetition_id: int


def test_skyrl_gets_a_row_for_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "skyrl.train.generators.base", TrajectoryID=TrajectoryID)
    batch = two_groups()
    output = skyrl.generator_output(batch, pad_token_id=0, step_wise=True)
    assert output["prompt_token_ids"] == [[1, 2], [7, 8, 9], [1, 2], [1, 2], [7, 8, 9]]
    assert output["response_ids"] == [[3, 4, 5], [6, 5], [0], [3, 4, 5], [6, 5]]
    assert output["loss_masks"] == [[1, 0, 1], [0, 1], [0], [0, 0, 0], [0, 1]]
    assert output["rollout_logprobs"] == [
        [-0.5, 0.0, -0.25],
        [0.0, -2.0],
        [0.0],
        [-0.5, 0.0, -0.25],
        [0.0, -2.0],
    ]
    assert output["rewards"] == [0.0, 1.0, 0.0, 0.5, 2.0]
    assert output["is_last_step"] == [False, True, True, True, True]
    assert output["stop_reasons"] == ["length", "length", "stop", "error", "stop"]
    assert output["trajectory_ids"] == [TrajectoryID("g", number) for number in (0, 0, 1, 2)] + [
        TrajectoryID("h", 3)
    ]
    assert output["trajectory_generation_times"] == [321.0, 0.0, 0.0, 0.0]
    assert [row["policy_versions"] for row in output["env_metrics"]] == [
        ["step-1", "step-2"], ["step-11"], [], ["step-1", "step-2"], ["step-11"],
    ]  # fmt: skip
    assert [row["reason"] for row in output["env_metrics"]] == [
        "MaxTurns",
        "MaxTurns",
        "TestTimeout",
        "BackendUnavailable",
        "",
    ]
    assert [row.get("reward/tests") for row in output["env_metrics"]] == [0.5, 0.5, None, None, None]
    assert output["rollout_metrics"] == {
        "rollyard/rollouts": 4.0, "rollyard/unscored": 1.0, "rollyard/truncated": 1.0,
        "rollyard/sampled_tokens": 6.0, "rollyard/turns": 0.0,
    }  # fmt: skip
    given = skyrl.generator_output(batch[1:], pad_token_id=0, trajectory_ids=["x", "y", "z"])
    assert (given["trajectory_ids"], given["is_last_step"]) == (["x", "y", "z"], None)
    with pytest.raises(TrainerMismatch, match="rollout r0 has several segments") as refused:
        skyrl.generator_output(batch, pad_token_id=0)
    assert refused.value.reason == "SegmentsRefused"
    with pytest.raises(ValueError, match="at least one rollout"):
        skyrl.generator_output([], pad_token_id=0)


class Tensor(np.ndarray[Any, Any]):
    """An array with what the adapters need of a tensor."""

    def clone(self) -> Any:
        return self.copy()


def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numpy stand in for torch."""

    def tensor(values: Any, dtype: Any) -> Any:
        return np.array(values, dtype).view(Tensor)

    module(
        monkeypatch,
        "torch",
        long=np.int64, int64=np.int64, float32=np.float32,
        tensor=tensor,
        zeros=lambda shape, dtype: tensor(np.zeros(shape), dtype),
        full=lambda shape, value, dtype: tensor(np.full(shape, value), dtype),
        cumsum=lambda values, dim: np.cumsum(values, axis=dim),
        clip=lambda values, min: np.clip(values, min, None),
    )  # fmt: skip


class DataProto:
    """verl's batch."""

    @classmethod
    def from_dict(cls, tensors: Any, non_tensors: Any, meta_info: Any) -> DataProto:
        made = cls()
        made.batch = {name: values.tolist() for name, values in tensors.items()}
        made.non_tensor_batch = {name: list(values) for name, values in non_tensors.items()}
        made.meta_info = meta_info
        return made

    batch: dict[str, Any]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


def test_verl_gets_a_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch(monkeypatch)
    module(monkeypatch, "verl.protocol", DataProto=DataProto)
    batch = two_groups()
    proto = verl.data_proto(batch, pad_token_id=99, several="rows")
    assert proto.batch == {
        "prompts": [[99, 1, 2], [7, 8, 9], [99, 1, 2], [99, 1, 2], [7, 8, 9]],
        "responses": [[3, 4, 5], [6, 5, 99], [99, 99, 99], [3, 4, 5], [6, 5, 99]],
        "response_mask": [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 1, 0]],
        "input_ids": [
            [99, 1, 2, 3, 4, 5], [7, 8, 9, 6, 5, 99], [99, 1, 2, 99, 99, 99], [99, 1, 2, 3, 4, 5],
            [7, 8, 9, 6, 5, 99],
        ],
        "attention_mask": [
            [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 0],
        ],
        "position_ids": [
            [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 4], [0, 0, 1, 2, 2, 2], [0, 0, 1, 2, 3, 4],
            [0, 1, 2, 3, 4, 4],
        ],
        "rollout_log_probs": [
            [-0.5, 0.0, -0.25], [0.0, -2.0, 0.0], [0.0] * 3, [-0.5, 0.0, -0.25], [0.0, -2.0, 0.0],
        ],
        "rm_scores": [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0] * 3, [0.0, 0.0, 0.5], [0.0, 2.0, 0.0]],
    }  # fmt: skip
    assert proto.non_tensor_batch == {
        "uid": ["g"] * 4 + ["h"],
        "rollout_id": ["r0", "r0", "r1", "r2", "r3"],
        "task_id": ["task"] * 4 + ["other"],
        "status": ["succeeded"] * 3 + ["failed", "succeeded"],
        "policy_versions": [["step-1", "step-2"], ["step-11"], [], ["step-1", "step-2"], ["step-11"]],
        "min_global_steps": [1, 11, None, 1, 11],
        "max_global_steps": [2, 11, None, 2, 11],
        "__num_turns__": [3, 3, 3, 0, 0],
    }
    assert proto.meta_info["metrics"][0] == {
        "generate_sequences": 4.0, "tool_calls": 5.0, "compute_score": 300.0, "num_preempted": -1,
    }  # fmt: skip
    wide = verl.data_proto(batch[3:], pad_token_id=99, prompt_length=4, response_length=2)
    assert wide.batch["input_ids"] == [[99, 7, 8, 9, 6, 5]]
    with pytest.raises(TrainerMismatch, match="rollout r0 has several segments"):
        verl.data_proto(batch, pad_token_id=99)
    for limit, says in (
        ({"prompt_length": 2}, "r3 has a prompt of 3"),
        ({"response_length": 2}, "r2 has a response"),
    ):
        with pytest.raises(TrainerMismatch, match=says):
            verl.data_proto(batch[1:], pad_token_id=99, **limit)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one rollout"):
        verl.data_proto([], pad_token_id=99)


def test_verls_agent_loop_gets_a_score_only_with_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.SimpleNamespace
    module(
        monkeypatch, "verl.experimental.agent_loop.agent_loop", AgentLoopOutput=made, AgentLoopMetrics=made
    )
    several, _, failed, single = two_groups()
    # A rollout without a reward is no reward of 0, and one with a reward keeps it.
    output = verl.agent_loop_output(single, pad_token_id=99, reward=0.25)
    assert (output.reward_score, output.response_mask, output.metrics.num_preempted) == (2.0, [0, 1], -1)
    with pytest.raises(TrainerMismatch, match=r"rollout r2 has no reward .*BackendUnavailable") as unscored:
        verl.agent_loop_output(failed, pad_token_id=99)
    assert unscored.value.reason == "RolloutUnscored"
    for reward in (0.25, 0.0):
        output = verl.agent_loop_output(failed, pad_token_id=99, reward=reward)
        assert (output.reward_score, output.response_mask) == (reward, [0, 0, 0])
    with pytest.raises(TrainerMismatch, match="rollout r0 has several segments"):
        verl.agent_loop_output(several, pad_token_id=99)


def test_nemo_rl_trains_on_assistant_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch(monkeypatch)
    ended = SEGMENT.model_copy(
        update={
            "response_ids": [3, 4, 5, 6], "loss_mask": [0, 1, 1, 0], "logprobs": [0.0, -0.5, -0.25, 0.0],
            "policy_versions": ["", "step-1", "step-2", ""],
        }
    )  # fmt: skip
    stopped = [
        rollout(number, reward, status="cancelled", reason="JobCancelled", group_id="h", task_id="other")
        for number, reward in ((5, None), (6, 9.0))
    ]
    batch = [*two_groups(), rollout(4, 1.0, group_id="h", task_id="other", segments=[ended]), *stopped]
    rows = nemo.datum_specs(batch, pad_token_id=99, task_name="shell")
    said = [
        [
            (
                message["role"],
                message["token_ids"].tolist(),
                message["generation_logprobs"].tolist() if "generation_logprobs" in message else None,
            )
            for message in row["message_log"]
        ]
        for row in rows
    ]
    assert said[0] == [
        ("user", [1, 2], None), ("assistant", [3], [-0.5]), ("user", [4], None), ("assistant", [5], [-0.25]),
    ]  # fmt: skip
    assert said[1] == [("user", [7, 8, 9, 6], None), ("assistant", [5], [-2.0])]
    assert said[2] == [("user", [1, 2, 99], None)]
    assert said[5] == [("user", [1, 2, 3], None), ("assistant", [4, 5], [-0.5, -0.25]), ("user", [6], None)]
    names = ("length", "loss_multiplier", "idx", "task_name", "total_reward")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (5, 1.0, 0, "shell", 1.0),
        (5, 1.0, 0, "shell", 1.0),
        (3, 0.0, 0, "shell", 0.0),
        (5, 0.0, 0, "shell", 0.5),
        (5, 1.0, 1, "shell", 2.0),
        (6, 1.0, 1, "shell", 1.0),
        (5, 0.0, 1, "shell", 1.5),
        (5, 0.0, 1, "shell", 1.5),
    ]
    extra = [row["extra_env_info"] for row in rows]
    assert [(one["rollout_id"], one["segment"], one["truncated"]) for one in extra] == [
        ("r0", 0, True), ("r0", 1, True), ("r1", -1, False), ("r2", 0, False), ("r3", 0, False),
        ("r4", 0, False), ("r5", 0, False), ("r6", 0, False),
    ]  # fmt: skip
    assert [(one["status"], one["reason"]) for one in extra[3:]] == [
        ("failed", "BackendUnavailable"), ("succeeded", ""), ("succeeded", ""),
        ("cancelled", "JobCancelled"), ("cancelled", "JobCancelled"),
    ]  # fmt: skip
    assert extra[1]["reward_components"] == {"tests": 0.5}
    assert extra[1]["policy_versions"] == ["", "step-11"]


def test_nemo_gym_gets_an_answer_for_each_segment() -> None:
    several, silent, failed, _ = two_groups()
    first, second = nemo.run_answers(several, model="m")
    assert [first["response"]["id"], second["response"]["id"]] == ["r0/0", "r0/1"]
    assert [item["id"] for item in first["response"]["output"]] == ["r0/0/0", "r0/0/1"]
    assert [item["prompt_token_ids"] for item in first["response"]["output"]] == [[1, 2], [1, 2, 3, 4]]
    assert [item["generation_log_probs"] for item in second["response"]["output"]] == [[-2.0]]
    assert [one["reward"] for one in (first, second)] == [1.0, 1.0]
    assert (second["policy_versions"], second["truncated_reason"]) == (["step-11"], "MaxTurns")
    assert (first["response"]["status"], first["response"]["model"]) == ("incomplete", "m")
    (only,) = nemo.run_answers(silent)
    assert [item["role"] for item in first["responses_create_params"]["input"]] == ["system", "user"]
    assert [item["content"] for item in only["responses_create_params"]["input"]] == ["u", "u"]
    assert (only["mask_sample"], only["reward"], only["response"]["id"]) == (True, 0.0, "r1")
    assert only["response"]["status"] == "completed"
    (only,) = nemo.run_answers(rollout(0, 2.0, segments=0))
    assert (only["mask_sample"], only["reward"]) == (True, 2.0), "it has a reward, and no token to learn from"
    for one in (failed, rollout(0, 2.0, status="cancelled", reason="BackendUnavailable")):
        (only,) = nemo.run_answers(one)
        assert (only["mask_sample"], only["reward"], only["response"]["output"]) == (True, 0.0, [])
        assert only["failure_reason"] == "BackendUnavailable"


def test_trl_keeps_one_segment_and_counts_the_others() -> None:
    batch = [*two_groups()[:3], rollout(4, 2.0, status="cancelled", reason="JobCancelled")]
    expected = {"longest": ([3, 4, 5], [1, 0, 1], 1), "last": ([6, 5], [0, 1], 2)}
    for several, (ids, mask, left_out) in expected.items():
        output = trl.rollout_output(batch, pad_token_id=99, several=several)  # type: ignore[arg-type]
        assert output["completion_ids"] == [ids, [99], [3, 4, 5], [3, 4, 5]]
        assert output["env_mask"] == [mask, [0], [0, 0, 0], [0, 0, 0]]
        assert output["tokens_left_out"] == [left_out, 0, 0, 0]
        assert output["reward"] == [1.0, 0.0, None, None]
        assert output["rollout_reason"] == ["MaxTurns", "TestTimeout", "BackendUnavailable", "JobCancelled"]
        assert output["rollout_status"] == ["succeeded", "succeeded", "failed", "cancelled"]
        assert output["truncated"] == [True, False, False, False]
    assert output["policy_versions"][0] == ["", "step-11"]
    assert output["prompt_ids"] == [[7, 8, 9], [1, 2], [1, 2], [1, 2]]


ENDS: list[dict[str, Any]] = [
    {"status": "failed", "reward": None},
    {"status": "failed", "reward": 9.0},
    {"status": "cancelled", "reward": None},
    {"status": "cancelled", "reward": 9.0},
    {"status": "succeeded", "reward": None},
]


@pytest.mark.parametrize("end", ENDS, ids=str)
def test_no_adapter_trains_on_a_rollout_that_nobody_scored(
    end: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sampled tokens are there, and its reward moves no baseline."""
    torch(monkeypatch)
    module(monkeypatch, "verl.protocol", DataProto=DataProto)
    module(monkeypatch, "skyrl.train.generators.base", TrajectoryID=TrajectoryID)
    batch = [rollout(0, 1.0), rollout(1, segments=[LATER], **end), rollout(2, 0.0)]
    proto = verl.data_proto(batch, pad_token_id=99)
    assert [any(row) for row in proto.batch["response_mask"]] == [True, False, True]
    assert [sum(row) for row in proto.batch["rm_scores"]] == [1.0, 0.5, 0.0]
    assert proto.non_tensor_batch["status"][1] == end["status"]
    output = skyrl.generator_output(batch, pad_token_id=99)
    assert [any(row) for row in output["loss_masks"]] == [True, False, True]
    assert output["rewards"] == [1.0, 0.5, 0.0]
    assert output["stop_reasons"] == ["stop", "error", "stop"]
    assert output["rollout_metrics"]["rollyard/unscored"] == 1.0
    ((first, second, third),) = slime.sample_fields(batch, pad_token_id=99)
    assert [row["remove_sample"] for row in (first, second, third)] == [False, True, False]
    assert (second["loss_mask"], second["reward"]) == ([0, 0], 0.5)
    assert second["status"] == ("aborted" if end["status"] == "cancelled" else "failed")
    told = trl.rollout_output(batch, pad_token_id=99)
    assert (told["reward"], told["env_mask"][1]) == ([1.0, None, 0.0], [0, 0])
    advantages = {
        row["sample_id"]: row["advantage"] for row in prime_rl.sample_fields(batch, env_name="shell")
    }
    assert advantages == {"r0/0": 0.5, "r2/0": -0.5}
    rows = nemo.datum_specs(batch, pad_token_id=99, task_name="shell")
    assert [row["loss_multiplier"] for row in rows] == [1.0, 0.0, 1.0]
    assert [row["total_reward"] for row in rows] == [1.0, 0.5, 0.0]
    (answer,) = nemo.run_answers(batch[1])
    assert (answer["mask_sample"], answer["reward"], answer["response"]["output"]) == (True, 0.0, [])
    sequence = arrow.table([batch[1]]).to_pylist()[0]
    assert (sequence["status"], sequence["reward"]) == (end["status"], end["reward"])
