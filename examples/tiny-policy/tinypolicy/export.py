"""The trained policy as a Hugging Face folder and as an ONNX folder, and the proof that both agree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-untyped]
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from tinypolicy.chat import END_OF_TEXT, IM_END, SPECIAL_TOKENS, TEMPLATE_FILE, token_id

_BUILDER_SECONDS: Final = 600


class ExportError(RuntimeError):
    """The ONNX model could not be built, or does not agree with the trained one."""

    reason: Final = "ExportFailed"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "chat_template": TEMPLATE_FILE.read_text(),
        },
    )


def save_hugging_face(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers and vLLM load; what was there before is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.generation_config.update(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=token_id(tokenizer, IM_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    _write_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def save_onnx(hugging_face: Path, folder: Path) -> None:
    """Build the fp32 CPU model with onnxruntime-genai's model builder; what was there before is replaced.

    Raises `ExportError` with the builder's last words if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="tiny-policy-onnx-") as work:
        built = Path(work) / "built"
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(hugging_face),
            "-o",
            str(built),
            "-p",
            "fp32",
            "-e",
            "cpu",
            "-c",
            str(Path(work) / "cache"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILDER_SECONDS, check=False)
        if done.returncode != 0:
            raise ExportError(f"the model builder exited with {done.returncode}: {done.stderr[-2000:]}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("genai_config.json", "model.onnx", "model.onnx.data"):
            if (built / name).exists():
                shutil.copyfile(built / name, folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(hugging_face / name, folder / name)
    shutil.copyfile(TEMPLATE_FILE, folder / "chat_template.jinja")


@torch.inference_mode()
def largest_difference(hugging_face: Path, onnx: Path, sequences: Sequence[Sequence[int]]) -> float:
    """Return the largest difference of last-position logits between both exports, relative to the largest
    logit.

    Every sequence is given in two pieces, so the cache of the ONNX model takes part.
    """
    model = Qwen3ForCausalLM.from_pretrained(hugging_face)
    exported = og.Model(str(onnx))
    worst = 0.0
    for ids in sequences:
        expected = model(torch.tensor([list(ids)])).logits[0, -1].numpy()
        params = og.GeneratorParams(exported)
        params.set_search_options(max_length=len(ids) + 8, do_sample=False)
        generator = og.Generator(exported, params)
        generator.append_tokens(np.asarray(ids[: len(ids) // 2], dtype=np.int32))
        generator.append_tokens(np.asarray(ids[len(ids) // 2 :], dtype=np.int32))
        got = np.asarray(generator.get_logits()).reshape(-1, expected.shape[0])[-1]
        worst = max(worst, float(np.abs(got - expected).max() / np.abs(expected).max()))
        generator.generate_next_token()
        if int(generator.get_next_tokens()[0]) != int(expected.argmax()):
            raise ExportError("the ONNX model's greedy token differs from the trained model's")
    return worst
