"""The policy in torch: log-probabilities of what was sampled, and the reference for weight updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tinygrpo.batch import Batch, Row, microbatches, padded


def load_policy(folder: Path) -> PreTrainedModel:
    """Return the model of a Hugging Face folder in float32, without dropout, ready to be trained."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    # No part of the model may behave differently in training: ratios would not be 1 before the update.
    return model.eval()


def sampled_logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the log-probability of each sampled token of a batch, flat, in nats.

    They are those at temperature 1 and without truncation, as the rollouts are sampled. Only the positions
    that predict a sampled token go through the output layer.
    """
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
    predicted = batch.mask[:, 1:]
    logits = model.lm_head(hidden[predicted]).float()
    chosen = batch.ids[:, 1:][predicted]
    return torch.log_softmax(logits, -1).gather(1, chosen[:, None])[:, 0]


def proximal_logprobs(
    model: PreTrainedModel, rows: Sequence[Row], tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the place of each row, and the log-probabilities of its sampled tokens under the present weights.

    Args:
        model: The policy.
        rows: The rows of a step.
        tokens: The largest number of tokens that are computed at once, padding included.
    """
    with torch.no_grad():
        for places in microbatches(rows, tokens):
            batch = padded([rows[place] for place in places])
            flat = sampled_logprobs(model, batch)
            counts = [int(rows[place].mask.sum()) for place in places]
            yield from zip(places, flat.split(counts), strict=True)


def reference(model: PreTrainedModel, prompt_ids: Sequence[int], tolerance: float) -> dict[str, object]:
    """Return what servers must give on a fixed prompt once they have the present weights.

    Args:
        model: The policy.
        prompt_ids: At least two token ids.
        tolerance: The largest difference of any token, in nats.
    """
    with torch.no_grad():
        ids = torch.tensor([list(prompt_ids)])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].double(), -1).gather(1, ids[0, 1:, None])[:, 0]
    return {
        "promptIds": list(prompt_ids),
        "logprobs": [min(0.0, value) for value in logprobs.tolist()],
        "tolerance": tolerance,
    }
