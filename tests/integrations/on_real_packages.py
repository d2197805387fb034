"""Gives the classes of verl and SkyRL the rollouts of a file, and prints what they hold then.

    python on_real_packages.py ROLLOUTS.jsonl PAD > seen.json

Each line of the file is a list of rollouts, which are one batch.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types
import typing
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import typing_extensions

# SkyRL 0.3 gives pydantic a TypedDict of typing, which pydantic takes from Python 3.12 on.
typing.TypedDict = typing_extensions.TypedDict

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "examples" / "trainers" / name) for name in ("verl", "skyrl")]

import torch  # noqa: E402
from rollyard.integrations import nemo, skyrl, verl  # noqa: E402
from rollyard.integrations.errors import TrainerMismatch  # noqa: E402
from rollyard.integrations.sequences import is_scored  # noqa: E402
from rollyard_crds.trajectory import Trajectory  # noqa: E402
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput  # noqa: E402
from verl.protocol import DataProto  # noqa: E402

Row = tuple[str, list[int], list[int], list[float], int]
"""A row to learn from: rollout, ids of the response, mask, log-probabilities, length of the prompt."""


def of_agent_loops(batch: list[Trajectory], pad: int) -> list[Row] | None:
    """Return the rows of verl's outputs as verl hands them on, or None if a rollout was refused."""
    rows = []
    for one in batch:
        try:
            output = verl.agent_loop_output(one, pad_token_id=pad, reward=None if is_scored(one) else 0.25)
        except TrainerMismatch:
            return None
        assert isinstance(output, AgentLoopOutput)
        seen = output.as_dict()
        assert float(seen["rm_scores"].sum()) == (one.reward if is_scored(one) else 0.25)
        assert seen["responses"].shape == seen["response_mask"].shape == seen["rollout_log_probs"].shape
        rows.append(
            (
                one.id,
                seen["responses"].tolist(),
                seen["response_mask"].tolist(),
                seen["rollout_log_probs"].tolist(),
                len(seen["prompts"]),
            )
        )
    return rows


def of_data_proto(batch: list[Trajectory], pad: int) -> list[Row]:
    """Return the rows of verl's padded batch, read back through its own selection and its attention mask."""
    proto = verl.data_proto(batch, pad_token_id=pad, several="rows")
    assert isinstance(proto, DataProto)
    # verl splits, joins and reorders batches; what is wrong with the shapes or the types fails here.
    proto = DataProto.concat([proto[:1], proto[1:]]) if len(proto) > 1 else proto
    tensors = proto.batch
    prompt = tensors["prompts"].shape[1]
    rows = []
    for place in range(len(proto)):
        attention = tensors["attention_mask"][place].bool()
        response = attention[prompt:]
        assert torch.equal(tensors["input_ids"][place, prompt:], tensors["responses"][place])
        assert tensors["position_ids"][place][attention].tolist() == list(range(int(attention.sum())))
        assert not tensors["response_mask"][place][~response].any()
        last = int(response.sum()) - 1
        assert tensors["rm_scores"][place].nonzero().flatten().tolist() in ([], [last])
        rows.append(
            (
                proto.non_tensor_batch["rollout_id"][place],
                tensors["responses"][place][response].tolist(),
                tensors["response_mask"][place][response].tolist(),
                tensors["rollout_log_probs"][place][response].tolist(),
                int(attention[:prompt].sum()),
            )
        )
    return rows


def of_skyrl(batch: list[Trajectory], pad: int) -> list[Row]:
    """Return the rows of SkyRL's output, which its own check has accepted."""
    output = skyrl.generator_output(batch, pad_token_id=pad, step_wise=True)
    assert set(output) <= set(GeneratorOutput.__annotations__)
    validate_generator_output(len(batch), typing.cast(Any, output), step_wise=True)
    assert all(isinstance(one, TrajectoryID) for one in output["trajectory_ids"])
    if all(output["is_last_step"]):
        single = skyrl.generator_output(batch, pad_token_id=pad)
        validate_generator_output(len(batch), typing.cast(Any, single))
    else:
        try:
            skyrl.generator_output(batch, pad_token_id=pad)
        except TrainerMismatch:
            pass
        else:
            raise AssertionError("a rollout of several segments was not refused")
    return [
        (record["rollout_id"], ids, mask, logprobs, len(prompt))
        for record, ids, mask, logprobs, prompt in zip(
            output["env_metrics"],
            output["response_ids"],
            output["loss_masks"],
            output["rollout_logprobs"],
            output["prompt_token_ids"],
            strict=True,
        )
    ]


def of_nemo_rl(batch: list[Trajectory], pad: int) -> list[Row]:
    """Return the rows of NeMo-RL's message logs, joined as NeMo-RL joins them."""
    rows = []
    for spec in nemo.datum_specs(batch, pad_token_id=pad, task_name="shell"):
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for message in spec["message_log"]:
            tokens = message["token_ids"].tolist()
            assert message["token_ids"].dtype == torch.int64
            sampled = message["role"] == "assistant"
            ids += tokens
            mask += [int(sampled and spec["loss_multiplier"] > 0)] * len(tokens)
            logprobs += message["generation_logprobs"].tolist() if sampled else [0.0] * len(tokens)
        assert spec["length"] == len(ids)
        rows.append((spec["extra_env_info"]["rollout_id"], ids, mask, logprobs, 0))
    return rows


def of_examples(batch: list[Trajectory], pad: int) -> None:
    """Let the classes of examples/trainers play a batch whose rollouts are given."""
    import rollyard_loop
    import train
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    task = json.dumps({"id": "a", "prompt": "?"})
    player = types.SimpleNamespace(play_each=lambda tasks: batch)
    generator = train.RollyardGenerator(typing.cast(Any, player), pad, step_wise=True)
    names = [TrajectoryID(one.group_id, one.sample_index) for one in batch]
    asked = {"env_extras": [{"task": task}] * len(batch), "trajectory_ids": names}
    output = asyncio.run(generator.generate(asked))
    validate_generator_output(len(batch), output, step_wise=True)

    assert _agent_loop_registry["rollyard"]["_target_"].endswith("RollyardAgentLoop")
    scored = [one for one in batch if is_scored(one) and len(one.segments) == 1]
    for one in scored:
        # The first try has no reward, so the task is played again.
        left = [one.model_copy(update={"status": "failed", "reward": None}), one]

        def start(tasks: list[Any], left: list[Trajectory] = left) -> list[Future[list[Trajectory]]]:
            future: Future[list[Trajectory]] = Future()
            future.set_result([left.pop(0)])
            return [future]

        rollyard_loop.player = lambda start=start: types.SimpleNamespace(start=start)
        loop = object.__new__(rollyard_loop.RollyardAgentLoop)
        loop.tokenizer = types.SimpleNamespace(pad_token_id=pad)
        seen = asyncio.run(loop.run({}, extra_info={"task": task}))
        assert isinstance(seen, AgentLoopOutput)
        assert (seen.reward_score, left) == (one.reward, [])


def main() -> None:
    """Print one JSON line for each batch."""
    path, pad = Path(sys.argv[1]), int(sys.argv[2])
    for line in path.read_text().splitlines():
        batch = [Trajectory.model_validate(one) for one in json.loads(line)]
        of_examples(batch, pad)
        seen = {
            "agent_loops": of_agent_loops(batch, pad),
            "data_proto": of_data_proto(batch, pad),
            "skyrl": of_skyrl(batch, pad),
            "nemo_rl": of_nemo_rl(batch, pad),
        }
        print(json.dumps(seen))


if __name__ == "__main__":
    main()
