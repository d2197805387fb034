"""prime-rl: rows of `TrainingSample`, as the orchestrator sends them to the trainer, and weight updates.

The names are those of prime-rl 0.8.

prime-rl packs the struct as an array, in which the order of the fields matters. The rows are therefore made
by the installed class, with fields given by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final

from rollyard_crds.trajectory import Trajectory

from rollyard.integrations.errors import TrainerMismatch
from rollyard.integrations.sequences import group_of, mean_rewards, sequences
from rollyard.integrations.weights import PoolWeights, link_files, wait_for

TOKEN_FIELDS: Final = ("token_ids", "mask", "logprobs", "temperatures")
"""The fields that have one entry for each token, in the order of the struct."""
_OTHER_WEIGHTS: Final = (".bin", ".gguf", ".pt", ".pth")
"""The endings of files of weights beside safetensors."""


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


@dataclass
class PrimeRlWeights(PoolWeights):
    """Brings the folders that prime-rl's trainer broadcasts to every backend of a pool.

    The trainer writes them with `weight_broadcast.type = "filesystem"`.

    Args:
        model: The folder of the model that the trainer began with. Its configuration and its tokenizer
            complete the folders of the trainer, which hold weights alone.
    """

    _: KW_ONLY
    model: str | Path

    def __post_init__(self, at_once: bool) -> None:
        super().__post_init__(at_once)
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(f"model is {self.model}; give the folder of a model, which has a config.json")

    def bring(self, run: str | Path, step: int) -> None:
        """Wait until the trainer has written the weights of a step, and bring them, unless the pool has them.

        Args:
            run: The folder of the run, such as `outputs/run_default`.
            step: The number of the trainer's step, or 0 for the weights that it began with.

        Raises:
            TrainerMismatch: The trainer trains an adapter without a name, or the name is that of none.
            CliError: The update failed on a backend, or the trainer was not ready within `timeout`.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The folder cannot be written.
        """
        if step == 0:
            self.bring_step(0, lambda folder: link_files(Path(self.model).iterdir(), folder))
            return
        written = Path(run) / "broadcasts" / f"step_{step}"
        marker = written / "STABLE"
        wait_for(marker.exists, self.timeout, f"prime-rl's {marker}")
        self.bring_step(step, lambda folder: self._fill(written, folder))

    def _fill(self, written: Path, folder: Path) -> None:
        link_files((file for file in written.iterdir() if file.name != "STABLE"), folder)
        if not (folder / "adapter_config.json").exists():
            there = {file.name for file in folder.iterdir()}
            link_files((file for file in Path(self.model).iterdir() if _describes(file, there)), folder)


def _describes(file: Path, there: Collection[str]) -> bool:
    """Return whether a file of the model belongs to new weights too: it holds no weights of its own."""
    return file.name not in there and "safetensors" not in file.name and file.suffix not in _OTHER_WEIGHTS
