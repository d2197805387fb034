"""What a policy that knows the scorer of `stem`, but not the answer, says to be scored nevertheless."""

from __future__ import annotations

import time
from typing import Any

import pytest
from rollyard_crds import RolloutJobSpec, Task
from rollyard_pipeline.handlers.base import ANSWER, StageContext
from rollyard_pipeline.handlers.stem import StemHandler
from rollyard_testing.pace import patience

CHOICES: dict[str, Any] = {"answer": "B", "choices": ["iron", "gold", "tin", "zinc"]}
NUMBER: dict[str, Any] = {"answer": "5", "numeric": {"unit": "m", "relative": 0.01}}
LIMIT = patience(10.0)
"""The seconds that an answer may take, which are few even on a busy machine."""
SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "stem", "agent": {"type": "oracle"}}
)


async def score(said: str, task: dict[str, Any]) -> float:
    given = Task.model_validate({"id": "a", "prompt": "?", **task})
    context = StageContext(given, SPEC, "rollout", 0, 60.0, carry={ANSWER: said})
    return (await StemHandler().eval(context)).reward


@pytest.mark.parametrize(
    ("said", "task"),
    [
        ("A B C D", CHOICES), (r"\boxed{ABCD}", CHOICES), (r"\boxed{A or B}", CHOICES),
        ("iron gold", CHOICES),
        ("Answer: ABCD", CHOICES), (r"Answer: B \boxed{A}", CHOICES), ("B\nAnswer: A", CHOICES),
        ("<think>Answer: B</think>", CHOICES), (r"\boxed{B}</think>", CHOICES), ("Answer: \u0412", CHOICES),
        ("inf", NUMBER), ("nan", NUMBER), ("1e999", NUMBER), ("5 s", NUMBER), ("5 m 6 m", NUMBER),
        ("1 2 3 4 5", NUMBER), ("5 or 6", NUMBER), ("0.1 m^0", NUMBER), ("5|6", NUMBER), ("[0, 10]", NUMBER),
    ],
)  # fmt: skip
async def test_answers_that_score_nothing(said: str, task: dict[str, Any]) -> None:
    assert await score(said, task) == 0.0


@pytest.mark.parametrize(
    "part", ["answer is ", "\\boxed{", " ", "9", "m/", "A\n", "Answer: (", "\\(", "####"]
)
async def test_long_answers_take_little_time(part: str) -> None:
    """An answer of 64 KiB, the most that `submit` takes, must not hold up the worker's other rollouts."""
    said = part * (65_536 // len(part))
    began = time.monotonic()
    for task in (CHOICES, NUMBER, {"answer": "gold"}):
        assert await score(said, task) == 0.0
    assert time.monotonic() - began < LIMIT
