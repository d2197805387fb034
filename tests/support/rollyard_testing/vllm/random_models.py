"""Random Qwen3 checkpoints with tied embeddings, and an adapter, made in a process with transformers.

    random_models.py FOLDER TOKENIZER

writes FOLDER/first and FOLDER/second, which differ in every weight; FOLDER/adapter, a LoRA adapter of the
first; and FOLDER/merged, the first with the adapter's change in its weights. They have the tokenizer that the
folder TOKENIZER holds. It runs in the environment of scripts/vllm-env.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_SECONDS = 300.0
_RANK, _ALPHA = 4, 16
_MODULES = ("q_proj", "v_proj")


def make(python: Path, folder: Path, tokenizer: Path) -> None:
    """Run this module with `python`.

    Raises:
        AssertionError: The process failed.
    """
    from rollyard_testing.pace import patience  # That Python has no such package.

    command = [str(python), __file__, str(folder), str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(_SECONDS))
    assert done.returncode == 0, done.stderr[-4000:]


def _model(seed: int, vocabulary: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=8192,
        initializer_range=0.2, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


def _main(folder: Path, tokenizer: Path) -> None:
    import torch
    from safetensors.torch import save_file

    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]

    def save(model: Any, name: str) -> None:
        model.save_pretrained(folder / name)
        for file in tokenizer.glob("tokenizer*"):
            shutil.copy(file, folder / name)

    first = _model(0, vocabulary)
    save(first, "first")
    save(_model(1, vocabulary), "second")
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for number, layer in enumerate(first.model.layers):
            for name in _MODULES:
                weight = getattr(layer.self_attn, name).weight
                down, up = (
                    torch.randn(_RANK, weight.shape[1]) * 0.2,
                    torch.randn(weight.shape[0], _RANK) * 0.2,
                )
                key = f"base_model.model.model.layers.{number}.self_attn.{name}"
                tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
                weight += _ALPHA / _RANK * up @ down
    save(first, "merged")
    adapter = folder / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": _ALPHA, "bias": "none",
        "lora_dropout": 0.0, "target_modules": list(_MODULES),
        "base_model_name_or_path": str(folder / "first"),
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
