"""verl: the `AgentLoopOutput` of an agent loop, a padded `DataProto` batch, and weight updates (verl 0.9)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rollyard_crds.trajectory import Trajectory

from rollyard.integrations.errors import TrainerMismatch
from rollyard.integrations.sequences import TrainingSequence, check_one_each, is_scored, sequences, step_of
from rollyard.integrations.weights import PoolWeights, link_files

Several = Literal["refuse", "rows"]
_BESIDE: Final = (
    "rollout_id",
    "task_id",
    "status",
    "policy_versions",
    "min_global_steps",
    "max_global_steps",
)
"""The extra fields of an output that a batch has in addition to its tensors."""
_ONE_EACH: Final = (
    ", and verl takes one sequence of each: use data_proto(several='rows'), or keep the chat template from "
    "rewriting history"
)


def output_fields(trajectories: Sequence[Trajectory], *, pad_token_id: int) -> list[dict[str, Any]]:
    """Return the fields of an `AgentLoopOutput` for each sequence, in the order of the rollouts.

    `response_mask` and `response_logprobs` have one entry for each token of `response_ids`. A rollout without
    a reward has mask 0 and the mean reward of its group. Every sequence of a rollout carries the reward.

    Args:
        trajectories: The rollouts, whole groups of them.
        pad_token_id: The token of rows that hold no token of their rollout.
    """
    return [_fields(row) for row in sequences(trajectories, pad_token_id=pad_token_id)]


def agent_loop_output(trajectory: Trajectory, *, pad_token_id: int, reward: float | None = None) -> Any:
    """Return the `AgentLoopOutput` of one rollout, for the `run` of an `AgentLoopBase`.

    Args:
        trajectory: The rollout, which has one segment.
        pad_token_id: The token of an output that holds no token of its rollout.
        reward: The score of a rollout that has no reward; its mask is 0. An agent loop sees one rollout and
            not its group, so only the caller can know a score that does not move the baseline.

    Raises:
        TrainerMismatch: The rollout has no reward, and `reward` is None (`RolloutUnscored`): play its task
            again. Or it has several segments, and verl takes one output for each run (`SegmentsRefused`).
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    rows = sequences([trajectory], pad_token_id=pad_token_id)
    check_one_each(rows, _ONE_EACH)
    fields = _fields(rows[0])
    if not is_scored(trajectory):
        if reward is None:
            raise TrainerMismatch(
                f"rollout {trajectory.id} has no reward ({trajectory.status}, {trajectory.reason}): play its "
                f"task again, or give the reward to write down",
                reason="RolloutUnscored",
            )
        fields["reward_score"] = reward
    return AgentLoopOutput(**{**fields, "metrics": AgentLoopMetrics(**fields["metrics"])})


def data_proto(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    several: Several = "refuse",
) -> Any:
    """Return a `DataProto` with a row for each rollout, as verl's own agent loops build it.

    Tensors, with B rows, P tokens of prompt (padded left) and R of response (padded right): `prompts` (B, P),
    `responses`, `response_mask`, `rollout_log_probs` (float32, nats) and `rm_scores` (float32, the reward at
    the last token) (B, R), `input_ids`, `attention_mask` and `position_ids` (B, P + R). In addition: `uid`
    (the group), `rollout_id`, `task_id`, `status`, `policy_versions`, `min_global_steps`, `max_global_steps`
    and `__num_turns__`.

    Args:
        trajectories: The rollouts, whole groups of them.
        pad_token_id: The tokenizer's padding token.
        prompt_length: P. By default it is the longest prompt.
        response_length: R. By default it is the longest response.
        several: What happens to a rollout with several segments. `rows` gives each segment a row with the
            same `uid` and reward; such a rollout then counts once for each in the baseline of its group.

    Raises:
        TrainerMismatch: A rollout has several segments, and `several` is `refuse` (`SegmentsRefused`); or a
            prompt or a response is longer than P or R. Nothing is ever cut.
        ValueError: There is no rollout.
    """
    import numpy as np
    import torch
    from verl.protocol import DataProto

    if not trajectories:
        raise ValueError("trajectories: give at least one rollout")
    rows = sequences(trajectories, pad_token_id=pad_token_id)
    if several == "refuse":
        check_one_each(rows, _ONE_EACH)
    wide = _width([len(row.segment.prompt_ids) for row in rows], prompt_length, "prompt", rows)
    long = _width([len(row.segment.response_ids) for row in rows], response_length, "response", rows)
    ids = torch.full((len(rows), wide + long), pad_token_id, dtype=torch.long)
    attention = torch.zeros((len(rows), wide + long), dtype=torch.long)
    mask = torch.zeros((len(rows), long), dtype=torch.long)
    logprobs = torch.zeros((len(rows), long), dtype=torch.float32)
    scores = torch.zeros((len(rows), long), dtype=torch.float32)
    for index, row in enumerate(rows):
        begin, end = wide - len(row.segment.prompt_ids), wide + len(row.segment.response_ids)
        ids[index, begin:end] = torch.tensor(row.token_ids, dtype=torch.long)
        attention[index, begin:end] = 1
        mask[index, : end - wide] = torch.tensor(row.loss_mask, dtype=torch.long)
        logprobs[index, : end - wide] = torch.tensor(row.segment.logprobs, dtype=torch.float32)
        scores[index, end - wide - 1] = row.reward
    fields = [_fields(row) for row in rows]
    objects: dict[str, Any] = {
        name: np.fromiter((item["extra_fields"][name] for item in fields), dtype=object) for name in _BESIDE
    }
    objects["uid"] = np.fromiter((row.trajectory.group_id for row in rows), dtype=object)
    objects["__num_turns__"] = np.array([item["num_turns"] for item in fields], dtype=np.int32)
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :wide].clone(),
            "responses": ids[:, wide:].clone(),
            "response_mask": mask,
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": torch.clip(torch.cumsum(attention, dim=-1) - 1, min=0),
            "rollout_log_probs": logprobs,
            "rm_scores": scores,
        },
        non_tensors=objects,
        meta_info={"metrics": [item["metrics"] for item in fields], "reward_extra_keys": []},
    )


