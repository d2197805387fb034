"""Rewards are made of components here: penalties, checks of form, functions of users and reward services.

This module has the base class of reward functions, the entry points of `rollyard.reward_functions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from rollyard_pipeline.handlers.base import Evaluation

__all__ = ["RewardFunction"]


class RewardFunction(ABC):
    """A function that scores an episode after the handler has.

    The class is called without arguments, once in each process that runs it. These processes are not the
    worker's own, and one that takes too long is killed.
    """

    components: ClassVar[tuple[str, ...]] = ()
    """The names of the components that `score` returns and a job may give a weight."""

    @abstractmethod
    def score(self, episode: Mapping[str, Any]) -> float | Evaluation:
        """Return the score of an episode, or an `Evaluation` with components.

        An exception is an infrastructure failure and gives no reward. What the policy did wrong must be
        scored instead.

        Args:
            episode: The JSON object that docs/rewards.md describes. Its texts are the policy's.
        """
