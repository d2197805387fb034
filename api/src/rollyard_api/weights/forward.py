"""Compute log-probabilities of a prompt by transformers' own forward pass, to verify a weight update.

This is a script of its own, which is run by path in any Python that has torch and transformers:
`python forward.py FOLDER`, with `{"ids": [...]}` on standard input. It prints `{"logprobs": [...]}`,
of length n - 1 and in nats. It computes in float32 on the CPU.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module


def logprobs(folder: str, ids: list[int]) -> list[float]:
    """Return the log-probability of each id after the first, given the ids before it."""
    torch, transformers = import_module("torch"), import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    model.eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    scores = torch.log_softmax(logits, dim=-1)
    result: list[float] = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return result


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(json.dumps({"logprobs": logprobs(sys.argv[1], request["ids"])}))
