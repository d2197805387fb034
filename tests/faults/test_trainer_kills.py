"""kill -9 of a trainer at every point of a step: it resumes, no rollout is lost, and none is used twice.

The trainer is examples/grpo on a Rollyard of its own. A point lies before and after each call to the control
plane, each write of a checkpoint, and each update of the weights.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from rollyard_testing.faults.yard import Yard, a_yard
from rollyard_testing.invariants import invariant
from rollyard_testing.trainer.killed_run import KilledRun, TrainerMissing, a_killed_run, train_python
from rollyard_testing.trainer.used import acknowledged, delivered, ledger_of, problems

pytestmark = [pytest.mark.trainers, pytest.mark.usefixtures("bubblewrap_works", "even_scheduling")]
GROUPS = 2
SIZE = (f"--groups={GROUPS}", "--samples=4", "--in-flight=4", "--enough=1.1", "--learning-rate=1e-3")
STEPS = 12
"""A kill behind the checkpoint costs a step, and there are fewer points of this kind than steps."""
MOST_STARTS = 80
POINTS = {
    "begin: after POST weights",
    "begin: after POST rolloutjobs",
    "begin: after PUT cursors",
    "begin: before POST targets",
    "begin: after POST targets",
    "collect: after GET groups",
    "collect: after POST tasks",
    "step: after update",
    "save: before writing of the ONNX folder",
    "save: after writing of the ledger",
    "save: before renaming of the checkpoint",
    "save: after renaming of the checkpoint",
    "acknowledge: before PUT cursors",
    "acknowledge: after PUT cursors",
    "step: before POST weights",
    "step: after POST weights",
    "step: after GET weights",
    "record: before line of metrics",
    "record: after line of metrics",
    "close: after POST cancel",
}
"""The points at which a trainer must have been killed, among others between which nothing happens."""


@pytest.fixture(scope="module")
def python(missing: Callable[[str], NoReturn]) -> Path:
    """Return the Python of the trainer."""
    try:
        return train_python()
    except TrainerMissing as error:
        missing(str(error))


@pytest.fixture
def yard() -> Iterator[Yard]:
    with a_yard() as made:
        made.start()
        yield made


def judge(yard: Yard, run: KilledRun, job: str, steps: int) -> None:
    """Check that the run used each group exactly once, and computed each step from the same state."""
    with yard.http() as http:
        groups, cursor = delivered(http, job), acknowledged(http, job)
    with invariant():
        assert problems(ledger_of(run.checkpoints), groups, cursor, steps, GROUPS) == [], run.words()
    computed: dict[int, set[str]] = {}
    for step, digest in run.updates():
        computed.setdefault(step, set()).add(digest)
    assert {step: len(digests) for step, digests in computed.items()} == dict.fromkeys(
        range(1, steps + 1), 1
    ), "a step that was computed again has other weights"


def test_it_survives_a_kill_at_every_point(yard: Yard, python: Path) -> None:
    with a_killed_run(
        yard, python, "points", *SIZE, f"--steps={STEPS}", "--held-out=1", "--held-out-samples=1"
    ) as run:
        for _ in range(MOST_STARTS):
            run.begin(run.points)
            status = run.end()
            if status != -signal.SIGKILL:
                break
        assert status == 0, run.words()
        assert set(run.points) >= POINTS, sorted(POINTS - set(run.points))
        assert len(run.points) == len(set(run.points))
        # Some kills came between an update and its checkpoint, so that the step was computed again.
        assert len(run.updates()) > STEPS
        judge(yard, run, "points", STEPS)


@pytest.mark.nightly
def test_it_survives_kills_at_random_times_while_rollouts_run_ahead(yard: Yard, python: Path) -> None:
    rng = random.Random(0)
    kills = 0
    with a_killed_run(yard, python, "times", *SIZE, "--steps=6", "--held-out=0", "--max-lag=1") as run:
        for start in range(MOST_STARTS):
            pid = run.begin(None)
            if start < 5:
                # They spread over a start and some steps, each of which takes a second on an idle machine.
                time.sleep(rng.uniform(0.3, 4.0))
                with contextlib.suppress(ProcessLookupError):  # On a fast machine it may have ended its work.
                    os.kill(pid, signal.SIGKILL)
            status = run.end()
            kills += status == -signal.SIGKILL
            if status != -signal.SIGKILL:
                break
        assert status == 0, run.words()
        assert kills > 0
        judge(yard, run, "times", 6)
