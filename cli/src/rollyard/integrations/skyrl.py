"""SkyRL: the `GeneratorOutput` that a generator returns to the trainer, and weight updates.

The names are those of `skyrl.train.generators.base` (SkyRL 0.3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollyard_crds.trajectory import Timings, Trajectory

from rollyard.integrations.sequences import TrainingSequence, check_one_each, is_scored, sequences
from rollyard.integrations.weights import PoolWeights


def generator_output(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    step_wise: bool = False,
    trajectory_ids: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Return a `GeneratorOutput` with the rows of these rollouts, in their order.

    Each row has `prompt_token_ids`, `response_ids` and, as long as the response, `loss_masks` and
    `rollout_logprobs`. Rollouts that have no reward because their infrastructure failed keep their row: its
    mask is 0 everywhere, its reward is the mean of its group, and its stop reason is `error`.

    Args:
        trajectories: The rollouts in the order of the generator's input.
        pad_token_id: The token of rows that hold no token of their rollout.
        step_wise: Give a rollout of several segments a row for each, as SkyRL's `step_wise_trajectories`
            needs. The reward is that of the last row, and 0.0 in the rows before it.
        trajectory_ids: The `TrajectoryID` of each rollout, as the generator's input has them. By default they
            are the rollout's group and the number of its sample.

    Raises:
        TrainerMismatch: A rollout has several segments (`SegmentsRefused`), and `step_wise` is False.
        ValueError: There is no rollout.
    """
    if not trajectories:
        raise ValueError("trajectories: SkyRL takes no empty output; give at least one rollout")
    rows = sequences(trajectories, pad_token_id=pad_token_id)
    ids = trajectory_ids or [_trajectory_id(trajectory) for trajectory in trajectories]
    names = {id(trajectory): name for trajectory, name in zip(trajectories, ids, strict=True)}
    if not step_wise:
        check_one_each(
            rows,
            ": set step_wise=True here and generator.step_wise_trajectories=true in SkyRL, or keep its chat "
            "template from rewriting history",
        )
    return {
        "prompt_token_ids": [list(row.segment.prompt_ids) for row in rows],
        "response_ids": [list(row.segment.response_ids) for row in rows],
        "rewards": [row.reward if row.last else 0.0 for row in rows],
        "loss_masks": [row.loss_mask for row in rows],
        "stop_reasons": [_stop_reason(row) for row in rows],
        "rollout_metrics": _metrics(trajectories),
        "rollout_logprobs": [list(row.segment.logprobs) for row in rows],
        "trajectory_ids": [names[id(row.trajectory)] for row in rows],
        "trajectory_generation_times": [_seconds(trajectory.timings) for trajectory in trajectories],
        "rollout_expert_indices": None,
        "is_last_step": [row.last for row in rows] if step_wise else None,
        "env_metrics": [_record(row) for row in rows],
        "pixel_values": None,
        "image_grid_thw": None,
    }


def _trajectory_id(trajectory: Trajectory) -> Any:
    from skyrl.train.generators.base import TrajectoryID

    # SkyRL computes advantages over rows with the same instance, so it must be the group and not the task,
    # which several groups of a stream may have.
    return TrajectoryID(instance_id=trajectory.group_id, repetition_id=trajectory.sample_index)


def _stop_reason(row: TrainingSequence) -> str:
    if not is_scored(row.trajectory):
        return "error"
    return "length" if row.trajectory.truncated else "stop"


def _seconds(timings: Timings) -> float:
    return sum(stage.active_seconds for stage in (timings.init, timings.run, timings.eval))


def _record(row: TrainingSequence) -> dict[str, Any]:
    trajectory = row.trajectory
    return {
        "rollout_id": trajectory.id,
        "task_id": trajectory.task_id,
        "segment": row.index,
        "status": trajectory.status,
        "reason": row.why,
        "policy_versions": row.versions,
        **{f"reward/{name}": value for name, value in trajectory.reward_components.items()},
    }


def _metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    scored = [trajectory for trajectory in trajectories if is_scored(trajectory)]
    return {
        "rollyard/rollouts": float(len(trajectories)),
        "rollyard/unscored": float(len(trajectories) - len(scored)),
        "rollyard/truncated": float(sum(trajectory.truncated for trajectory in scored)),
        "rollyard/sampled_tokens": float(sum(trajectory.sampled_tokens for trajectory in trajectories)),
        "rollyard/turns": float(sum(1 for trajectory in trajectories for _ in trajectory.every_turn)),
    }


@dataclass
class SkyrlWeights(PoolWeights):
    """Brings the policy of a SkyRL trainer to every backend of a pool, and not to SkyRL's own engines."""

    def install(self, trainer: Any) -> None:
        """Let the trainer bring its weights to the pool whenever it would send them to its engines.

        A subclass of SkyRL's trainer calls this as its `init_weight_sync_state`, which the trainer calls once
        when its models are there. SkyRL's simulated trainer replaces the same two functions.
        """
        trainer.dispatch.save_weights_for_sampler = partial(self.bring, trainer)

    async def bring(self, trainer: Any, model_id: str | None = None) -> None:
        """Bring the weights of the trainer's step to the pool, unless it has them.

        Raises:
            TrainerMismatch: The trainer trains an adapter without a name, or the name is that of none.
            CliError: The update failed on a backend.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The folder cannot be written.
        """
        save = partial(trainer.dispatch.save_hf_model, "policy")
        await asyncio.to_thread(
            self.bring_step, int(trainer.global_step), lambda folder: save(str(folder), trainer.tokenizer)
        )
