"""verl's and SkyRL's own classes hold what the adapters give them, and save the weights that a pool gets."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from rollyard_crds.trajectory import Trajectory
from rollyard_testing.faults.yard import ROOT
from rollyard_testing.integrations.rollouts import PAD, Sampled, batches, sampled, trained
from rollyard_testing.integrations.scripts import commands
from rollyard_testing.integrations.trl_run import ENVIRONMENT_SECONDS, PACKAGES
from rollyard_testing.pace import patience

pytestmark = [pytest.mark.trainers, pytest.mark.nightly]

RUN_SECONDS = 600.0
BATCHES = 60


def drawn() -> list[list[Trajectory]]:
    """Return batches of rollouts; the same at every call."""
    found: list[list[Trajectory]] = []

    @seed(16)
    @settings(
        max_examples=BATCHES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(batches())
    def draw(batch: list[Trajectory]) -> None:
        found.append(batch)

    draw()
    return found


@pytest.fixture(scope="module")
def python(missing: Callable[[str], NoReturn]) -> Path:
    """Return the Python of scripts/adapters-env."""
    try:
        done = subprocess.run(
            [str(ROOT / "scripts/adapters-env")],
            capture_output=True,
            text=True,
            timeout=patience(2 * ENVIRONMENT_SECONDS),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        missing(f"scripts/adapters-env: {error}")
    if done.returncode != 0:
        missing(f"scripts/adapters-env failed: {done.stderr.strip()[-1000:]}")
    return Path(done.stdout.strip().splitlines()[-1])


def on_real_packages(python: Path, script: str, *arguments: str) -> list[str]:
    """Run a script of this folder on the real packages, and return the lines of JSON that it printed."""
    done = subprocess.run(
        [str(python), str(ROOT / "tests/integrations" / script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in PACKAGES)},
        capture_output=True,
        text=True,
        timeout=patience(RUN_SECONDS),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def seen(
    python: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[Trajectory], dict[str, Any]]]:
    """Return each batch with what the classes of the frameworks hold of it."""
    every = drawn()
    assert any(len(one.segments) > 1 for batch in every for one in batch)
    assert any(one.status == "failed" for batch in every for one in batch)
    path = tmp_path_factory.mktemp("real") / "rollouts.jsonl"
    path.write_text(
        "".join(json.dumps([one.model_dump(mode="json") for one in batch]) + "\n" for batch in every)
    )
    lines = on_real_packages(python, "on_real_packages.py", str(path), str(PAD))
    return list(zip(every, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("form", ["data_proto", "skyrl", "nemo_rl"])
def test_each_sampled_token_is_trained_on_once(
    seen: list[tuple[list[Trajectory], dict[str, Any]]], form: str
) -> None:
    for batch, held in seen:
        found: Sampled = Sampled()
        for rollout, ids, mask, logprobs, prompt in held[form]:
            found += trained(rollout, ids, mask, logprobs, prompt)
        assert found == sampled(batch)


def test_an_agent_loop_takes_rollouts_of_one_segment(
    seen: list[tuple[list[Trajectory], dict[str, Any]]],
) -> None:
    single = 0
    for batch, held in seen:
        several = any(sum(any(part.loss_mask) for part in one.segments) > 1 for one in batch)
        assert (held["agent_loops"] is None) == several
        if not several:
            found: Sampled = Sampled()
            for rollout, ids, mask, logprobs, prompt in held["agent_loops"]:
                found += trained(rollout, ids, mask, logprobs, prompt)
            assert found == sampled(batch)
            single += 1
    assert single > 0


def test_pools_get_the_weights_that_verl_and_skyrl_save(python: Path, tmp_path: Path) -> None:
    """The settings are those of examples/trainers, which the trainers' own checks accept."""
    settings = {}
    for trainer, before in (("verl", ["python", "-m", "verl.trainer.main_ppo"]), ("skyrl", ["python"])):
        for kind, adapter in (("model", ""), ("adapter", "trained")):
            folder = tmp_path / f"{trainer}-{kind}"
            folder.mkdir()
            (command,) = commands(trainer, folder, ROLLYARD_ADAPTER=adapter)
            assert command[: len(before)] == before
            settings[folder.name] = command[3 if trainer == "verl" else 2 :]
    file, folder = tmp_path / "settings.json", tmp_path / "run"
    file.write_text(json.dumps(settings))
    folder.mkdir()
    (line,) = on_real_packages(python, "weights_on_real_packages.py", str(folder), str(file))
    for case, seen in json.loads(line).items():
        # A trainer that resumes brings its checkpoint once more, as a version of its own.
        resumed = ["step-2"] if case.startswith("verl") else []
        assert seen["versions"] == ["step-1", "step-2", *resumed]
        # verl rounds adapters to bfloat16 when it puts them together.
        tolerance = 0.05 if case == "verl-adapter" else 1e-4
        for difference, effect in seen["distances"]:
            assert difference < tolerance < 0.1 * effect, case
