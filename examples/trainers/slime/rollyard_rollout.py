"""A rollout function of slime that brings the weights to the pool, and plays its batch on Rollyard.

It is named by `--rollout-function-path rollyard_rollout.generate_rollout`. Evaluation wants another form of
result, so keep slime's own function for it (`--eval-function-path`).

ROLLYARD_JOB names the manifest of a stream whose `samplesPerTask` is `--n-samples-per-prompt`, and
ROLLYARD_POOL the pool. ROLLYARD_WEIGHTS is a folder that its servers read, best on the file system of
`--save-hf`: the files are then linked, and not copied.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rollyard import Client, Task
from rollyard.integrations.slime import SlimeWeights, samples
from rollyard.integrations.streams import StreamPlayer
from transformers import AutoTokenizer


@cache
def player() -> StreamPlayer:
    """Return the player of this process."""
    return StreamPlayer(Client(), yaml.safe_load(Path(os.environ["ROLLYARD_JOB"]).read_text()))


@cache
def weights() -> SlimeWeights:
    """Return what brings the weights of this process's slime to the pool."""
    return SlimeWeights(Client(), os.environ["ROLLYARD_POOL"], os.environ["ROLLYARD_WEIGHTS"], timeout=1800)


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> list[list[Any]]:
    """Play a batch of prompts, and return a list of samples for each of them."""
    if evaluation:
        raise ValueError("this function plays training batches; give --eval-function-path another one")
    weights().bring(args, rollout_id)
    groups = data_source.get_samples(args.rollout_batch_size)
    played = player().play([Task.model_validate_json(group[0].metadata["task"]) for group in groups])
    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    return samples(
        [trajectory for group in played for trajectory in group],
        pad_token_id=tokenizer.pad_token_id,
        first_group=groups[0][0].group_index,
        first_index=groups[0][0].index,
        decode=tokenizer.decode,
    )
