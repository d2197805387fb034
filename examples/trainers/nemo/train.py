"""Run NeMo-RL's GRPO with weights that go to a pool. The arguments are those of NeMo-RL's launcher.

ROLLYARD_POOL names the pool. ROLLYARD_WEIGHTS is a folder that its servers read. ROLLYARD_ADAPTER is the name
under which they load the adapter that NeMo-RL trains; without it, NeMo-RL trains all weights.
"""

from __future__ import annotations

import os
from typing import Any

from examples.nemo_gym import run_grpo_nemo_gym as launcher
from rollyard import Client
from rollyard.integrations.nemo import NemoWeights

original = launcher.setup


def setup(*arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Set NeMo-RL up, and let its generation be refitted by a pool."""
    parts: tuple[Any, ...] = original(*arguments, **options)
    policy, generation, *_ = parts
    state, config = parts[9], parts[10]
    generation.weight_synchronizer = NemoWeights(
        Client(),
        os.environ["ROLLYARD_POOL"],
        os.environ["ROLLYARD_WEIGHTS"],
        adapter=os.environ.get("ROLLYARD_ADAPTER", ""),
        timeout=1800,
        policy=policy,
        checkpointing=config.checkpointing,
        completed=state.current_step,
    )
    return parts


if __name__ == "__main__":
    launcher.setup = setup
    launcher.main()
