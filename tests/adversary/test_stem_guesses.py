"""What a policy that knows the scorer of `stem`, but not the answer, says to be scored nevertheless."""

from __future__ import annotations

import time
from typing import Any

import pytest
from rollyard_crds import RolloutJobSpec, Task
from rollyard_pipeline.handlers.base import ANSWER, StageContext
from rollyard_pipeline.handlers.stem import StemHandler
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handler `stem`")


CHOICES: dict[str, Any] = {"answer": "B", "choices": ["iron", "gold", "tin", "zinc"]}
NUMBER: dict[str, Any] = {"answer": "5", "numeric": {"unit": "m", "relative": 0.01}}
LETTERS: dict[str, Any] = {**CHOICES, "answer": None, "answers": ["A", "B"]}
NUMBERS: dict[str, Any] = {**NUMBER, "answer": None, "answers": ["5", "6"]}
TEXTS: dict[str, Any] = {"answers": ["gold", "tin"]}
ZERO: dict[str, Any] = {"answer": "0", "numeric": {"unit": "K", "absolute": 1e-9}}
LIMIT = patience(10.0)
"""The seconds that an answer may take, which are few even on a busy machine."""
SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "stem", "agent": {"type": "oracle"}}
)


async def score(said: str, task: dict[str, Any]) -> float:
    given = Task.model_validate({"id": "a", "prompt": "?", **task})
    context = StageContext(given, SPEC, "rollout", 0, 60.0, carry={ANSWER: said})
    return (await StemHandler().eval(context)).reward


GUESSES = pytest.mark.attack(
    "an answer names several choices or values, side by side or in several boxes, a range or a bound; "
    "states infinity, a power that overflows or a unit that changes the number; or takes the scorer long",
    stopped_by="one stated letter or one finite number in a unit of the same kind, with bounded powers, "
    "from a text of bounded length",
)


@GUESSES
@pytest.mark.parametrize(
    ("said", "task"),
    [
        ("A B C D", CHOICES), (r"\boxed{ABCD}", CHOICES), (r"\boxed{A or B}", CHOICES),
        ("iron gold", CHOICES),
        ("Answer: ABCD", CHOICES), (r"Answer: B \boxed{A}", CHOICES), ("B\nAnswer: A", CHOICES),
        ("Answer: \u0412", CHOICES), ("\u0392", CHOICES), ("Answer: A B", CHOICES),
        ("Answer: A, also B", CHOICES),
        (r"\boxed{A} or \boxed{B}", CHOICES), (r"\boxed{A}\boxed{B}", CHOICES), ("Answer: A or (B)", CHOICES),
        ("Answer: B) iron", CHOICES), ("A/B/C/D", CHOICES), ("答案：A或B", CHOICES),
        ("Answer: A\u200bB", CHOICES),
        ("inf", NUMBER), ("nan", NUMBER), ("1e999", NUMBER), ("5 s", NUMBER), ("5 m 6 m", NUMBER),
        ("1 2 3 4 5", NUMBER), ("5 or 6", NUMBER), ("0.1 m^0", NUMBER), ("5|6", NUMBER), ("[0, 10]", NUMBER),
        ("4.96 to 5.04", NUMBER), ("4.96–5.04 m", NUMBER), ("(4.96, 5.04)", NUMBER), ("≤ 5", NUMBER),
        ("5 m, 6 m", NUMBER), ("4 m or 5 m", NUMBER), (r"\boxed{4} or \boxed{5}", NUMBER), ("5 = 6", NUMBER),
        ("x = 5, x = 6", NUMBER), ("±5", NUMBER), (r"\pm 5", NUMBER), ("1,2,3,4,5", NUMBER), ("5!", ZERO),
        ("5 (6)", NUMBER), ("5 kg", NUMBER), ("5 m/furlong", NUMBER), ("5 in", NUMBER), ("5x", NUMBER),
        ("5 Ym^12 Ym^12", NUMBER), ("5 Tm^99", NUMBER), ("5 m^(1/0)", NUMBER), ("1e400", NUMBER),
        ("10^(9999)", NUMBER),
        ("5/0", NUMBER),
        ("5^9999", NUMBER), ("0^-1", NUMBER), ("(-5)^0.5", NUMBER), ("√(-25)", NUMBER), ("9" * 400, NUMBER),
        ("0.0000001", ZERO), ("∞", ZERO), ("0 m", ZERO), ("٥", NUMBER), ("0" * 99 + "5", NUMBER),
        ("(" * 2000 + "5 s", NUMBER), ("(" * 2000 + "5" + ")" * 2000 + " s", NUMBER),
        ("{" * 2000 + "5 s", NUMBER),
        # Two guesses are no answer although either of them is accepted.
        ("A or B", LETTERS), (r"\boxed{A} or \boxed{B}", LETTERS), (r"\boxed{A}\boxed{B}", LETTERS),
        ("Answer: A and B", LETTERS), ("iron gold", LETTERS), ("ABCD", LETTERS), ("5 or 6", NUMBERS),
        ("5 m, 6 m", NUMBERS), (r"\boxed{5} or \boxed{6}", NUMBERS), ("5.5", NUMBERS), ("[5, 6]", NUMBERS),
        ("gold tin", TEXTS), ("gold, tin", TEXTS), (r"\boxed{gold} \boxed{tin}", TEXTS),
        ("gold or tin", TEXTS),
    ],
)  # fmt: skip
async def test_answers_that_score_nothing(said: str, task: dict[str, Any]) -> None:
    assert await score(said, task) == 0.0


@GUESSES
@pytest.mark.parametrize(
    "part",
    [
        "answer is ", "\\boxed{", " ", "9", "m/", "A\n", "Answer: (", "\\(", "####", "(", "((5 ", "5 m ",
        "1 h ",
        "\\frac{", "\\frac", "\\text{", "{", "^{", "√", "\\sqrt2", "*", "**", "⁵", "½", "±5", "=4", "1,234,",
        "1 234 ",
        "10^", "5/", "a_", "5(", "- 5", "Answer: A or ", "the ", "答案", "\ufdfa", "^o", "\0{", "m^(", "m(",
        "sq ",
        "degrees ", "1e", "5 in ", "√(m) ", "\\boxed{4} ", "\n",
    ],
)  # fmt: skip
async def test_long_answers_take_little_time(part: str) -> None:
    """An answer of 64 KiB, the most that `submit` takes, must not hold up the worker's other rollouts."""
    said = part * (65_536 // len(part))
    began = time.monotonic()
    for task in (CHOICES, NUMBER, {"answer": "gold"}):
        assert await score(said, task) == 0.0
    assert time.monotonic() - began < LIMIT
