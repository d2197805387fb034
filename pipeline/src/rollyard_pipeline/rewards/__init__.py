"""Rewards are made of components here: penalties, checks of form, functions of users and reward services.

This module has what reward functions are made with, the entry points of `rollyard.reward_functions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from rollyard_pipeline.handlers.base import Evaluation

__all__ = ["RewardFunction", "reward_function"]

Scores = Callable[[Mapping[str, Any]], "float | Evaluation"]
S = TypeVar("S", bound=Scores)


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


def reward_function(function: S) -> S:
    """Mark a function of a plugin as a reward function. It is the `score` of one without components.

    The function stays as it is; the mark is for the reader, and for Rollyard, which does not run the file to
    find it.
    """
    return function


class PlainFunction(RewardFunction):
    """A reward function that is a function.

    Args:
        function: It scores an episode.
    """

    def __init__(self, function: Scores) -> None:
        self._function = function

    def score(self, episode: Mapping[str, Any]) -> float | Evaluation:
        """Return the score of an episode."""
        return self._function(episode)


def made_function(found: Any) -> RewardFunction:
    """Return a reward function from what an extension names, a class or a function."""
    made: RewardFunction = found() if isinstance(found, type) else PlainFunction(found)
    return made
