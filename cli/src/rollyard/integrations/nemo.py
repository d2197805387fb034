"""NeMo-Gym: answers of `POST /run`. NeMo-RL: rows of the type `DatumSpec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from rollyard_crds.trajectory import Trajectory

from rollyard.integrations.sequences import TrainingSequence, rewards, sequences

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
