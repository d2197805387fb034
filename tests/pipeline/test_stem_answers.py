"""Answers of the handler `stem`: letters that are stated and never guessed, numbers, units and texts."""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_crds import RolloutJobSpec, Task
from rollyard_pipeline.errors import TaskInvalid
from rollyard_pipeline.handlers.answers import final_answer
from rollyard_pipeline.handlers.base import ANSWER, StageContext
from rollyard_pipeline.handlers.stem import StemHandler, letter

CHOICES = ["iron", "gold", "an alloy of A and B", "the color of it"]
SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "stem", "agent": {"type": "oracle"}}
)


async def score(said: str, /, **task: Any) -> float:
    given = Task.model_validate({"id": "a", "prompt": "?", **task})
    context = StageContext(given, SPEC, "rollout", 0, 60.0, carry={ANSWER: said})
    return (await StemHandler().eval(context)).reward


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ("Answer: B", "B"), ("The answer is (B).", "B"),
        ("the answer is a mixture", None), ("The answer is (b)", "B"), ("**Answer:** **B**", "B"), 
        ("answer choice B", None),
        ("The correct answer is choice B, as A is wrong.", "B"), (r"So \boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"), (r"\boxed{\text{(B) gold}}", "B"), ("B", "B"), ("(b)", "B"), ("B.", "B"),
        ("Thus:\nB) gold", "B"), ("gold", "B"), ("Answer: A\nNo. Answer: B", "B"),
        ("<think>Answer: A</think>The answer is B", "B"), (r"The answer is $\boxed{B}$", "B"),
        ("It depends on A", None), ("B. It depends", None), ("", None), ("Answer: Z", None),
        (r"\boxed{A, B}", None), (r"\boxed{}", None), ("The answer is Always iron", None),
        ("I am sure that B is wrong and C is", None), ("answer: none of A, B", None),
        ("<think>The answer is B", "B"),
    ],
)  # fmt: skip
def test_the_letter_that_a_text_chooses(said: str, chosen: str | None) -> None:
    assert letter(said.rpartition("</think>")[2], CHOICES) == chosen


@pytest.mark.parametrize(("said", "shown"), [("<think>B</think>Answer: A", "Answer: A"), ("", "none")])
async def test_people_are_shown_what_was_compared(said: str, shown: str) -> None:
    given = Task.model_validate({"id": "a", "prompt": "?", "answer": "B", "choices": CHOICES})
    context = StageContext(given, SPEC, "rollout", 0, 60.0, carry={ANSWER: said})
    await StemHandler().eval(context)
    assert context.shown == f"compared answer: {shown}\nexpected: B"


async def test_choices_are_scored() -> None:
    assert await score("Answer: B", answer="B", choices=CHOICES) == 1.0
    assert await score("Answer: A", answer="B", choices=CHOICES) == 0.0
    assert await score("A B C D", answer="B", choices=CHOICES) == 0.0
    assert await score("", answer="B", choices=CHOICES) == 0.0


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("9.81", 1), ("The answer is 9.8 m/s^2.", 1), (r"\boxed{9.81\ \text{m/s}^2}", 1), ("981 cm/s^2", 1),
        ("a = 9.81 m s^-2", 1), (r"9.81e0", 1), (r"\boxed{9.81 \times 10^{0}}", 1), ("0.00981 km/s^2", 1),
        ("9.81 m/s", 0), ("9.81 furlongs", 0), ("-9.81", 0), ("8.9", 0), ("nan", 0), ("inf", 0), ("1e999", 0),
        ("9.81 or 10", 0), ("", 0), ("9" * 5000, 0), ("9.81" + " m" * 3000, 0),
    ],
)  # fmt: skip
async def test_numbers_with_a_unit(said: str, reward: float) -> None:
    assert await score(said, answer="9.81", numeric={"unit": "m/s^2", "relative": 0.01}) == reward


async def test_a_tolerance_of_zero_and_an_absolute_one() -> None:
    assert await score("0.05", answer="0", numeric={"relative": 0.0, "absolute": 0.1}) == 1.0
    assert await score("0.05", answer="0", numeric={"relative": 1.0}) == 0.0
    assert await score("100.0", answer="100", numeric={"relative": 0.0}) == 1.0
    assert await score("1", answer="100", numeric={"unit": "%"}) == 0.0, "a percentage is no fraction"


async def test_exact_answers() -> None:
    assert await score("The answer is  Rayleigh  Scattering.", answer="Rayleigh scattering") == 1.0
    assert await score("Answer: scattering", answer="Rayleigh scattering") == 0.0


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ({}, "answer: required"), ({"answer": "E", "choices": CHOICES}, "answer: must be one of .* A to D"),
        ({"answer": "x", "numeric": {}}, "answer: must be a number"),
        ({"answer": "1", "numeric": {"unit": "parsnip"}}, "numeric.unit: is not known"),
        ({"answer": "A", "choices": CHOICES, "numeric": {}}, "numeric: cannot be given"),
    ],
)  # fmt: skip
async def test_tasks_that_cannot_be_scored(task: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskInvalid, match=problem):
        await score("1", **task)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("So.\n\nAnswer: 34", "34"), ("**Answer:** $34$", "34"),
        (r"Answer: \( \frac{1}{2} \)", r"\frac{1}{2}"),
        (r"Answer: \boxed{34}", "34"),
        (r"Final Answer: The final answer is $34$. I hope it is correct.", "34"),
        ("Answer: 1,234", "1234"), ("Answer: 1\nAnswer: 2", "2"), (r"Answer: $\$5$", "5"),
        (r"\[ 7 \]", "7"), ("#### 72", "72"),
    ],
)  # fmt: skip
def test_the_answer_forms_of_verl_and_dapo(said: str, answer: str) -> None:
    assert final_answer(said) == answer
