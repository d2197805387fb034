"""The loop: collect the groups of a step, train on them, push the weights, and measure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rollyard_client import Client
from transformers import PreTrainedModel

from tinygrpo.batch import rows_of
from tinygrpo.checkpoint import Checkpoints, Progress
from tinygrpo.evaluation import Evaluation, evaluate
from tinygrpo.metrics import Metrics
from tinygrpo.onnx_folder import OnnxTemplate
from tinygrpo.policy import load_policy
from tinygrpo.rollouts import RolloutStream, StepGroups, StreamSettings
from tinygrpo.tasks import held_out_tasks
from tinygrpo.update import UpdateResult, UpdateSettings, make_optimizer, update_policy
from tinygrpo.versions import PolicyVersions
from tinygrpo.weights import WeightPusher

_FAR_BELOW: Final = 0.1
"""By how much a success in training is far below a goal. Its standard error is about 0.03."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """One training run."""

    run: str
    """The name of the run, from which jobs and policy versions are named."""
    seed: int
    steps: int
    """The most steps."""
    enough: float = 1.0
    """Training ends once two steps after each other had this success on their training tasks."""
    pool: str = "default"
    held_out: int = 64
    """The number of held-out tasks of an evaluation."""
    samples: int = 8
    """The rollouts of each held-out task."""
    stream: StreamSettings = field(default_factory=StreamSettings)
    update: UpdateSettings = field(default_factory=UpdateSettings)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended."""

    seed: int
    steps: int
    success_before: float
    success_after: float
    seconds: float
    """The wall time of the steps, without the two evaluations."""
    rollouts: int
    """The rollouts of all steps, with those of groups without a signal and of groups that were too old."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The first step whose weights reached a goal on the held-out tasks, and when they were with the pool."""

    goal: float
    step: int
    success: float
    seconds: float
    """The wall time of the steps until then."""


