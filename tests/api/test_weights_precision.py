"""The tolerance of a verification, which follows from the data type in which the servers compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rollyard_api.weights import checkpoints, verification
from rollyard_crds.backendpool import EngineSpec


def engine(*args: str, kind: str = "vllm", **fields: Any) -> EngineSpec:
    if kind == "external":
        fields["external"] = {"urls": ["http://a:1"]}
    return EngineSpec.model_validate({"type": kind, "args": list(args), **fields})


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (engine("--dtype=float32"), "float32"),
        (engine("--dtype", "bfloat16"), "bfloat16"),
        (engine("--dtype=float32", "--dtype", "half"), "half"),
        (engine(command=["vllm", "serve", "--dtype", "float16"]), "float16"),
        (engine("--dtype=auto"), ""),
        (engine(), ""),
        (engine(kind="external"), ""),
        (engine(kind="embedded"), "float32"),
    ],
)
def test_a_pool_may_ask_for_a_data_type(spec: EngineSpec, dtype: str) -> None:
    assert verification.asked_dtype(spec) == dtype


@pytest.mark.parametrize(
    ("config", "dtype", "tolerance"),
    [
        ({"dtype": "float32"}, "float32", 0.1),
        ({"torch_dtype": "float32"}, "float32", 0.1),
        ({"torch_dtype": "bfloat16"}, "bfloat16", 0.5),
        ({"dtype": "float16"}, "float16", 0.5),
        ({"text_config": {"dtype": "float32"}}, "float32", 0.1),
        ({"dtype": None, "text_config": {"torch_dtype": "bfloat16"}}, "bfloat16", 0.5),
        ({}, "", 0.5),
        ({"dtype": 32}, "", 0.5),
        ({"text_config": "x"}, "", 0.5),
        ([], "", 0.5),
    ],
)
def test_a_checkpoint_names_its_data_type(tmp_path: Path, config: Any, dtype: str, tolerance: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoints.checkpoint_dtype(tmp_path) == dtype
    assert verification.tolerance(dtype) == tolerance


def test_a_config_that_cannot_be_read_names_none(tmp_path: Path) -> None:
    assert checkpoints.checkpoint_dtype(tmp_path) == ""
    (tmp_path / "config.json").write_text("{")
    assert checkpoints.checkpoint_dtype(tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("float32", 0.1), ("float", 0.1), ("torch.float32", 0.1), ("half", 0.5), ("bfloat16", 0.5), ("x", 0.5)],
)
def test_tolerances(name: str, tolerance: float) -> None:
    assert verification.tolerance(name) == tolerance
