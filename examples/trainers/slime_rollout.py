"""A rollout function of slime that plays its batch on Rollyard.

It is named by `--rollout-function-path slime_rollout.generate_rollout`. Evaluation wants another form of
result, so keep slime's own function for it (`--eval-function-path`).

ROLLYARD_JOB names the manifest of a stream whose `samplesPerTask` is `--n-samples-per-prompt`. Each row of
the data set has its task in the metadata: `--metadata-key metadata`, `{"task": {...}}`.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rollyard import Client
from rollyard.integrations.slime import samples
from rollyard.integrations.streams import StreamPlayer
from transformers import AutoTokenizer


@cache
def player() -> StreamPlayer:
    """Return the player of this process."""
    return StreamPlayer(Client(), yaml.safe_load(Path(os.environ["ROLLYARD_JOB"]).read_text()))


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> list[list[Any]]:
    """Play a batch of prompts, and return a list of samples for each of them."""
    if evaluation:
        raise ValueError("this function plays training batches; give --eval-function-path another one")
    groups = data_source.get_samples(args.rollout_batch_size)
    played = player().play([group[0].metadata["task"] for group in groups])
    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    return samples(
        [trajectory for group in played for trajectory in group],
        pad_token_id=tokenizer.pad_token_id,
        first_group=groups[0][0].group_index,
        first_index=groups[0][0].index,
        decode=tokenizer.decode,
    )
