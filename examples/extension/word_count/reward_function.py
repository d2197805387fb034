"""The reward function `brevity`."""

from collections.abc import Mapping
from typing import Any

from rollyard_pipeline.handlers import Evaluation
from rollyard_pipeline.rewards import RewardFunction


class Brevity(RewardFunction):
    """A reward function whose score is 1 for a final text of at most 80 characters, else 0."""

    components = ("characters",)

    def score(self, episode: Mapping[str, Any]) -> Evaluation:
        length = len(episode["final_text"])
        return Evaluation(float(length <= 80), {"characters": float(length)})
