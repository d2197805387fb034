"""The loop: collect the groups of a step, train on them, push the weights, and measure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rollyard import Client
from transformers import PreTrainedModel

from tinygrpo.batch import rows_of
from tinygrpo.checkpoint import Checkpoints, Progress
from tinygrpo.evaluation import Evaluation, evaluate
from tinygrpo.metrics import Metrics
from tinygrpo.onnx_folder import OnnxTemplate
from tinygrpo.policy import load_policy
from tinygrpo.rollouts import RolloutStream, StreamSettings, target_of
from tinygrpo.tasks import OwnJob, held_out_tasks
from tinygrpo.update import UpdateSettings, make_optimizer, update_policy
from tinygrpo.versions import PolicyVersions
from tinygrpo.weights import WeightPusher

_FAR_BELOW: Final = 0.1
"""By how much a success in training is far below a goal. Its standard error is about 0.03."""
_GOOD_STEPS: Final = 2
"""The steps after each other with enough success after which training ends."""


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
    """The number of held-out tasks of an evaluation; with 0 there are no evaluations."""
    samples: int = 8
    """The rollouts of each held-out task."""
    stream: StreamSettings = field(default_factory=StreamSettings)
    update: UpdateSettings = field(default_factory=UpdateSettings)
    own: OwnJob | None = None
    """The job whose tasks are trained on. None: tasks from the templates of the tiny policy."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended."""

    seed: int
    steps: int
    success_before: float | None
    success_after: float | None
    """They are None without evaluations."""
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
        self._progress = Progress()
        if resumed is None:
            self._checkpoints.save(self._model, self._optimizer, self._progress)
        else:
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
        # The trainer before may have been killed behind its checkpoint. If the pool has these weights
        # already, the call changes nothing.
        self._weights.wait_for_pool()
        paused = self._push(resumed)
        if resumed > 0 and resumed not in self._metrics.steps():
            self._record(resumed, {}, paused)
        before = self.evaluate(0) if resumed == 0 else None
        stream = RolloutStream(
            self._client,
            settings.run,
            settings.pool,
            settings.seed,
            settings.stream,
            self._versions,
            settings.own,
        )
        if not self._ended():
            stream.submit(self._progress.place)
        opened = resumed
        while not self._ended():
            step = self._progress.step + 1
            while opened < min(settings.steps, step + settings.stream.max_lag):
                opened += 1
                stream.open(target_of(opened))
            self._step(stream, step)
        stream.close()
        done = self._progress.step
        after = self.evaluate(done)
        if before is None:
            # An evaluation that has ended is read again.
            before = self.evaluate(0)
        return TrainResult(
            settings.seed,
            done,
            None if before is None else before.success,
            None if after is None else after.success,
            self._progress.seconds,
            self._progress.rollouts,
        )

    def _ended(self) -> bool:
        return self._progress.step >= self._settings.steps or self._progress.good >= _GOOD_STEPS

    def evaluate(self, step: int) -> Evaluation | None:
        """Return the success of the weights of a step on the held-out tasks; the pool must have them.

        The result is None if the run has no evaluations.
        """
        if self._settings.held_out == 0:
            return None
        return self._evaluate(step, f"{self._settings.run}-eval-{step}", self._versions.label(step))

    def first_at(self, goal: float) -> Reached | None:
        """Give the pool the checkpoints of the steps again, until one reaches `goal` on the held-out tasks.

        The clock of the training has stopped before. Checkpoints whose success in training is far below the
        goal are passed over. The result is None if none reaches the goal.
        """
        steps = self._metrics.steps()
        for step in sorted(steps):
            # The next step's rollouts show what these weights are worth, or a later step's if rollouts may be
            # older than that.
            following = steps.get(step + 1 + self._settings.stream.max_lag)
            if following is not None and following["success"] < goal - _FAR_BELOW:
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
            settings.stream,
        )
        seconds = time.perf_counter() - started
        self._metrics.write(
            step, {"held_out": {"success": found.success, "seconds": seconds, **found.per_family}}
        )
        self._say(
            f"step {step:3d}  held-out success {found.success:.3f} of {found.rollouts} ({seconds:.0f} s)"
        )
        return found

    def _step(self, stream: RolloutStream, step: int) -> None:
        """Take one step.

        It may be killed at any place. Before the checkpoint is on the disk, the step counts as not begun: the
        next trainer reads the same groups again, from the cursor of the checkpoint before. After that it
        counts as done, and the next trainer pushes its weights.
        """
        newest = step - 1
        started = time.perf_counter()
        found = stream.collect(step, newest)
        collected = time.perf_counter()
        rows = [rows_of(group, self._versions) for group in found.trained]
        shuffle = random.Random(f"{self._settings.seed}/{step}")
        result = update_policy(self._model, self._optimizer, rows, newest, shuffle, self._settings.update)
        trained = time.perf_counter()
        success = sum(found.rewards) / len(found.rewards)
        lags = [self._versions.lag(group, newest) for group in found.trained]
        known = {
            "policy_version": self._versions.label(step),
            "success": success,
            "rollouts": found.rollouts,
            "failed": found.failed,
            "groups": {
                "trained": len(found.trained),
                "uninformative": found.uninformative,
                "stale": found.stale,
            },
            "lag": {"mean": sum(lags) / len(lags), "max": max(lags)},
            "update": asdict(result),
            "seconds": {"collect": collected - started, "train": trained - collected},
        }
        self._progress = Progress(
            step=step,
            place=stream.place,
            rollouts=self._progress.rollouts + found.rollouts,
            seconds=self._progress.seconds + trained - started,
            good=self._progress.good + 1 if success >= self._settings.enough else 0,
            metrics=known,
        )
        self._checkpoints.save(self._model, self._optimizer, self._progress, found.used)
        stream.acknowledge()
        paused = self._push(step)
        pushed = time.perf_counter() - trained
        self._progress = replace(self._progress, seconds=self._progress.seconds + pushed)
        self._record(step, {"push": pushed}, paused)

    def _push(self, step: int) -> float:
        return self._weights.push(self._versions.label(step), self._checkpoints.path(step), self._model)

    def _record(self, step: int, seconds: Mapping[str, float], paused: float) -> None:
        """Write the metrics of the last step, with what was not known when its checkpoint was written."""
        known: dict[str, Any] = dict(self._progress.metrics)
        parts = {**known["seconds"], **seconds, "paused": paused}
        self._metrics.write(step, {**known, "wall_seconds": self._progress.seconds, "seconds": parts})
        groups, update = known["groups"], known["update"]
        self._say(
            f"step {step:3d}  success {known['success']:.3f}  rollouts {known['rollouts']:4d}  "
            f"groups {groups['trained']}+{groups['uninformative']}+{groups['stale']}  "
            f"lag {known['lag']['mean']:.2f}  ratio error {update['fresh_ratio_error']:.1e}  "
            f"clipped {update['clipped']:.3f}  norm {update['gradient_norm']:.2f}  "
            f"surprise {update['surprise']:.3f}  "
            + ", ".join(f"{part} {taken:.1f} s" for part, taken in parts.items())
        )
