"""Verify that a server has the right weights, by the log-probabilities of a fixed prompt.

A server may answer that it has loaded a checkpoint and still sample with parts of the old one (vLLM with tied
embeddings does). Only the numbers show this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rollyard_crds.backendpool import EngineSpec
from rollyard_crds.reading.engine_arguments import given

from rollyard_api.core.errors import ControlPlaneError

PROMPT_TOKENS: Final = 48
"""The largest number of ids of a fixed prompt."""
FULL: Final = 0.1
"""The tolerance in nats of a server that computes in float32."""
REDUCED: Final = 0.5
"""The tolerance in nats of a server that computes in bfloat16 or float16.

Correct bfloat16 weights of an 8B model were seen to differ by 0.172 nats from a forward pass.
"""
_FULL_NAMES: Final = frozenset({"float32", "float", "fp32"})
_COMPARED: Final = {
    "reference": "the caller's",
    "transformers": "those of a transformers forward pass",
    "earlier": "the server's own before the update",
}


class Unverifiable(ControlPlaneError):
    """There is nothing to compare with. The message says why."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The expected result of a fixed prompt: `ids` of length n, `logprobs` (nats) of length n - 1."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    source: Literal["reference", "transformers", "earlier"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest difference between a server and its reference in nats, and the token where it occurs."""

    max_difference: float
    position: int
    tolerance: float
    source: str

    @property
    def agrees(self) -> bool:
        """Whether the largest difference is within the tolerance."""
        return self.max_difference <= self.tolerance

    @property
    def finite(self) -> float | None:
        """The difference, rounded, or None if it is infinite, which JSON cannot hold."""
        return round(self.max_difference, 6) if math.isfinite(self.max_difference) else None

    def __str__(self) -> str:
        return (
            f"log-probabilities of a fixed prompt were compared with {_COMPARED[self.source]}: "
            f"they differ by up to {self.max_difference:.4g} nats (token {self.position}), "
            f"{self.tolerance:g} is allowed"
        )


def fixed_prompt(vocabulary: int, room: int = PROMPT_TOKENS) -> list[int]:
    """Return ids spread over a vocabulary (a linear congruential sequence), always the same for a size."""
    state, ids = 20_240_229, []
    for _ in range(max(2, min(PROMPT_TOKENS, room))):
        state = (1_103_515_245 * state + 12_345) % 2**31
        ids.append(state * vocabulary >> 31)
    return ids


def compare(reference: Reference, measured: Sequence[float]) -> Comparison:
    """Return the largest difference. A value that is not a number counts as infinitely different."""
    worst, position = 0.0, 1
    for number, (expected, actual) in enumerate(zip(reference.logprobs, measured, strict=True), 1):
        difference = abs(expected - actual)
        if math.isnan(difference):
            difference = math.inf
        if difference > worst:
            worst, position = difference, number
    return Comparison(worst, position, reference.tolerance, reference.source)


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
