"""Train with SkyRL on the rollouts of Rollyard: python train.py SETTING=VALUE... (train.sh has them).

ROLLYARD_JOB names the manifest of a stream whose `samplesPerTask` is `generator.n_samples_per_prompt`, and
ROLLYARD_POOL the pool. ROLLYARD_ADAPTER is the name under which its servers load the adapter that SkyRL
trains; without it, SkyRL trains all weights.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import ray
import yaml
from rollyard import Client, Task
from rollyard.integrations.skyrl import SkyrlWeights, generator_output
from rollyard.integrations.streams import StreamPlayer
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray


class RollyardGenerator(GeneratorInterface):
    """It takes each task from the column `task` of the data set.

    Args:
        player: The player of a stream whose `samplesPerTask` is SkyRL's `generator.n_samples_per_prompt`.
        pad_token_id: The tokenizer's padding token.
        step_wise: What `generator.step_wise_trajectories` says.
    """

    def __init__(self, player: StreamPlayer, pad_token_id: int, step_wise: bool = False) -> None:
        self._player = player
        self._pad = pad_token_id
        self._step_wise = step_wise

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        """Play the batch, whose prompts SkyRL has repeated for each of their samples."""
        tasks = [Task.model_validate_json(extra["task"]) for extra in input_batch["env_extras"]]
        return generator_output(
            await asyncio.to_thread(self._player.play_each, tasks),
            pad_token_id=self._pad,
            step_wise=self._step_wise,
            trajectory_ids=input_batch["trajectory_ids"],
        )


class RollyardTrainer(RayPPOTrainer):
    """SkyRL's trainer, whose weights go to a pool."""

    weights: SkyrlWeights

    def init_weight_sync_state(self) -> None:
        """Connect to the pool, where SkyRL would connect to its own engines."""
        self.weights.install(self)


class RollyardExp(BasePPOExp):
    """SkyRL's experiment with rollouts of Rollyard, and without engines of its own."""

    def get_inference_client(self) -> Any:
        """Return nothing: the generator and the weights need no engine of SkyRL."""
        return None

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> GeneratorInterface:
        """Return the generator that plays each batch through a stream."""
        job = yaml.safe_load(Path(os.environ["ROLLYARD_JOB"]).read_text())
        step_wise = cfg.generator.step_wise_trajectories
        return RollyardGenerator(StreamPlayer(Client(), job), tokenizer.pad_token_id, step_wise)

    def get_trainer(self, **parts: Any) -> RayPPOTrainer:
        """Return the trainer whose weights go to the pool."""
        trainer = RollyardTrainer(**parts)
        trainer.weights = SkyrlWeights(
            Client(),
            os.environ["ROLLYARD_POOL"],
            Path(self.cfg.trainer.export_path) / "pool",
            adapter=os.environ.get("ROLLYARD_ADAPTER", ""),
            timeout=1800,
        )
        return trainer


@ray.remote(num_cpus=1)
def run(cfg: SkyRLTrainConfig) -> None:
    """Run the experiment in a process of Ray, as SkyRL does."""
    RollyardExp(cfg).run()


def main() -> None:
    """Read the settings, and train."""
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(run.remote(cfg))


if __name__ == "__main__":
    main()
