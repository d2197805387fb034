"""prime-rl: rows of `TrainingSample`, as the orchestrator sends them to the trainer.

prime-rl packs the struct as an array, in which the order of the fields matters. The rows are therefore made
by the installed class, with fields given by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollyard_crds.trajectory import Trajectory

from rollyard.integrations.errors import TrainerMismatch
from rollyard.integrations.sequences import group_of, mean_rewards, sequences

TOKEN_FIELDS: Final = ("token_ids", "mask", "logprobs", "temperatures")
"""The fields that have one entry for each token, in the order of the struct."""


def sample_fields(
    trajectories: Sequence[Trajectory],
    *,
    env_name: str,
    advantages: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return the fields of a `TrainingSample` for each segment with sampled tokens.

    `token_ids`, `mask`, `logprobs` and `temperatures` have one entry for each token of prompt and response.
    Rollouts without a reward give no row, because prime-rl takes any number of rows.

    Args:
        trajectories: The rollouts, whole groups of them.
        env_name: The name of the environment in prime-rl's configuration.
        advantages: The advantage of each rollout, by its id. By default it is the reward minus the mean
            reward of the group, as prime-rl computes it. The rows of one rollout share it.

    Raises:
        TrainerMismatch: A rollout does not say at which temperature it was sampled.
    """
    means = mean_rewards(trajectories)
    samples = []
    for row in sequences(trajectories):
        if not row.trained:
            continue
        trajectory, segment = row.trajectory, row.segment
        if trajectory.sampling is None:
            raise TrainerMismatch(
                f"rollout {trajectory.id} has no `sampling`; prime-rl needs its temperature"
            )
        if advantages is None:
            advantage = row.reward - means[group_of(trajectory)]
        else:
            advantage = advantages[trajectory.id]
        prompt = len(segment.prompt_ids)
        length = prompt + len(segment.response_ids)
        samples.append(
            {
                "token_ids": row.token_ids,
                "mask": [False] * prompt + [bool(mask) for mask in row.loss_mask],
                "logprobs": [0.0] * prompt + list(segment.logprobs),
                "temperatures": [trajectory.sampling.temperature] * length,
                "env_name": env_name,
                "ref_logprobs": None,
                "reward": row.reward,
                "advantage": advantage,
                "sample_id": f"{trajectory.id}/{row.index}",
            }
        )
    return samples


def training_samples(trajectories: Sequence[Trajectory], **options: Any) -> list[Any]:
    """Return `TrainingSample` objects. The arguments are those of `sample_fields`.

    If the struct needs an advantage for each token, it is repeated over the row.

    Raises:
        TrainerMismatch: The installed `TrainingSample` lacks a field that every row needs.
    """
    from prime_rl.transport import types

    made_of = types.TrainingSample
    names = frozenset(made_of.__struct_fields__)
    missing = [name for name in (*TOKEN_FIELDS, "env_name") if name not in names]
    if missing:
        raise TrainerMismatch(
            f"prime-rl's TrainingSample has no {', '.join(missing)}; it is too old, update prime-rl"
        )
    if hasattr(types, "TrainingAdvantage") or not names & {"advantage", "advantages"}:
        raise TrainerMismatch(
            "prime-rl's TrainingSample takes advantages in a form that this release of Rollyard does not "
            "know; use `sample_fields`"
        )
    samples = []
    for row in sample_fields(trajectories, **options):
        row["advantages"] = [row["advantage"]] * len(row["token_ids"])
        samples.append(made_of(**{name: value for name, value in row.items() if name in names}))
    return samples
