"""A trainer that is a Job on a real cluster is killed in the middle of steps, and uses each rollout once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import pytest
from rollyard_testing.invariants import invariant
from rollyard_testing.kubernetes.trainerjob import a_trainer
from rollyard_testing.trainer.killed_run import TrainerMissing, train_python
from rollyard_testing.trainer.used import problems

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installed import Release

pytestmark = [pytest.mark.kubernetes, pytest.mark.faults, pytest.mark.nightly]
STEPS, GROUPS = 3, 3
SIZE = (
    f"--steps={STEPS}", f"--groups={GROUPS}", "--samples=4", "--in-flight=4", "--concurrency=4", "--warm=2",
    "--held-out=0", "--enough=1.1",
)  # fmt: skip


@pytest.mark.attack(
    "a rollout's pods write weights, or read the trainer's token",
    boundary="kubernetes",
    surface="volume with a trainer's checkpoints",
    stopped_by="only the trainer's pod mounts the Secret; the claim is mounted by the trainer and, "
    "read-only, by the pool's backends",
)
def test_a_killed_trainer_loses_no_rollout_and_uses_none_twice(
    release: Release, images: str, missing: Callable[[str], NoReturn]
) -> None:
    try:
        python = train_python()
    except TrainerMissing as error:
        missing(str(error))
    # A pool loads the weights of a trainer from a volume.
    volumes = release.permitting("jobs.allow.volumes={persistentVolumeClaim}")
    with volumes, a_trainer(release, images, python, *SIZE) as trainer:
        for step, strike in ((2, trainer.delete_by_force), (3, trainer.kill)):
            pod = trainer.in_the_middle_of(step)
            assert trainer.who_sees_the_volume() == {"grpo-trainer": False, "backend": True}
            strike(pod)
            # What the step had read is in no checkpoint, so the next pod has to read it again.
            assert trainer.step() == step - 1
        trainer.finish()
        assert len(trainer.pods) >= 3
        with invariant():
            assert problems(trainer.ledger(), trainer.groups(), trainer.cursor(), STEPS, GROUPS) == []