class Trainer:
    """A training run, which continues from its newest checkpoint if it has one.

    Args:
        client: A client of the control plane.
        out: The folder of the run, an absolute path that the servers can read.
        base: The Hugging Face folder of the first weights.
        onnx: The ONNX folder of the same model.
        settings: The run.
        say: It is called with a line on each step.
    """

    def __init__(
        self,
        client: Client,
        out: Path,
        base: Path,
        onnx: Path,
        settings: TrainSettings,
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._settings = settings
        self._say = say
        self._metrics = Metrics(out)
        self._checkpoints = Checkpoints(out / "checkpoints", base, OnnxTemplate(onnx))
        self._versions = PolicyVersions(settings.run)
        self._weights = WeightPusher(client, settings.pool, base / "tokenizer.json")
        resumed = self._checkpoints.newest()
        self._model: PreTrainedModel = load_policy(resumed or base)
        self._optimizer = make_optimizer(self._model, settings.update.learning_rate)
        self._progress = Progress(0, 0, 0, 0.0)
        if resumed is not None:
            self._progress = self._checkpoints.restore(resumed, self._optimizer)

    def run(self) -> TrainResult:
        """Train, and return what came of it.

        Raises:
            TrainingError: The training cannot continue, as its message says. A further run in the same folder
                continues from the newest checkpoint.
            RollyardError: The control plane refused a call, or did not answer for long.
        """
        settings = self._settings
        resumed = self._progress.step
        if resumed == 0:
            self._checkpoints.save(self._model, self._optimizer, self._progress)
        self._push(resumed)
        before = self.evaluate(0) if resumed == 0 else None
        stream = RolloutStream(
            self._client, settings.run, settings.pool, settings.seed, settings.stream, self._versions
        )
        stream.submit(self._progress.groups_read)
        opened, good = resumed, 0
        while self._progress.step < settings.steps and good < 2:
            step = self._progress.step + 1
            while opened < min(settings.steps, step + settings.stream.max_lag):
                opened += 1
                stream.open(f"step-{opened}")
            success = self._step(stream, step)
            good = good + 1 if success >= settings.enough else 0
        stream.close()
        done = self._progress.step
        after = self.evaluate(done)
        if before is None:
            # An evaluation that has ended is read again.
            before = self.evaluate(0)
        return TrainResult(
            settings.seed,
            done,
            before.success,
            after.success,
            self._progress.seconds,
            self._progress.rollouts,
        )

    def evaluate(self, step: int) -> Evaluation:
        """Return the success of the weights of a step on the held-out tasks; the pool must have them."""
        return self._evaluate(step, f"{self._settings.run}-eval-{step}", self._versions.label(step))

    def first_at(self, goal: float) -> Reached | None:
        """Give the pool the checkpoints of the steps again, until one reaches `goal` on the held-out tasks.

        The clock of the training has stopped before. Checkpoints whose success in training is far below the
        goal are passed over. The result is None if none reaches the goal.
        """
        steps = self._metrics.steps()
        for step in sorted(steps):
            # The success of a step's rollouts is that of the weights before it.
            following = steps.get(step + 1, {"success": 1.0})
            if following["success"] < goal - _FAR_BELOW:
                continue
            # A version never stands for other weights, so the old ones get labels of their own.
            version = PolicyVersions(f"{self._settings.run}.again").label(step)
            folder = self._checkpoints.path(step)
            self._weights.push(version, folder, load_policy(folder))
            found = self._evaluate(step, f"{self._settings.run}-again-{step}", version)
            if found.success >= goal:
                return Reached(goal, step, found.success, float(steps[step]["wall_seconds"]))
        return None

    def close(self) -> None:
        """Close the files of the metrics."""
        self._metrics.close()

    def _evaluate(self, step: int, job: str, version: str) -> Evaluation:
        settings = self._settings
        started = time.perf_counter()
        found = evaluate(
            self._client,
            job,
            settings.pool,
            version,
            held_out_tasks(settings.held_out),
            settings.samples,
            settings.stream.concurrency,
        )
        seconds = time.perf_counter() - started
        self._metrics.write(
            step, {"held_out": {"success": found.success, "seconds": seconds, **found.per_family}}
        )
        self._say(
            f"step {step:3d}  held-out success {found.success:.3f} of {found.rollouts} ({seconds:.0f} s)"
        )
        return found

    def _step(self, stream: RolloutStream, step: int) -> float:
        """Take one step, and return the success of its rollouts on their training tasks."""
        newest = step - 1
        started = time.perf_counter()
        found = stream.collect(f"step-{step}", newest)
        collected = time.perf_counter()
        rows = [rows_of(group, self._versions) for group in found.trained]
        shuffle = random.Random(f"{self._settings.seed}/{step}")
        result = update_policy(self._model, self._optimizer, rows, newest, shuffle, self._settings.update)
        trained = time.perf_counter()
        seconds = self._progress.seconds + trained - started
        self._progress = Progress(step, stream.read, self._progress.rollouts + found.rollouts, seconds)
        self._checkpoints.save(self._model, self._optimizer, self._progress)
        paused = self._push(step)
        ended = time.perf_counter()
        self._progress = Progress(
            step, stream.read, self._progress.rollouts, self._progress.seconds + ended - trained
        )
        success = sum(found.rewards) / len(found.rewards)
        lags = [self._versions.lag(group, newest) for group in found.trained]
        self._record(
            step,
            success,
            found,
            lags,
            result,
            (collected - started, trained - collected, ended - trained),
            paused,
        )
        return success

    def _push(self, step: int) -> float:
        return self._weights.push(self._versions.label(step), self._checkpoints.path(step), self._model)

    def _record(
        self,
        step: int,
        success: float,
        found: StepGroups,
        lags: Sequence[int],
        result: UpdateResult,
        parts: tuple[float, float, float],
        paused: float,
    ) -> None:
        collect, train, push = parts
        lag = sum(lags) / len(lags)
        self._metrics.write(
            step,
            {
                "policy_version": self._versions.label(step),
                "success": success,
                "rollouts": found.rollouts,
                "failed": found.failed,
                "wall_seconds": self._progress.seconds,
                "groups": {
                    "trained": len(found.trained),
                    "uninformative": found.uninformative,
                    "stale": found.stale,
                },
                "lag": {"mean": lag, "max": max(lags)},
                "update": asdict(result),
                "seconds": {"collect": collect, "train": train, "push": push, "paused": paused},
            },
        )
        self._say(
            f"step {step:3d}  success {success:.3f}  rollouts {found.rollouts:4d}  "
            f"groups {len(found.trained)}+{found.uninformative}+{found.stale}  lag {lag:.2f}  "
            f"ratio error {result.fresh_ratio_error:.1e}  clipped {result.clipped:.3f}  "
            f"norm {result.gradient_norm:.2f}  surprise {result.surprise:.3f}  "
            f"collect {collect:.1f} s, train {train:.1f} s, push {push:.1f} s"
        )
