"""NeMo-Gym: answers of `POST /run`. NeMo-RL: rows of the type `DatumSpec`, and weight updates."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from rollyard_crds.trajectory import Trajectory

from rollyard.integrations.errors import TrainerMismatch
from rollyard.integrations.sequences import TrainingSequence, rewards, sequences
from rollyard.integrations.weights import PoolWeights, link_files

Decode = Callable[[Sequence[int]], str]


def run_answers(
    trajectory: Trajectory, *, model: str = "policy", decode: Decode | None = None
) -> list[dict[str, Any]]:
    """Return what NeMo-Gym's `POST /run` answers for a rollout: one object for each segment.

    The output of the response has an assistant message for each stretch of sampled tokens. It carries
    `prompt_token_ids` (all ids before the stretch, so each begins with the ids of the one before),
    `generation_token_ids` and `generation_log_probs`. Most rollouts have one segment, and therefore one
    answer.

    A rollout without a reward has `mask_sample` set and the reward 0.0, which NeMo-Gym leaves out of scores.
    It carries no token ids.

    Args:
        trajectory: The rollout.
        model: The name of the policy's model in the response.
        decode: Makes the text of a message from its token ids. Without it the text is empty; trainers read
            the ids.
    """
    rows: list[TrainingSequence | None] = [*sequences([trajectory])]
    prompt = [
        {"role": message.role, "content": message.content, "type": "message"}
        for message in _before_the_policy(trajectory)
    ]
    answers = []
    for row in rows or [None]:
        items = [] if row is None or not row.trained else _items(row, decode)
        answers.append(
            {
                "responses_create_params": {"input": prompt},
                "response": {
                    "id": trajectory.id if row is None else f"{trajectory.id}/{row.index}",
                    "object": "response",
                    "created_at": 0.0,
                    "model": model,
                    "output": items,
                    "parallel_tool_calls": False,
                    "tool_choice": "auto",
                    "tools": [],
                    "status": "incomplete" if trajectory.truncated else "completed",
                },
                "reward": rewards([trajectory])[0],
                "mask_sample": row is None or not row.trained,
                "failure_reason": trajectory.reason or trajectory.message,
                "truncated_reason": trajectory.truncated_reason,
                "policy_versions": [] if row is None else row.versions,
                "reward_components": dict(trajectory.reward_components),
            }
        )
    return answers


def datum_specs(
    trajectories: Sequence[Trajectory], *, pad_token_id: int, task_name: str
) -> list[dict[str, Any]]:
    """Return NeMo-RL's `DatumSpec` rows, one for each segment, with tensors of token ids.

    In `message_log`, each stretch of sampled tokens is an `assistant` message with `generation_logprobs`, and
    what comes before it is a `user` message: NeMo-RL trains on assistant messages alone. A last `user`
    message holds what follows the last sampled token. `loss_multiplier` is 0.0 for a rollout without a
    reward, whose `total_reward` is the mean of its group. `idx` is the group's number.

    Args:
        trajectories: The rollouts, whole groups of them.
        pad_token_id: The token of rows that hold no token of their rollout.
        task_name: The name of the environment in NeMo-RL's configuration.
    """
    import torch

    specs = []
    groups: dict[str, int] = {}
    for row in sequences(trajectories, pad_token_id=pad_token_id):
        trajectory = row.trajectory
        log: list[dict[str, Any]] = []
        for sampled, ids, logprobs in _pieces(row):
            message: dict[str, Any] = {
                "role": "assistant" if sampled else "user",
                "content": "",
                "token_ids": torch.tensor(ids, dtype=torch.int64),
            }
            if sampled:
                message["generation_logprobs"] = torch.tensor(logprobs, dtype=torch.float32)
            log.append(message)
        specs.append(
            {
                "message_log": log,
                "length": len(row.token_ids),
                "extra_env_info": {
                    "rollout_id": trajectory.id,
                    "task_id": trajectory.task_id,
                    "segment": row.index,
                    "status": trajectory.status,
                    "reason": trajectory.reason,
                    "truncated": trajectory.truncated,
                    "policy_versions": list(row.segment.policy_versions),
                    "reward_components": dict(trajectory.reward_components),
                },
                "loss_multiplier": 1.0 if row.trained else 0.0,
                "idx": groups.setdefault(trajectory.group_id, len(groups)),
                "task_name": task_name,
                "total_reward": row.reward,
            }
        )
    return specs


def _pieces(row: TrainingSequence) -> list[tuple[bool, list[int], list[float]]]:
    segment = row.segment
    pieces: list[tuple[bool, list[int], list[float]]] = []
    before, at = list(segment.prompt_ids), 0
    for begin, end in row.spans:
        pieces.append((False, before + segment.response_ids[at:begin], []))
        pieces.append((True, segment.response_ids[begin:end], segment.logprobs[begin:end]))
        before, at = [], end
    rest = before + segment.response_ids[at:]
    if rest:
        pieces.append((False, rest, []))
    return pieces


def _items(row: TrainingSequence, decode: Decode | None) -> list[dict[str, Any]]:
    segment = row.segment
    items = []
    for number, (begin, end) in enumerate(row.spans):
        ids = segment.response_ids[begin:end]
        text = "" if decode is None else decode(ids)
        items.append(
            {
                "id": f"{row.trajectory.id}/{row.index}/{number}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
                "prompt_token_ids": [*segment.prompt_ids, *segment.response_ids[:begin]],
                "generation_token_ids": list(ids),
                "generation_log_probs": list(segment.logprobs[begin:end]),
            }
        )
    return items


def _before_the_policy(trajectory: Trajectory) -> list[Any]:
    return list(takewhile(lambda message: message.role in ("system", "user"), trajectory.messages))


@dataclass
class NemoWeights(PoolWeights):
    """A `WeightSynchronizer` of NeMo-RL that brings the policy to every backend of a pool.

    `setup` returns the policy and its generation. Give it to the latter, and NeMo-RL calls it whenever it
    would refit its own engines: `policy_generation.weight_synchronizer = NemoWeights(…)`.

    Args:
        policy: NeMo-RL's policy, on DTensor workers of the second version.
        checkpointing: The section `checkpointing` of NeMo-RL's configuration. Whole models need
            `save_consolidated: true`, and both kinds `model_save_format: safetensors`.
        completed: The steps that were completed before, which is `current_step` of NeMo-RL's saved state.
    """

    _: KW_ONLY
    policy: Any
    checkpointing: Mapping[str, Any]
    completed: int = 0

    def __post_init__(self, at_once: bool) -> None:
        super().__post_init__(at_once)
        # A resumed trainer syncs before its first step, and so does a new one if the pool is stale.
        self._next = self.completed + (0 if self.is_stale else 1)

    @property
    def is_stale(self) -> bool:
        """Whether the pool must get weights before the first rollouts."""
        return self.step is None or self.step < self.completed

    def init_communicator(self) -> None:
        """Do nothing: the weights are files."""

    def sync_weights(
        self, *, timer: Any = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Bring the weights after each step to the pool. NeMo-RL calls this.

        Raises:
            TrainerMismatch: The policy saves nothing that a server could load, or an adapter and none was
                named, or the other way round.
            CliError: The update failed on a backend.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The folder cannot be written.
        """
        self.bring_step(self._next, self._save)
        self._next += 1
        return {}

    def shutdown(self) -> None:
        """Do nothing: the folders that the servers have loaded stay."""

    def _save(self, folder: Path) -> None:
        # NeMo-RL takes the folder above `weights` for that of the checkpoint.
        parts = folder.with_name(f"{folder.name}.parts")
        weights = parts / "weights"
        try:
            self.policy.save_checkpoint(
                weights_path=str(weights),
                tokenizer_path=str(parts / "tokenizer"),
                checkpointing_cfg={**self.checkpointing, "is_async": False},
            )
            model = weights / "model"
            saved = model if (model / "adapter_config.json").exists() else model / "consolidated"
            if not any(saved.glob("*.safetensors")):
                raise TrainerMismatch(
                    f"NeMo-RL saved no weights in {saved}: set checkpointing.save_consolidated to true and "
                    "checkpointing.model_save_format to safetensors, and policy.dtensor_cfg._v2 to true"
                )
            shutil.move(saved, folder)
            link_files((parts / "tokenizer").iterdir(), folder)
        finally:
            shutil.rmtree(parts, ignore_errors=True)
