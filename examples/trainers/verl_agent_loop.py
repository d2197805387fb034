"""An agent loop of verl that plays its samples on Rollyard.

`actor_rollout_ref.rollout.agent.agent_loop_config_path` names a YAML file with this class, ROLLYARD_JOB the
manifest of a stream with `samplesPerTask: 1`, because verl asks for one sample at a time.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rollyard import Client
from rollyard.integrations.sequences import is_scored
from rollyard.integrations.streams import StreamPlayer
from rollyard.integrations.verl import agent_loop_output
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

TRIES = 3
SECONDS = 1800


@cache
def player() -> StreamPlayer:
    """Return the player of this process: verl makes an agent loop for each sample."""
    return StreamPlayer(Client(), yaml.safe_load(Path(os.environ["ROLLYARD_JOB"]).read_text()))


@register("rollyard")
class RollyardAgentLoop(AgentLoopBase):
    """It takes the task from the column `extra_info`, and its reward from Rollyard."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play the task until an evaluation has scored it. An infrastructure failure is no reward of 0."""
        async with asyncio.timeout(SECONDS):
            for _ in range(TRIES):
                (future,) = await asyncio.to_thread(player().start, [kwargs["extra_info"]["task"]])
                (trajectory,) = await asyncio.wrap_future(future)
                if is_scored(trajectory):
                    break
        return agent_loop_output(trajectory, pad_token_id=self.tokenizer.pad_token_id)
