"""A second checkpoint of the test model has the same shapes and other weights."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np

_HEADER = struct.Struct("<Q")  # https://github.com/huggingface/safetensors#format


def permuted(model: Path, folder: Path, tensor: str = "model.layers.1.mlp.down_proj.weight") -> Path:
    """Return a copy of a float32 model folder with the rows of one layer's matrix in another order."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    (length,) = _HEADER.unpack_from(data)
    start = _HEADER.size + length
    entry = json.loads(data[_HEADER.size : start])[tensor]
    assert entry["dtype"] == "F32"
    first, end = entry["data_offsets"]
    matrix = np.frombuffer(data, dtype="<f4", offset=start + first, count=(end - first) // 4)
    rows = matrix.reshape(entry["shape"])
    rows[:] = np.roll(rows, 1, axis=0)
    file.write_bytes(data)
    return folder


def perturbed(model: Path, folder: Path, *, scale: float = 0.2, seed: int = 0) -> Path:
    """Copy a float32 model folder, every weight multiplied by 1 + `scale` × a normal number.

    Other seeds give other folders. Raises AssertionError for another precision.
    """
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    (length,) = _HEADER.unpack_from(data)
    start = _HEADER.size + length
    header = json.loads(data[_HEADER.size : start])
    assert {one["dtype"] for name, one in header.items() if name != "__metadata__"} == {"F32"}
    weights = np.frombuffer(data, dtype="<f4", offset=start)
    noise = np.random.default_rng(seed).standard_normal(weights.shape, dtype=np.float32)
    weights *= 1 + np.float32(scale) * noise
    file.write_bytes(data)
    return folder
