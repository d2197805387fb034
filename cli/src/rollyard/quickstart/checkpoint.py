"""A new checkpoint for a demonstration, and the log-probabilities that it must give.

The checkpoint is the old one with a little noise, in place of a trainer's optimiser step. The files, shapes
and names are those of a real checkpoint; only the values were not learnt.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rollyard.errors import InvalidInput, StartFailed

PROMPT_TOKENS: Final = 24
_HEADER_LIMIT: Final = 100 << 20  # The safetensors format limits the header to this number of bytes.
_REFERENCE_SCRIPT: Final = """
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
class ReferenceLogprobs:
    """The log-probabilities of a fixed prompt under a checkpoint, as transformers computes them."""

    prompt_ids: list[int]
    logprobs: list[float]
    """The log-probability of each id after the first, in nats."""


def check_model(folder: Path) -> None:
    """Raise InvalidInput unless `folder` holds a Hugging Face model with its tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InvalidInput(f"--model {folder}: no {name} there; give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise InvalidInput(f"--model {folder}: no *.safetensors there")


def perturbed(source: Path, target: Path, scale: float, seed: int = 0) -> None:
    """Copy the model folder `source` to `target` and add Gaussian noise to every weight matrix.

    The noise is `scale` times the standard deviation of the matrix. Vectors (norms, biases) do not change.

    Raises:
        InvalidInput: A weight file is broken, or its weights have a type that is not supported.
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
    """Return the tensor's bytes with noise. `kind` is the name of its type in safetensors."""
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
    """A forward pass of transformers in another Python, which runs while servers start.

    Args:
        python: A Python with torch and transformers, such as that of vLLM.
        folder: The folder of the checkpoint.
        log: The file for its standard error.
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

    def result(self, timeout: float) -> ReferenceLogprobs:
        """Wait for the forward pass and return its result.

        Raises:
            StartFailed: The forward pass failed, or it took longer than `timeout` seconds.
        """
        try:
            output, _ = self._process.communicate(timeout=timeout)
            if self._process.returncode == 0:
                return ReferenceLogprobs(self._ids, json.loads(output))
        except (subprocess.TimeoutExpired, ValueError):
            self.stop()
        raise StartFailed(f"transformers computed no log-probabilities of the new weights (log: {self._log})")

    def stop(self) -> None:
        """End the forward pass if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
