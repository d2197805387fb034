"""An agent of NeMo-Gym that plays each task on Rollyard.

ROLLYARD_JOB names the manifest of a stream with `samplesPerTask: 1`, because NeMo-Gym asks for one rollout
at a time. ROLLYARD_MODEL is the folder with the tokenizer.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from fastapi import HTTPException, Request
from nemo_gym.base_resources_server import BaseRunRequest
from nemo_gym.base_responses_api_agent import (
    BaseResponsesAPIAgentConfig,
    Body,
    SimpleResponsesAPIAgent,
)
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from pydantic import ConfigDict
from rollyard import Client, Task
from rollyard.integrations.nemo import run_answers
from rollyard.integrations.streams import StreamPlayer
from transformers import AutoTokenizer


@cache
def player() -> StreamPlayer:
    """Return the player of this process."""
    return StreamPlayer(Client(), yaml.safe_load(Path(os.environ["ROLLYARD_JOB"]).read_text()))


@cache
def tokenizer() -> Any:
    """Return the tokenizer of the policy."""
    return AutoTokenizer.from_pretrained(os.environ["ROLLYARD_MODEL"])


class RollyardRunRequest(BaseRunRequest):
    """A row of the data set, with its task as JSON text."""

    model_config = ConfigDict(extra="allow")
    task: str


class RollyardAgent(SimpleResponsesAPIAgent):
    """It answers `/run` with a rollout of Rollyard and its reward."""

    config: BaseResponsesAPIAgentConfig

    async def responses(
        self,
        request: Request,
        body: NeMoGymResponseCreateParamsNonStreaming = Body(),  # noqa: B008 (NeMo-Gym reads this.)
    ) -> NeMoGymResponse:
        """Refuse a single answer: Rollyard plays whole rollouts."""
        raise HTTPException(404, "this agent answers /run only")

    async def run(self, request: Request, body: RollyardRunRequest) -> Any:
        """Play the task, and return its rollout."""
        task = Task.model_validate_json(body.task)
        (future,) = await asyncio.to_thread(player().start, [task])
        (trajectory,) = await asyncio.wrap_future(future)
        (answer,) = run_answers(trajectory, model="policy", decode=tokenizer().decode)
        return answer


if __name__ == "__main__":
    RollyardAgent.run_webserver()
