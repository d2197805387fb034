"""The vLLM quickstart's parts that need no server: new weights and its arguments."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rollyard.commands.local import quickstart
from rollyard.errors import InvalidInput, UsageProblem
from rollyard.quickstart.vllm_servers import check_model, perturbed

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "examples" / "tiny-policy" / "hf"


def safetensors(file: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def body(file: Path) -> bytes:
    data = file.read_bytes()
    return data[8 + struct.unpack_from("<Q", data)[0] :]


def test_noise_reaches_the_matrices_of_every_known_type_and_nothing_else(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    source, target = tmp_path / "old", tmp_path / "new"
    source.mkdir()
    safetensors(
        source / "model.safetensors",
        {
            "f32": ("F32", [64, 64], values.tobytes()),
            "norm": ("F32", [4096], values.tobytes()),
            "f16": ("F16", [64, 64], values.astype(np.float16).tobytes()),
            "bf16": ("BF16", [64, 64], bf16.tobytes()),
        },
    )
    (source / "config.json").write_text("{}")
    target.mkdir()
    (target / "left.over").write_text("of an earlier run")
    perturbed(source, target, 0.02)
    raw = body(target / "model.safetensors")
    f32 = np.frombuffer(raw[:16384], np.float32)
    norm = np.frombuffer(raw[16384:32768], np.float32)
    f16 = np.frombuffer(raw[32768:40960], np.float16).astype(np.float32)
    new_bf16 = (np.frombuffer(raw[40960:], np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(norm, values)
    for changed in (f32, f16, new_bf16):
        assert 0.015 < float((changed - values).std()) < 0.025
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


@pytest.mark.parametrize(
    ("broken", "text"),
    [(b"\xff" * 64, "cannot be read as safetensors"), (b"", "cannot be read as safetensors")],
)
def test_weights_that_are_none_are_refused_by_name(broken: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors").write_bytes(broken)
    with pytest.raises(InvalidInput, match=rf"model\.safetensors: {text}"):
        perturbed(tmp_path / "old", tmp_path / "new", 0.02)
    assert not (tmp_path / "new").exists()
    safetensors(tmp_path / "old" / "model.safetensors", {"q": ("I8", [2, 2], b"1234")})
    with pytest.raises(InvalidInput, match="weights of type I8"):
        perturbed(tmp_path / "old", tmp_path / "new", 0.02)


def test_a_folder_that_is_no_model_is_refused() -> None:
    check_model(POLICY)
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        check_model(ROOT / "examples")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--replicas", "2"], "go with --engine vllm"),
        (["--update-weights"], "go with --engine vllm"),
        (["--engine", "vllm"], "give --vllm-python"),
        (["--engine", "vllm", "--vllm-python", "python"], "give --model"),
        (["--engine", "vllm", "--backend", "http://127.0.0.1:1"], "leave --engine out"),
        (["--engine", "vllm", "--vllm-python", "/no/python", "--model", str(POLICY)], "is not a program"),
        (["--engine", "vllm", "--vllm-python", "/bin/false", "--model", str(POLICY)], "has no vLLM"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_starts(
    arguments: list[str], text: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(quickstart, [*arguments, "--out", str(out)])
    assert isinstance(done.exception, UsageProblem)
    assert text in str(done.exception)
    assert not out.exists()