def _fields(row: TrainingSequence) -> dict[str, Any]:
    trajectory, segment = row.trajectory, row.segment
    steps = [step for step in map(step_of, row.versions) if step is not None]
    return {
        "prompt_ids": list(segment.prompt_ids),
        "response_ids": list(segment.response_ids),
        "response_mask": row.loss_mask,
        "response_logprobs": list(segment.logprobs),
        "reward_score": row.reward,
        "num_turns": sum(message.role != "system" for message in trajectory.messages),
        "metrics": {
            "generate_sequences": trajectory.timings.model_seconds,
            "tool_calls": trajectory.timings.tool_seconds,
            "compute_score": trajectory.timings.eval.active_seconds,
            "num_preempted": -1,
        },
        "extra_fields": {
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
            "policy_versions": row.versions,
            "rollout_id": trajectory.id,
            "task_id": trajectory.task_id,
            "segment": row.index,
            "status": trajectory.status,
            "reason": trajectory.reason,
            "truncated": trajectory.truncated,
            "truncated_reason": trajectory.truncated_reason,
            "reward_extra_info": dict(trajectory.reward_components),
        },
    }


def _width(lengths: list[int], limit: int | None, part: str, rows: Sequence[TrainingSequence]) -> int:
    longest = max(lengths)
    if limit is not None and longest > limit:
        name = rows[lengths.index(longest)].trajectory.id
        raise TrainerMismatch(
            f"rollout {name} has a {part} of {longest} tokens, and {part}_length is {limit}: raise it, or "
            f"lower the job's agent.maxContextTokens"
        )
    return longest if limit is None else limit


@dataclass
class VerlWeights(PoolWeights):
    """Brings the checkpoints of verl's FSDP workers to every backend of a pool.

    A `CheckpointCallback` calls it, which `trainer.checkpoint_callback_class` names. Whole models need
    `hf_model` among `actor.checkpoint.save_contents`. An adapter is put together from verl's shards.
    """

    def bring(self, checkpoint: str | Path, *, async_save: bool = False) -> None:
        """Bring the weights of a `global_step_N` folder to the pool, unless it has them.

        Raises:
            TrainerMismatch: The checkpoint has no weights that a server could load, or it is an adapter and
                none was named, or the other way round.
            CliError: The update failed on a backend.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The folder cannot be written.
        """
        if async_save:
            raise TrainerMismatch(
                "verl still writes the checkpoint, and the pool needs whole ones: set "
                "actor_rollout_ref.actor.checkpoint.async_save to false"
            )
        actor = Path(checkpoint) / "actor"
        step = int(Path(checkpoint).name.removeprefix("global_step_"))
        self.bring_step(step, lambda folder: self._fill(actor, folder))

    def bring_resumed(self, config: Any) -> None:
        """Bring the checkpoint from which verl is about to resume, if there is one.

        If there is none and `at_once` is set, the folder of the model is brought.

        Args:
            config: verl's whole configuration.

        Raises:
            TrainerMismatch: As `bring` says.
            CliError: The update failed on a backend.
            RollyardError: The control plane refuses the update, or it takes longer than `timeout`.
            OSError: The folder cannot be read or written.
        """
        from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

        checkpoint = None
        if config.trainer.resume_mode == "auto":
            checkpoint = find_latest_ckpt_path(str(Path(config.trainer.default_local_dir).absolute()))
        elif config.trainer.resume_mode == "resume_path":
            checkpoint = config.trainer.resume_from_path
        if checkpoint is not None:
            self.bring(Path(checkpoint).absolute())
        elif not self.adapter:
            model = Path(config.actor_rollout_ref.model.path)
            self.bring_step(0, lambda folder: link_files(model.iterdir(), folder))

    def _fill(self, actor: Path, folder: Path) -> None:
        if self.adapter:
            _write_adapter(actor, folder)
            return
        saved = actor / "huggingface"
        if (actor / "lora_train_meta.json").is_file():
            raise TrainerMismatch(
                "verl trains an adapter, which the pool gets under a name: give VerlWeights adapter='NAME'",
                reason="AdapterMismatch",
            )
        if not any(saved.glob("*.safetensors")):
            raise TrainerMismatch(
                f"{saved} has no weights: actor_rollout_ref.actor.checkpoint.save_contents must have hf_model"
            )
        link_files(saved.iterdir(), folder)


def _write_adapter(actor: Path, folder: Path) -> None:
    """Put the adapter together whose shards are in a checkpoint of verl's FSDP workers."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    merger = FSDPModelMerger(
        ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(actor),
            hf_model_config_path=str(actor / "huggingface"),
            target_dir=str(folder),
        )
    )
    # verl would also write the model that the adapter belongs to.
    merger.save_hf_model_and_tokenizer = merger.save_lora_adapter
    merger.merge_and_save()
    written = folder / "lora_adapter"
    if not written.is_dir():
        raise TrainerMismatch(
            f"VerlWeights has adapter=, and {actor} holds no adapter: leave it out, or let verl train one "
            "(actor_rollout_ref.model.lora_rank)",
            reason="AdapterMismatch",
        )
    link_files(written.iterdir(), folder)
    shutil.rmtree(written)
