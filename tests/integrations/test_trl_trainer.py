"""TRL's own GRPO trainer takes steps on rollouts of a whole Rollyard, and agrees on every token."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rollyard_testing.integrations.trl_run import (
    TrlMissing,
    trained_with_trl,
    trl_python,
)

pytestmark = [pytest.mark.trainers, pytest.mark.usefixtures("bubblewrap_works")]
STEPS = 8
SAMPLES = 4
TOLERANCE = 1e-4
"""Both sides compute in float32. One optimizer step changes log-probabilities by far more than this."""


@pytest.fixture(scope="module")
def summary(missing: Callable[[str], NoReturn]) -> Iterator[dict[str, Any]]:
    """Yield the summary of one run of examples/trl."""
    try:
        python = trl_python()
    except TrlMissing as error:
        missing(str(error))
    # Paths of sockets are short, so this is not a folder of pytest's.
    with tempfile.TemporaryDirectory(prefix="ry-trl-") as folder:
        yield trained_with_trl(python, Path(folder), "--steps", str(STEPS), "--samples", str(SAMPLES))


def test_it_takes_all_steps(summary: dict[str, Any]) -> None:
    assert summary["steps"] == len(summary["checks"]) == len(summary["reward"]) == STEPS
    assert all(0.0 <= reward <= 1.0 for reward in summary["reward"])
    assert sum(step["informative_rows"] for step in summary["checks"]) > 0


def test_recorded_log_probabilities_are_those_of_the_trainer(summary: dict[str, Any]) -> None:
    """The first step shows that the record is right, and the others that the pool had new weights."""
    assert summary["checks"][0]["logprob_difference"] <= TOLERANCE
    assert max(step["logprob_difference"] for step in summary["checks"]) <= TOLERANCE


def test_tokens_of_the_environment_are_not_learnt(summary: dict[str, Any]) -> None:
    for step in summary["checks"]:
        assert step["env_tokens"] > 0
        assert step["gradient_outside"] == 0.0
        # Each sampled token of a row with an advantage has a gradient.
        assert step["learnt_tokens"] == step["learnable_tokens"]
    assert sum(step["learnt_tokens"] for step in summary["checks"]) > 0


def test_each_step_samples_with_the_weights_of_the_step_before(summary: dict[str, Any]) -> None:
    seen = [step["policy_versions"] for step in summary["checks"]]
    assert seen[0] == ["0"]
    assert [[version.partition("-")[2] for version in versions] for versions in seen[1:]] == [
        [f"step-{number}"] for number in range(1, STEPS)
    ]
