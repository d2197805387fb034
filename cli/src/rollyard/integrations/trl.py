"""TRL: a `rollout_func` of the GRPO trainer, with its dataset, rewards and weight updates (TRL 1.16).

Example::

    rollouts = TrlRollouts(client, job, tasks, weights=TrlWeights(client, "policy", "/checkpoints"))
    trainer = GRPOTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rollouts.dataset()),
        reward_funcs=rollyard_reward, rollout_func=rollouts,
    )
    trainer.train()
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rollyard_crds.trajectory import Trajectory

from rollyard.integrations.errors import TrainerMismatch
from rollyard.integrations.sequences import TrainingSequence, is_scored, sequences
from rollyard.integrations.streams import PLAY_SECONDS, StreamPlayer
from rollyard.integrations.weights import PoolWeights

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds import RolloutJob
    from rollyard_crds.task import Task

__all__ = ["Several", "TrlRollouts", "TrlWeights", "rollout_output", "rollyard_reward"]

Several = Literal["refuse", "longest", "last"]
TASK_KEY: Final = "rollyard_task"
"""The key of a prompt's last message that names the task. TRL passes prompts on unchanged."""
Convert = Callable[[Path, Path], None]


def rollout_output(
    trajectories: Sequence[Trajectory], *, pad_token_id: int, several: Several = "refuse"
) -> dict[str, list[Any]]:
    """Return what a `rollout_func` returns, with one row for each rollout, in their order.

    `completion_ids`, `logprobs` (nats) and `env_mask` (1 on tokens that the policy sampled) have the same
    length in each row. The other keys go to the reward functions: `reward` (None without one, which TRL
    leaves out of the group's baseline), `rollout_id`, `rollout_status`, `rollout_reason`, `truncated`,
    `policy_versions` (of each token) and `tokens_left_out`. A rollout without a reward has `env_mask` 0.

    Args:
        trajectories: The rollouts, in the order of the prompts.
        pad_token_id: The token of rows that hold no token of their rollout.
        several: What happens to a rollout of several segments, because TRL takes one row for each prompt.
            `longest` and `last` keep one segment, and `tokens_left_out` counts the sampled tokens of the
            others. `last` keeps the last one of the rollout's own conversation.

    Raises:
        TrainerMismatch: A rollout has several segments (`SegmentsRefused`), and `several` is `refuse`.
    """
    by_rollout: defaultdict[int, list[TrainingSequence]] = defaultdict(list)
    for row in sequences(trajectories, pad_token_id=pad_token_id):
        by_rollout[id(row.trajectory)].append(row)
    rows = [_chosen(by_rollout[id(trajectory)], several) for trajectory in trajectories]
    return {
        "prompt_ids": [list(row.segment.prompt_ids) for row in rows],
        "completion_ids": [list(row.segment.response_ids) for row in rows],
        "logprobs": [list(row.segment.logprobs) for row in rows],
        "env_mask": [row.loss_mask for row in rows],
        "reward": [row.trajectory.reward if is_scored(row.trajectory) else None for row in rows],
        "rollout_id": [row.trajectory.id for row in rows],
        "rollout_status": [row.trajectory.status for row in rows],
        "rollout_reason": [row.why for row in rows],
        "truncated": [row.trajectory.truncated for row in rows],
        "policy_versions": [list(row.segment.policy_versions) for row in rows],
        "tokens_left_out": [row.trajectory.sampled_tokens - sum(row.segment.loss_mask) for row in rows],
    }


def rollyard_reward(
    prompts: Sequence[Any], completions: Sequence[Any], reward: Sequence[float | None], **others: Any
) -> list[float | None]:
    """Return the rewards that Rollyard's evaluation gave, as a reward function of TRL."""
    return list(reward)


