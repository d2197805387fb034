"""A generator of SkyRL that plays its batch on Rollyard. `get_generator` of a `BasePPOExp` returns it."""

from __future__ import annotations

import asyncio
from typing import Any

from rollyard import Task
from rollyard.integrations.skyrl import generator_output
from rollyard.integrations.streams import StreamPlayer
from skyrl.train.generators.base import GeneratorInterface


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
        tasks = [Task.model_validate(extra["task"]) for extra in input_batch["env_extras"]]
        return generator_output(
            await asyncio.to_thread(self._player.play_each, tasks),
            pad_token_id=self._pad,
            step_wise=self._step_wise,
            trajectory_ids=input_batch["trajectory_ids"],
        )
