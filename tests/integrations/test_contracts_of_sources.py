"""slime and prime-rl are on no package index, so classes with the fields of their sources stand in here."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Any

import pytest
from rollyard.integrations import prime_rl, slime
from rollyard.integrations.errors import TrainerMismatch
from rollyard_crds.trajectory import SamplingRecord, Segment, Trajectory

SEGMENT = Segment(
    prompt_ids=[1, 2],
    response_ids=[3, 4, 5],
    loss_mask=[1, 0, 1],
    logprobs=[-0.5, 0.0, -0.25],
    policy_versions=["step-1", "", "step-2"],
)


def rollout(sample: int, reward: float | None, segments: int = 1, status: str = "succeeded") -> Trajectory:
    return Trajectory.model_validate(
        {
            "id": f"r{sample}",
            "job": "job",
            "task_id": "task",
            "group_id": "g",
            "sample_index": sample,
            "status": status,
            "reward": reward,
            "segments": [SEGMENT] * segments,
            "sampling": SamplingRecord(temperature=0.7, top_p=1.0, max_tokens=8, seed=0),
        }
    )


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
