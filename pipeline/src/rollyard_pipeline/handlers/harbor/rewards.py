"""The reward files of a task's tests, and the reward of a task of several steps. This module is pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rollyard_crds.fields.harbor import MAX_KEY
from rollyard_crds.trajectory import MAX_REWARD

from rollyard_pipeline.errors import RewardUnusable
from rollyard_pipeline.sabotage import REWARD_INVALID, REWARD_MISSING

REWARD: Final = "reward"
MAX_FILE: Final = 64 << 10
"""The largest size of a reward file in bytes."""
_MAX_KEYS: Final = 64
_NAMED: Final = 8
"""The number of keys that a message shows."""


@dataclass(frozen=True, slots=True)
class RewardFiles:
    """What the reward files of one run of the tests say."""

    rewards: Mapping[str, float]
    """The rewards by their keys, among them `reward`."""
    note: str = ""
    """What was left out of the files although it looks like a reward, for people."""


Content = bytes | str | None
"""The content of a reward file, or why it cannot be read, or None if there is none."""


def read_rewards(as_json: Content, as_text: Content, key: str = "") -> RewardFiles:
    """Return the rewards of one run of the tests.

    Args:
        as_json: `reward.json`, which comes first: a number, or an object in which everything that is not a
            number is a diagnostic.
        as_text: `reward.txt`: one number. It counts where `reward.json` cannot be read, or names no reward.
        key: The key of `reward.json` that has the reward, or "" for `reward`.

    Raises:
        RewardUnusable: There is neither file, or neither has a reward that can be used.
    """
    if as_json is None and as_text is None:
        raise RewardUnusable("the tests wrote neither reward.json nor reward.txt", REWARD_MISSING)
    if as_json is None:
        return RewardFiles({REWARD: _of_text(as_text)})
    try:
        document = _document(as_json)
    except RewardUnusable as error:
        if (number := _text_or_none(as_text)) is None:
            raise
        return RewardFiles({REWARD: number}, f"{error}, so reward.txt counts")
    if not isinstance(document, dict):
        return RewardFiles({REWARD: _number(document, "reward.json")})
    numbers, left_out = _numbers(document)
    reward = _chosen(document, numbers, _text_or_none(as_text), key)
    note = f"reward.json: no components are {', '.join(left_out[:_NAMED])}" if left_out else ""
    return RewardFiles({**numbers, REWARD: reward}, note)


def _of_text(file: Content) -> float:
    if not isinstance(file, bytes):
        raise _invalid(file or "there is no reward.txt")
    try:
        return _number(float(file.decode()), "reward.txt")
    except ValueError as error:
        raise _invalid("reward.txt holds no number") from error


def _text_or_none(file: Content) -> float | None:
    try:
        return _of_text(file)
    except RewardUnusable:
        return None


def _document(file: bytes | str) -> Any:
    if isinstance(file, str):
        raise _invalid(file)
    try:
        return json.loads(file, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise _invalid("reward.json is not JSON") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Tests that write the policy's texts unescaped would let it add a second
    reward."""
    document = dict(pairs)
    if len(document) < len(pairs):
        raise _invalid("reward.json has a key twice")
    return document


def _numbers(document: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return the numbers other than `reward` that can be components, and for people the keys of the
    others."""
    numbers: dict[str, float] = {}
    left_out: list[str] = []
    for key, value in document.items():
        if key == REWARD or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        nameable = key.isprintable() and len(key) <= MAX_KEY
        if nameable and len(numbers) < _MAX_KEYS and -MAX_REWARD <= value <= MAX_REWARD:
            numbers[key] = float(value)
        else:
            left_out.append(ascii(key[:MAX_KEY]))
    return numbers, left_out


def _chosen(
    document: Mapping[str, Any], numbers: Mapping[str, float], as_text: float | None, key: str
) -> float:
    """Return the number of an object that is the reward."""
    chosen_key = key or REWARD
    if chosen_key in document:
        return _number(document[chosen_key], f"reward.json: {chosen_key!a}")
    shown = ", ".join(ascii(name) for name in list(numbers)[:_NAMED])
    if key:
        raise _invalid(f"reward.json has no {key!a}, which tasks.harbor.rewardKey names; it has {shown}")
    if as_text is not None:
        return as_text
    if len(numbers) == 1:
        return next(iter(numbers.values()))
    if numbers:
        raise _invalid(
            f"reward.json has several numbers, and none of them is 'reward': {shown}; say in the job which "
            "one it is, as tasks.harbor.rewardKey"
        )
    raise _invalid("reward.json has no number that can be the reward")


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        kind = {bool: "a truth value", str: "a text", list: "a list", dict: "an object"}.get(type(value))
        raise _invalid(f"{where} is {kind or 'null'}, and must be a number")
    # A number of JSON may be too large for a float, and Python reads NaN and Infinity, too.
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise _invalid(f"{where} is not finite, or larger than {MAX_REWARD:,.0f}")
    return float(value)


def _invalid(message: str) -> RewardUnusable:
    return RewardUnusable(message, REWARD_INVALID)


def below(rewards: Mapping[str, float], least: Mapping[str, float]) -> bool:
    """Return whether a step's rewards are lower than its `min_reward`. A key without a reward counts as
    lower."""
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
