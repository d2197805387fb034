"""A checkpoint callback of verl that brings each checkpoint to the pool.

`trainer.checkpoint_callback_class` names it.

ROLLYARD_POOL names the pool. ROLLYARD_ADAPTER is the name under which its servers load the adapter that verl
trains; without it, verl trains all weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollyard import Client
from rollyard.integrations.verl import VerlWeights
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class RollyardWeights(CheckpointCallback):
    """verl makes it before it loads a checkpoint, and calls it after it has saved one."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.weights = VerlWeights(
            Client(),
            os.environ["ROLLYARD_POOL"],
            Path(config.trainer.default_local_dir) / "pool",
            adapter=os.environ.get("ROLLYARD_ADAPTER", ""),
            timeout=1800,
        )
        self.weights.bring_resumed(config)

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Return once every server has the weights; what this raises ends the training."""
        self.weights.bring(checkpoint_dir, async_save=async_save)
