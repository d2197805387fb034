"""A new checkpoint for a demonstration: the old one with a little noise, and what it must give.

A stand-in for a trainer's optimiser step: the files, shapes and names are those of a real checkpoint,
only the values were not learnt.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollyard.errors import InvalidInput, StartFailed

PROMPT_TOKENS = 24
_HEADER_LIMIT = 100 << 20  # bytes, as the safetensors format bounds it
_REFERENCE_SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
folder, ids = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
with torch.inference_mode():
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
print(json.dumps([min(0.0, float(logprobs[at, token])) for at, token in enumerate(ids[1:])]))
"""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a checkpoint gives on a fixed prompt, as transformers computes it."""

    prompt_ids: list[int]
    logprobs: list[float]
    """The log-probability of each id after the first, in nats."""


def check_model(folder: Path) -> None:
    """Raises InvalidInput unless `folder` holds a Hugging Face model with its tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InvalidInput(f"--model {folder}: no {name} there; give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise InvalidInput(f"--model {folder}: no *.safetensors there")


def perturbed(source: Path, target: Path, scale: float, seed: int = 0) -> None:
    """Copies the model folder `source` to `target`, every weight matrix with Gaussian noise of `scale`
    times its own standard deviation. Vectors (norms, biases) stay.

    Raises:
        InvalidInput: a weight file is broken, or its weights are of a type that is not known here.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, partial)
    noise = np.random.default_rng(seed)
    for file in sorted(partial.glob("*.safetensors")):
        _perturb(file, scale, noise)
    os.replace(partial, target)


def _perturb(file: Path, scale: float, noise: np.random.Generator) -> None:
    data = bytearray(file.read_bytes())
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > _HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        for name, tensor in header.items():
            if name != "__metadata__" and len(tensor["shape"]) > 1:
                begin, end = (8 + length + offset for offset in tensor["data_offsets"])
                data[begin:end] = _noisy(bytes(data[begin:end]), tensor["dtype"], scale, noise)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidInput(f"{file}: cannot be read as safetensors: {error}") from error
    file.write_bytes(data)


def _noisy(raw: bytes, kind: str, scale: float, noise: np.random.Generator) -> bytes:
    """The tensor's bytes with noise; `kind` is safetensors' name of its type."""
    if kind == "BF16":
        # bfloat16 is the upper half of a float32.
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif kind in ("F32", "F16"):
        values = np.frombuffer(raw, np.float32 if kind == "F32" else np.float16).astype(np.float32)
    else:
        raise ValueError(f"weights of type {kind}; F32, F16 and BF16 are known")
    changed = values + scale * values.std() * noise.standard_normal(values.shape, dtype=np.float32)
    if kind == "BF16":
        return bytes(((changed.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes())
    return bytes(changed.astype(np.float32 if kind == "F32" else np.float16).tobytes())


class ReferenceRun:
    """A transformers forward pass in another Python, which continues while servers start.

    Args:
        python: one with torch and transformers, such as vLLM's.
        folder: the checkpoint.
        log: where its complaints go.
    """

    def __init__(self, python: Path, folder: Path, log: Path) -> None:
        size = json.loads((folder / "config.json").read_text()).get("vocab_size", 0)
        draw = np.random.default_rng(0)
        self._ids = [int(draw.integers(size)) for _ in range(PROMPT_TOKENS)]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), "-c", _REFERENCE_SCRIPT, str(folder), json.dumps(self._ids)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

    def result(self, timeout: float) -> Reference:
        """Waits for it.

        Raises:
            StartFailed: it failed, or took longer than `timeout` seconds.
        """
        try:
            said, _ = self._process.communicate(timeout=timeout)
            if self._process.returncode == 0:
                return Reference(self._ids, json.loads(said))
        except (subprocess.TimeoutExpired, ValueError):
            self.stop()
        raise StartFailed(f"transformers computed no log-probabilities of the new weights (log: {self._log})")

    def stop(self) -> None:
        """Ends it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
