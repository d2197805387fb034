"""A model folder as onnxruntime-genai's builder writes it. Its configuration is read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollyard_engine.errors import EngineError

CONFIG_FILE: Final = "genai_config.json"
# The builder does not record the element type of the cache. float32 is the widest type that it uses, so the
# memory is not underestimated.
KV_ELEMENT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The description of a model in ``genai_config.json``.

    ``context_length`` and ``vocab_size`` are in tokens. ``kv_bytes_per_token`` is an upper bound of the bytes
    that one token occupies in the KV cache, and ``weight_bytes`` is the size of the ONNX files.
    """

    path: Path
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    weight_bytes: int


def read_folder(path: Path) -> ModelFolder:
    """Read and check the configuration of the model folder at ``path``.

    Raises:
        EngineError: The folder is unusable. The message names the folder and what is missing or wrong
            in it.
    """
    if not path.is_dir():
        raise EngineError(
            f"model folder {path} does not exist or is not a folder",
            param="weights_path",
            reason="ModelFolderInvalid",
        )
    config_path = path / CONFIG_FILE
    if not config_path.is_file():
        raise EngineError(
            f"{path} has no {CONFIG_FILE}: it must be a folder written by onnxruntime-genai's model builder",
            param="weights_path",
            reason="ModelFolderInvalid",
        )
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        model = config["model"]
        decoder = model["decoder"]
        filename = str(decoder["filename"])
        folder = ModelFolder(
            path=path,
            context_length=int(model["context_length"]),
            vocab_size=int(model["vocab_size"]),
            eos_token_ids=_eos_ids(model),
            kv_bytes_per_token=(
                2
                * int(decoder["num_hidden_layers"])
                * int(decoder["num_key_value_heads"])
                * int(decoder["head_size"])
                * KV_ELEMENT_BYTES
            ),
            weight_bytes=sum(file.stat().st_size for file in path.glob("*.onnx*")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"{config_path} cannot be read: {type(error).__name__}: {error}",
            param="weights_path",
            reason="ModelFolderInvalid",
        ) from error
    if not (path / filename).is_file():
        raise EngineError(
            f"{path} has no {filename}, which its {CONFIG_FILE} names",
            param="weights_path",
            reason="ModelFolderInvalid",
        )
    return folder


def _eos_ids(model: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids. The field ``eos_token_id`` is one number or a list of numbers."""
    value = model["eos_token_id"]
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
