"""The reward files of a task's tests, and the reward of a task of several steps. This module is pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from rollyard_crds.trajectory import MAX_REWARD

from rollyard_pipeline.errors import RewardUnusable
from rollyard_pipeline.sabotage import REWARD_INVALID, REWARD_MISSING

REWARD: Final = "reward"
MAX_FILE: Final = 64 << 10
"""The largest size of a reward file in bytes."""
_MAX_KEYS: Final = 64
_MAX_KEY: Final = 128


def read_rewards(as_json: bytes | None, as_text: bytes | None) -> dict[str, float]:
    """Return the rewards by their keys, among them `reward`.

    Args:
        as_json: The content of `reward.json`, which comes first: an object of numbers.
        as_text: The content of `reward.txt`: one number.

    Raises:
        RewardUnusable: There is neither file, or the first one has something else in it.
    """
    if as_json is not None:
        return _of_json(as_json)
    if as_text is None:
        raise RewardUnusable("the tests wrote neither reward.json nor reward.txt", REWARD_MISSING)
    try:
        return {REWARD: _number(float(as_text.decode()), "reward.txt")}
    except ValueError as error:
        raise _invalid("reward.txt holds no number") from error


def _of_json(data: bytes) -> dict[str, float]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _invalid("reward.json is no JSON") from error
    if not isinstance(found, dict) or not found:
        raise _invalid("reward.json is no object of numbers")
    if len(found) > _MAX_KEYS or any(not key.isprintable() or len(key) > _MAX_KEY for key in found):
        raise _invalid(f"reward.json has more than {_MAX_KEYS} keys, or a key that cannot be a name")
    rewards = {key: _number(value, f"reward.json: {key}") for key, value in found.items()}
    if REWARD not in rewards:
        if len(rewards) > 1:
            raise _invalid("reward.json has several numbers, and none of them is 'reward'")
        rewards[REWARD] = next(iter(rewards.values()))
    return rewards


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(f"{where} is no number")
    # A number of JSON may be too large for a float, and Python reads NaN and Infinity, too.
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise _invalid(f"{where} is not finite, or larger than {MAX_REWARD:,.0f}")
    return float(value)


def _invalid(message: str) -> RewardUnusable:
    return RewardUnusable(message, REWARD_INVALID)


def below(rewards: Mapping[str, float], least: Mapping[str, float]) -> bool:
    """Return whether a step's rewards are lower than its `min_reward`. A key without a reward is."""
    return any(not rewards.get(key, -math.inf) >= number for key, number in least.items())


def combined(steps: Sequence[Mapping[str, float]], strategy: Literal["mean", "final"]) -> dict[str, float]:
    """Return the rewards of a task from those of its steps.

    A step that was not played because the policy ended the episode has no rewards, which count as 0.

    Args:
        strategy: Whether each reward is the mean of those of all steps, or that of the last step.
    """
    if strategy == "final":
        return {REWARD: 0.0, **steps[-1]}
    keys = dict.fromkeys([REWARD, *(key for step in steps for key in step)])
    return {key: sum(step.get(key, 0.0) for step in steps) / len(steps) for key in keys}
