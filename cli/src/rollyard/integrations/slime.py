"""slime: rows of `slime.utils.types.Sample`, as a rollout function returns them, and weight updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, Final

from rollyard_crds.trajectory import Trajectory

from rollyard.integrations.errors import TrainerMismatch
from rollyard.integrations.sequences import TrainingSequence, is_scored, sequences
from rollyard.integrations.weights import PoolWeights, link_files, wait_for

Decode = Callable[[Sequence[int]], str]
_INDEX: Final = "model.safetensors.index.json"


def sample_fields(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    first_group: int = 0,
    first_index: int = 0,
    labels: Mapping[str, str] | None = None,
    decode: Decode | None = None,
) -> list[list[dict[str, Any]]]:
    """Return the fields of the `Sample` rows of each group, with `status` as its text.

    The rows of one rollout are consecutive, and share `rollout_id` and `index`. `loss_mask` and
    `rollout_log_probs` have `response_length` entries; `tokens` also holds the prompt. A rollout without a
    reward is `failed` or `aborted`, with `remove_sample` set, mask 0, and the mean reward of its group.

    Args:
        trajectories: Whole groups, in any order.
        pad_token_id: The token of rows that hold no token of their rollout.
        first_group: The `group_index` of the first group; further ones count up.
        first_index: The `index` of the first rollout; further ones count up.
        labels: The `label` of each task, by the id of the task.
        decode: Makes the text `response` from token ids. Without it the text is empty; slime trains on
            `tokens` alone.
    """
    groups: dict[str, list[TrainingSequence]] = {}
    for row in sequences(trajectories, pad_token_id=pad_token_id):
        groups.setdefault(row.trajectory.group_id, []).append(row)
    numbers: dict[str, int] = {}
    samples = []
    for index, rows in enumerate(groups.values()):
        rows.sort(key=lambda row: (row.trajectory.sample_index, row.index))
        group = []
        for row in rows:
            number = numbers.setdefault(row.trajectory.id, first_index + len(numbers))
            fields = _fields(row, labels or {}, decode)
            group.append(
                {"group_index": first_group + index, "index": number, "rollout_id": number, **fields}
            )
        samples.append(group)
    return samples


def samples(trajectories: Sequence[Trajectory], **options: Any) -> list[list[Any]]:
    """Return the `Sample` objects of each group. The arguments are those of `sample_fields`.

    Raises:
        TrainerMismatch: The installed slime has a `Sample` without one of the fields.
    """
    from slime.utils.types import Sample

    names = {field.name for field in fields(Sample)}
    groups = sample_fields(trajectories, **options)
    if "rollout_id" not in names:
        _check_one_row_each(groups)
    converted = []
    for group in groups:
        rows = []
        for row in group:
            # Versions without `rollout_id` do not need it if each rollout has one row.
            values = {name: value for name, value in row.items() if name in names or name != "rollout_id"}
            missing = sorted(values.keys() - names)
            if missing:
                raise TrainerMismatch(f"slime's Sample has no {', '.join(missing)}; it is too old or too new")
            rows.append(Sample(**{**values, "status": Sample.Status(values["status"])}))
        converted.append(rows)
    return converted


def _check_one_row_each(groups: list[list[dict[str, Any]]]) -> None:
    for group in groups:
        numbers = [row["rollout_id"] for row in group]
        if len(set(numbers)) < len(numbers):
            raise TrainerMismatch(
                "a rollout has several segments, and this slime's Sample has no rollout_id to keep its rows "
                "together; update slime"
            )


def _fields(row: TrainingSequence, labels: Mapping[str, str], decode: Decode | None) -> dict[str, Any]:
    trajectory, segment = row.trajectory, row.segment
    return {
        "prompt": [message.model_dump(exclude_none=True) for message in trajectory.given],
        "tokens": row.token_ids,
        "response": decode(segment.response_ids) if decode is not None and row.index >= 0 else "",
        "response_length": len(segment.response_ids),
        "label": labels.get(trajectory.task_id),
        "reward": row.reward,
        "loss_mask": row.loss_mask,
        "weight_versions": row.versions,
        "rollout_log_probs": list(segment.logprobs),
        "remove_sample": not row.trained,
        "status": _status(trajectory),
        "metadata": {
            **trajectory.metadata,
            "rollyard": {
                "id": trajectory.id,
                "job": trajectory.job,
                "task_id": trajectory.task_id,
                "segment": row.index,
                "scored": is_scored(trajectory),
                "reason": trajectory.reason,
                "reward_reason": trajectory.reward_reason,
                "truncated_reason": trajectory.truncated_reason,
                "reward_components": dict(trajectory.reward_components),
                "policy_versions": list(segment.policy_versions),
            },
        },
        "session_id": trajectory.id,
    }


def _status(trajectory: Trajectory) -> str:
    if trajectory.status == "cancelled":
        return "aborted"
    if not is_scored(trajectory):
        return "failed"
    return "truncated" if trajectory.truncated else "completed"


@dataclass
class SlimeWeights(PoolWeights):
    """Brings the Hugging Face folders of `--save-hf` to every backend of a pool.

    slime trains whole models, and writes such a folder with each checkpoint: `--save-interval 1`. It removes
    none of them.

    Args:
        lag: The number of rollouts by which the weights may be behind: 0 with slime's train.py, 1 with its
            train_async.py, which begins a rollout while the model is trained on the one before it.
    """

    _: KW_ONLY
    lag: int = 0

    def __post_init__(self, at_once: bool) -> None:
        super().__post_init__(at_once)
        if self.adapter:
            raise ValueError(f"adapter is {self.adapter!r}; slime trains no adapters: leave it out")

    def bring(self, args: Any, rollout_id: int) -> None:
        """Bring the newest weights that slime saved before a rollout to the pool, unless it has them.

        The rollout function calls this first. Before the first folder, the pool has the model of
        `--hf-checkpoint`; with `at_once`, it gets it.

        Args:
            args: slime's arguments.
            rollout_id: The number of the rollout that is about to begin.

        Raises:
            TrainerMismatch: slime does not save such a folder with each rollout.
            CliError: The update failed on a backend, or the folder was not there within `timeout`.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The folder cannot be written.
        """
        if "{rollout_id}" not in (args.save_hf or "") or args.save_interval != 1:
            raise TrainerMismatch(
                f"slime has --save-hf {args.save_hf} and --save-interval {args.save_interval}; for the "
                "weights of each rollout, give --save-hf FOLDER/{rollout_id} --save-interval 1"
            )
        oldest = rollout_id - 1 - self.lag
        numbers = range(rollout_id - 1, max(oldest, 0) - 1, -1)
        folders = {number: Path(args.save_hf.format(rollout_id=number)) for number in numbers}

        def newest() -> int | None:
            return next((number for number, folder in folders.items() if _is_whole(folder)), None)

        if oldest >= 0:
            wait_for(lambda: newest() is not None, self.timeout, f"slime's model in {folders[oldest]}")
        number = newest()
        source = Path(args.hf_checkpoint) if number is None else folders[number]
        step = 0 if number is None else number + 1
        self.bring_step(step, lambda folder: link_files(source.iterdir(), folder))


def _is_whole(folder: Path) -> bool:
    """Return whether slime has written a folder to its end: it writes the index after the other files."""
    try:
        names = json.loads((folder / _INDEX).read_bytes())["weight_map"].values()
    except (FileNotFoundError, ValueError):
        return False
    return all((folder / name).is_file() for name in names)
