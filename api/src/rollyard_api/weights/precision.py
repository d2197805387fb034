"""The difference of log-probabilities that rounding explains, which depends on a server's data type."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rollyard_crds.backendpool import EngineSpec
from rollyard_crds.reading.engine_arguments import given

FULL: Final = 0.1
"""The tolerance in nats of a server that computes in float32."""
REDUCED: Final = 0.5
"""The tolerance in nats of a server that computes in bfloat16 or float16.

Correct bfloat16 weights of an 8B model were seen to differ by 0.172 nats from a forward pass.
"""
_FULL_NAMES: Final = frozenset({"float32", "float", "fp32"})
_MAX_CONFIG: Final = 16 << 20


def tolerance(dtype: str) -> float:
    """Return the tolerance of a data type, which is that of bfloat16 if the type is not known."""
    return FULL if is_full(dtype) else REDUCED


def is_full(dtype: str) -> bool:
    """Return whether the name is one of float32, as vLLM, SGLang or PyTorch spell it."""
    return dtype.removeprefix("torch.") in _FULL_NAMES


def asked_dtype(engine: EngineSpec) -> str:
    """Return the data type that a pool asks of its servers, or "" if it leaves the choice to them.

    The embedded engine always computes in float32.
    """
    if engine.type == "embedded":
        return "float32"
    arguments: Sequence[str] = (*engine.command, *engine.args)
    dtype = given(arguments, "--dtype")
    return "" if dtype == "auto" else dtype


def checkpoint_dtype(folder: Path) -> str:
    """Return the data type that a checkpoint's `config.json` names, or an empty string if it names none."""
    try:
        with (folder / "config.json").open("rb") as file:
            config: Any = json.loads(file.read(_MAX_CONFIG))
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(config, dict):
        return ""
    for part in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and isinstance(part.get(key), str):
                return str(part[key])
    return ""
