"""Make the test model: a Qwen3 of about a million parameters that speaks every family's format a little.

    $(scripts/vllm-env) tests/vllm/model/train.py

It needs torch, transformers, safetensors and tokenizers, takes some minutes on two cores, and writes `hf/`
and `report.json` beside this file. The model learns dialogues of all families of tests/support, made of this
repository's own documentation, until what it samples is far from uniform: log-probabilities that were all
alike would hide an exchange of two of them. It is not meant to say anything sensible.

The embeddings are not tied to the output layer, so that a reload of the weights reaches all of it.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from rollyard_testing.families import FAMILIES, Family, end_tokens, train_tokenizer  # noqa: E402

SEED: Final = 0
VOCABULARY: Final = 1536
CONTEXT: Final = 8192
STEPS: Final = 320
BATCH: Final = 8
WIDTH: Final = 256  # tokens of a training sequence, which is the end of a longer dialogue
PEAK: Final = 4e-3
WARM_UP: Final = 30
SAMPLES: Final = 8  # samples per family, for the report
SAMPLED_TOKENS: Final = 96
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["key"],
        },
    },
}


def sentences() -> list[str]:
    """Return short pieces of prose from the repository's documentation."""
    files = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    text = " ".join(file.read_text(encoding="utf-8") for file in files)
    pieces = re.split(r"(?<=[.:;])\s+|\n\n", text)
    return [" ".join(piece.split()) for piece in pieces if 20 <= len(piece) <= 160 and "|" not in piece]


class Dialogues:
    """Random dialogues of a family, as the text that a model of the family reads and says."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[str]) -> None:
        self._pieces = pieces
        self._renderers = {
            name: PreTrainedTokenizerFast(tokenizer_object=tokenizer, **family.variables)
            for name, family in FAMILIES.items()
        }

    def prompt(self, family: Family, rng: random.Random, turns: int) -> str:
        """Return a rendering with `turns` turns behind it, up to the assistant's next text."""
        messages: list[dict[str, Any]] = []
        if family.system and rng.random() < 0.3:
            messages.append({"role": "system", "content": rng.choice(self._pieces)})
        messages.append({"role": "user", "content": rng.choice(self._pieces)})
        for _ in range(turns):
            if family.calls is not None and rng.random() < 0.6:
                name, arguments = self._call(rng)
                call = {
                    "id": f"{rng.randrange(10**9):09d}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append(
                    {"role": "tool", "content": rng.choice(self._pieces), "tool_call_id": call["id"]}
                )
            else:
                messages.append({"role": "assistant", "content": rng.choice(self._pieces)})
                messages.append({"role": "user", "content": rng.choice(self._pieces)})
        return str(
            self._renderers[family.name].apply_chat_template(
                messages,
                chat_template=family.source,
                tools=[TOOL] if family.calls is not None else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        )

    def turn(self, family: Family, rng: random.Random) -> str:
        """Return what the assistant says next."""
        thought = rng.choice(self._pieces) if family.think and rng.random() < 0.5 else None
        if family.calls is not None and rng.random() < 0.6:
            return family.turn(calls=[self._call(rng)], thought=thought)
        return family.turn(rng.choice(self._pieces), thought=thought)

    def _call(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        arguments: dict[str, Any] = {"key": rng.choice(rng.choice(self._pieces).split())}
        if rng.random() < 0.3:
            arguments["count"] = rng.randrange(10)
        return "lookup", arguments


def build(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Return an untrained model."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=[tokenizer.token_to_id(token) for token in end_tokens()],
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        initializer_range=0.05,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def batches(tokenizer: Tokenizer, dialogues: Dialogues) -> Iterator[Tensor]:
    """Yield ids [BATCH, WIDTH], padded with -1 at the right."""
    rng = random.Random(SEED)
    families = list(FAMILIES.values())
    while True:
        ids = torch.full((BATCH, WIDTH), -1)
        for row in range(BATCH):
            family = rng.choice(families)
            text = dialogues.prompt(family, rng, rng.randrange(3)) + dialogues.turn(family, rng)
            tail = tokenizer.encode(text, add_special_tokens=False).ids[-WIDTH:]
            ids[row, : len(tail)] = torch.tensor(tail)
        yield ids


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer, dialogues: Dialogues) -> dict[str, float]:
    """Train next-token prediction on every token, with AdamW, linear warm-up and linear decay to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / STEPS)
    )
    stream = batches(tokenizer, dialogues)
    model.train()
    started, smooth, tokens = time.perf_counter(), float("nan"), 0
    for step in range(1, STEPS + 1):
        ids = next(stream)
        logits = model(input_ids=ids.clamp(min=0), use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int((ids >= 0).sum())
        value = float(loss.detach())
        smooth = value if smooth != smooth else 0.95 * smooth + 0.05 * value
        if step % 50 == 0:
            print(f"step {step}/{STEPS} loss {smooth:.3f} {time.perf_counter() - started:.0f} s", flush=True)
    return {
        "steps": STEPS,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - started),
        "loss": round(smooth, 3),
    }


@torch.inference_mode()
def sampled(model: Qwen3ForCausalLM, tokenizer: Tokenizer, dialogues: Dialogues) -> dict[str, Any]:
    """Return log-probabilities, in nats, of what the model samples at temperature 1 after each family's
    prompts.
    """
    rng = random.Random(SEED + 1)
    model.eval()
    ends = set(model.config.eos_token_id)
    everything: list[float] = []
    per_family: dict[str, float] = {}
    ended = 0
    for family in FAMILIES.values():
        here: list[float] = []
        for _ in range(SAMPLES):
            ids = tokenizer.encode(
                dialogues.prompt(family, rng, rng.randrange(3)), add_special_tokens=False
            ).ids
            state = model(input_ids=torch.tensor([ids]), use_cache=True)
            for _ in range(SAMPLED_TOKENS):
                logprobs = state.logits[0, -1].log_softmax(-1)
                token = int(torch.multinomial(logprobs.exp(), 1))
                here.append(float(logprobs[token]))
                if token in ends:
                    ended += 1
                    break
                state = model(
                    input_ids=torch.tensor([[token]]), past_key_values=state.past_key_values, use_cache=True
                )
        per_family[family.name] = round(statistics.stdev(here), 3)
        everything += here
    return {
        "tokens": len(everything),
        "logprob_mean": round(statistics.mean(everything), 3),
        "logprob_stdev": round(statistics.stdev(everything), 3),
        "logprob_stdev_per_family": per_family,
        "turns_that_end": round(ended / (SAMPLES * len(FAMILIES)), 3),
    }


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers and vLLM load. It has no chat template: that is the families' own."""
    folder.mkdir(parents=True, exist_ok=True)
    # Any family's end ends a turn; a Hugging Face tokenizer names one, the generation config all.
    model.generation_config.update(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    text = json.dumps({**names, "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False}, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def main() -> None:
    pieces = sentences()
    examples = [str(TOOL), *pieces, *(family.source for family in FAMILIES.values())]
    tokenizer = train_tokenizer(examples, VOCABULARY)
    dialogues = Dialogues(tokenizer, pieces)
    model = build(tokenizer)
    trained = train(model, tokenizer, dialogues)
    report = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": tokenizer.get_vocab_size(),
        "training": trained,
        "sampled_at_temperature_1": sampled(model, tokenizer, dialogues),
    }
    save(model, tokenizer, HERE / "hf")
    (HERE / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