class TrlRollouts:
    """A `rollout_func`: it plays the prompts of each generation batch through a stream of Rollyard.

    Args:
        client: The client of the control plane.
        job: The manifest of a stream. The trainer's `num_generations` must be a multiple of its
            `samplesPerTask`; if they are equal, the samples of a prompt are one group, which shares a
            backend.
        tasks: The tasks of the dataset, which have different ids.
        weights: Brings the trainer's weights to the pool before rollouts begin. Without it, the caller does.
        timeout: The seconds that the rollouts of one call may take.
        several: See `rollout_output`.

    Raises:
        TrainerMismatch: The job is not a stream, or two tasks have the same id.
        StreamEnded: A job of this name was closed, was cancelled or has ended.
        RollyardError: The control plane refuses the job.
    """

    def __init__(
        self,
        client: Client,
        job: RolloutJob | Mapping[str, Any],
        tasks: Iterable[Task | Mapping[str, Any]],
        *,
        weights: TrlWeights | None = None,
        timeout: float = PLAY_SECONDS,
        several: Several = "refuse",
    ) -> None:
        import rollyard_crds as crds

        self.tasks: dict[str, Task] = {}
        for task in tasks:
            model = crds.Task.model_validate(task)
            if self.tasks.setdefault(model.id, model) is not model:
                raise TrainerMismatch(f"two tasks have the id {model.id!r}; ids must differ")
        self.player = StreamPlayer(client, job)
        self._weights = weights
        self._timeout = timeout
        self._several: Several = several

    def dataset(self) -> list[dict[str, Any]]:
        """Return the rows of the dataset: `prompt` (messages, the last with the task's id) and `task`."""
        return [{"prompt": _prompt(task), "task": task.id} for task in self.tasks.values()]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play the prompts, and return a row for each, in their order. TRL calls this.

        Raises:
            TrainerMismatch: A prompt is not from `dataset()`, the number of a prompt's generations does not
                fit the job, or the trainer samples at another temperature.
            RolloutsLate: The rollouts took too long.
            StreamEnded: The job ended before they did.
            CliError: The pool did not get the new weights.
        """
        self._check(trainer)
        batch = [self.tasks[self._named(prompt)] for prompt in prompts]
        if self._weights is not None:
            self._weights.bring(trainer)
        played = self.player.play_each(batch, timeout=self._timeout)
        pad = int(trainer.processing_class.pad_token_id)
        return rollout_output(played, pad_token_id=pad, several=self._several)

    def _named(self, prompt: Any) -> str:
        last = prompt[-1] if isinstance(prompt, list) and prompt else None
        name = last.get(TASK_KEY) if isinstance(last, Mapping) else None
        if name not in self.tasks:
            shown = json.dumps(prompt, default=str)[:120]
            raise TrainerMismatch(
                f"a prompt names no task of these rollouts ({shown}); make the trainer's dataset of dataset()"
            )
        return str(name)

    def _check(self, trainer: Any) -> None:
        expected = self.player.job.spec.sampling.temperature
        temperature = getattr(trainer.args, "temperature", expected)
        if abs(temperature - expected) > 1e-9:
            raise TrainerMismatch(
                f"the trainer computes log-probabilities at temperature {temperature}, and the job samples "
                f"at {expected}: set GRPOConfig.temperature and spec.sampling.temperature to the same number"
            )


def _prompt(task: Task) -> list[dict[str, Any]]:
    if task.messages:
        messages = [message.model_dump(exclude_none=True) for message in task.messages]
    else:
        messages = [{"role": "user", "content": task.prompt or ""}]
    messages[-1][TASK_KEY] = task.id
    return messages


def _chosen(rows: Sequence[TrainingSequence], several: Several) -> TrainingSequence:
    if len(rows) > 1 and several == "refuse":
        raise TrainerMismatch(
            f"rollout {rows[0].trajectory.id} has {len(rows)} segments, and TRL takes one row of a prompt: "
            f"keep the chat template from rewriting history, or give several='longest' or 'last'",
            reason="SegmentsRefused",
        )
    if several == "longest":
        return max(rows, key=lambda row: sum(row.segment.loss_mask))
    own = {turn.segment for turn in rows[-1].trajectory.turns}
    return next((row for row in reversed(rows) if row.index in own), rows[-1])


@dataclass
class TrlWeights(PoolWeights):
    """Brings the weights of each optimizer step of a TRL trainer to every backend of a pool.

    Args:
        convert: Makes the folder that the servers load (second argument) from the Hugging Face folder (first
            argument). Without it, the servers load the Hugging Face folder, as vLLM and SGLang do.
    """

    _: KW_ONLY
    convert: Convert | None = None

    def bring(self, trainer: Any) -> None:
        """Bring the weights to the pool, unless it has those of this step. All processes must call it.

        Raises:
            TrainerMismatch: The trainer trains an adapter without a name, or the name is that of none.
            CliError: The update failed on a backend.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The checkpoint cannot be written.
        """
        step = int(trainer.state.global_step)
        if step == self.step:
            return
        accelerator = trainer.accelerator
        # With sharded weights, every process takes part in collecting them.
        weights = accelerator.get_state_dict(trainer.model)
        if accelerator.is_main_process:
            self.bring_step(step, lambda folder: self._save(trainer, weights, folder))
        accelerator.wait_for_everyone()
        self.step = step

    def _save(self, trainer: Any, weights: Any, folder: Path) -> None:
        saved = folder if self.convert is None else folder.with_name(f"{folder.name}.hf")
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.save_pretrained(saved, state_dict=weights)
        trainer.processing_class.save_pretrained(saved)
        if self.convert is not None:
            self.convert(saved, folder)
            shutil.rmtree(saved)
