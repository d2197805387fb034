"""A logits processor for vLLM that makes each step of its engine take a twentieth of a second.

It is loaded by `--logits-processors rollyard_slow_steps:SlowSteps` into vLLM's own environment, so it imports
nothing of Rollyard.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor  # type: ignore[import-not-found]

SECONDS = 0.05


class SlowSteps(LogitsProcessor):  # type: ignore[misc]
    """A processor that leaves all logits as they are."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Take what vLLM gives to each processor."""

    def apply(self, logits: Any) -> Any:
        """Return the same logits, later."""
        time.sleep(SECONDS)
        return logits

    def is_argmax_invariant(self) -> bool:
        """Say no, so that it runs at each step."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Keep no state."""
