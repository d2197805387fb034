"""Behaviour cloning on a CPU: a small Qwen3 learns the demonstrations, on the policy's own tokens only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from tinypolicy.data import Demonstrations

_BUCKET: Final = 16
_REPEAT_WIDTH: Final = 128
# This is where the scales of the query and key norms start. At 1 a head of 32 dimensions cannot single out
# one of 150 tokens (its logits end at 5.7), and would first have to learn to.
_NORM_START: Final = 1.6


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The length and speed of the training. `batch` is in episodes, the learning rates are peaks."""

    seed: int
    copy_steps: int
    epochs: float
    batch: int
    matrix_lr: float
    other_lr: float
    warmup: int


@dataclass(frozen=True, slots=True)
class TrainResult:
    steps: int
    tokens: int
    seconds: float
    loss: float


def build(vocabulary: int, end_of_text: int, im_end: int, seed: int) -> Qwen3ForCausalLM:
    """Return an untrained policy of about a million parameters. The embeddings are not tied to the output."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=im_end,
        pad_token_id=end_of_text,
        initializer_range=0.05,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    # Start as a policy whose residual stream holds the token itself, undisturbed (blocks begin at zero),
    # and whose output layer is a scaled copy of the embeddings (a copy, not a tie): attending to a name
    # then already raises that name's logit. Copying emerges several times sooner than from the default.
    with torch.no_grad():
        nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
        model.lm_head.weight.copy_(0.05 * model.model.embed_tokens.weight)
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(_NORM_START)
            layer.self_attn.k_norm.weight.fill_(_NORM_START)
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def _batches(data: Demonstrations, batch: int, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch of (ids, mask) [batch, length], shuffled and grouped by like length to waste no
    padding.
    """
    lengths = np.diff(data.offsets)
    order = rng.permutation(len(lengths))
    groups = []
    for start in range(0, len(order), batch * 32):
        window = order[start : start + batch * 32]
        window = window[np.argsort(lengths[window], kind="stable")]
        groups += [window[i : i + batch] for i in range(0, len(window), batch)]
    for index in rng.permutation(len(groups)):
        group = groups[index]
        width = -(-int(lengths[group].max()) // _BUCKET) * _BUCKET
        ids = np.zeros((len(group), width), dtype=np.int64)
        mask = np.zeros((len(group), width), dtype=bool)
        for row, episode in enumerate(group):
            start, end = data.offsets[episode], data.offsets[episode + 1]
            ids[row, : end - start] = data.ids[start:end]
            mask[row, : end - start] = data.mask[start:end]
        yield torch.from_numpy(ids), torch.from_numpy(mask)


def _loss(model: Qwen3ForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the mean cross-entropy over the policy's tokens.

    Only their positions go through the output layer.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    kept = mask[:, 1:]
    return nn.functional.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept])


def _repeats(vocabulary: int, batch: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return (ids, mask) [batch, 128]: a random run of tokens again and again, masked from its second time
    on.
    """
    ids = np.zeros((batch, _REPEAT_WIDTH), dtype=np.int64)
    mask = np.zeros((batch, _REPEAT_WIDTH), dtype=bool)
    for row in range(batch):
        period = int(rng.integers(8, _REPEAT_WIDTH // 2 + 1))
        run = rng.integers(0, vocabulary, size=period)
        ids[row] = np.resize(run, _REPEAT_WIDTH)
        mask[row, period + 1 :] = True
    return torch.from_numpy(ids), torch.from_numpy(mask)


def _stream(
    data: Demonstrations, settings: TrainSettings, vocabulary: int, rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the curriculum: repeated random tokens, which teach to copy, then epochs of demonstrations."""
    for _ in range(settings.copy_steps):
        yield _repeats(vocabulary, settings.batch, rng)
    while True:
        yield from _batches(data, settings.batch, rng)


def train(model: Qwen3ForCausalLM, data: Demonstrations, settings: TrainSettings) -> TrainResult:
    """Train in place: Muon for the matrices, AdamW for the rest, linear warm-up and linear decay to 0."""
    rng = np.random.default_rng(settings.seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("model.layers")]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and n.startswith("model.layers"))]
    optimizers = [
        torch.optim.Muon(matrices, lr=settings.matrix_lr, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=settings.other_lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    per_epoch = -(-(len(data.offsets) - 1) // settings.batch)
    steps = settings.copy_steps + int(per_epoch * settings.epochs)

    def scale(step: int) -> float:
        return min((step + 1) / settings.warmup, max(0.0, 1 - step / steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(o, scale) for o in optimizers]
    stream = _stream(data, settings, model.config.vocab_size, rng)
    model.train()
    started = time.perf_counter()
    tokens, smooth = 0, float("nan")
    for step in range(1, steps + 1):
        ids, mask = next(stream)
        loss = _loss(model, ids, mask)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += ids.numel()
        value = float(loss.detach())
        smooth = value if smooth != smooth else 0.95 * smooth + 0.05 * value
        if step % 50 == 0 or step == steps:
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps} loss {smooth:.4f} {tokens / seconds:.0f} tokens/s", flush=True)
    return TrainResult(steps, tokens, time.perf_counter() - started, smooth)
