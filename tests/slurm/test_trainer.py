"""A trainer that is a batch job is requeued in the middle of a step, and uses each rollout once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from rollyard_testing.invariants import invariant
from rollyard_testing.pace import patience
from rollyard_testing.slurm.bridgelab import Bridge, until
from rollyard_testing.trainer.killed_run import TrainerMissing, train_python
from rollyard_testing.trainer.used import acknowledged, delivered, ledger_of, problems

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm-trainer" / "trainer.sbatch"
RUN, STEPS, GROUPS = "grpo", 3, 2
SIZE = (
    f"--run={RUN}", f"--steps={STEPS}", f"--groups={GROUPS}", "--samples=4", "--in-flight=4",
    "--concurrency=4", "--warm=2", "--held-out=0", "--enough=1.1",
)  # fmt: skip

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]


@pytest.fixture
def bridge(slurm: Any, shared: Path, sif: Path) -> Iterator[Bridge]:
    options = ["--engine", "embedded", "--default-image", str(sif), "--lease-seconds", "5"]
    made = Bridge(slurm, shared / "h", options, sandbox="apptainer")
    yield made
    made.kill()


def http_of(bridge: Bridge) -> httpx.Client:
    url = json.loads((bridge.files / "context.json").read_text())["url"]
    token = json.loads((bridge.files / "state" / "tokens.json").read_text())["admin"]
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)


def test_a_requeued_trainer_loses_no_rollout_and_uses_none_twice(
    slurm: Any, bridge: Bridge, shared: Path, missing: Callable[[str], NoReturn]
) -> None:
    try:
        python = train_python()
    except TrainerMissing as error:
        missing(str(error))
    bridge.start()
    checkpoints = shared / "run" / "checkpoints"
    submitted = slurm.run_as_user(
        ["sbatch", "--parsable", "--partition=debug", "--time=15", "--cpus-per-task=1", str(SCRIPT),
         str(ROOT), str(bridge.home), str(shared / "run"), *SIZE],
        cwd=shared, env={"TRAIN_PYTHON": str(python)},
    )  # fmt: skip
    number = int(submitted.stdout.strip().split(";")[0])
    log = shared / f"grpo-trainer-{number}.log"

    def words() -> str:
        return log.read_text()[-3000:] if log.exists() else "there is no log"

    with http_of(bridge) as http:

        def in_the_middle() -> bool:
            assert slurm.state(number) in ("PENDING", "RUNNING"), words()
            return (checkpoints / "step-0001").exists() and len(delivered(http, RUN)) > len(
                ledger_of(checkpoints)
            )

        until(in_the_middle, 60, "the middle of the second step")
        subprocess.run(["scontrol", "requeue", str(number)], env=slurm.env, check=True, timeout=patience(60))
        # The second start waits a moment, which Slurm sees to.
        slurm.wait_state(number, "PENDING", "COMPLETED", seconds=120)
        # An administrator may let a requeued job start at once.
        until(lambda: begins_now(slurm, number), 30, "the next start")
        assert not (checkpoints / f"step-{STEPS:04d}").exists(), "it had ended already"
        assert slurm.wait_state(number, "COMPLETED", "FAILED", seconds=300) == "COMPLETED", words()
        shown = slurm.run_as_user(["scontrol", "show", "job", str(number)]).stdout
        assert "Restarts=1" in shown
        ledger, groups, cursor = ledger_of(checkpoints), delivered(http, RUN), acknowledged(http, RUN)
        with invariant():
            assert problems(ledger, groups, cursor, STEPS, GROUPS) == [], words()


def begins_now(slurm: Any, number: int) -> bool:
    """Ask Slurm to start a requeued job without its pause, and return whether it took the request."""
    command = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
    return subprocess.run(command, env=slurm.env, capture_output=True, timeout=patience(60)).returncode == 0
