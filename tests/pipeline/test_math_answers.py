"""The handler `math`: GSM8K's gold answers in several surface forms, and hostile answers."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Message, Task
from rollyard_crds.trajectory import Trajectory
from rollyard_pipeline.child_processes import ChildProcesses
from rollyard_pipeline.errors import ChildFailed, ChildTimeout, TaskInvalid
from rollyard_pipeline.handlers import StageContext
from rollyard_pipeline.handlers.answers import final_answer
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_pipeline.handlers.statements import statements
from rollyard_testing.pace import patience

# There is one event loop, so that tests share a handler: its children are slow to start (sympy).
shared = pytest.mark.asyncio(loop_scope="module")


def shared_folder() -> Path:
    return Path(os.environ.get("ROLLYARD_SHARED") or Path(__file__).parents[2] / ".." / "shared")


@pytest.fixture(scope="module")
def gsm8k() -> list[str]:
    file = shared_folder() / "data" / "gsm8k_test.jsonl"
    if not file.is_file():
        pytest.skip("GSM8K's test set is not here; set ROLLYARD_SHARED to the folder that holds data/")
    return [json.loads(line)["answer"] for line in file.read_text().splitlines()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def handler() -> AsyncIterator[MathHandler]:
    handler = MathHandler()
    yield handler
    await handler.close()


def context(gold: str, said: str, submitted: str | None = None) -> StageContext:
    task = Task(id="t", prompt="q", answer=gold)
    return StageContext(
        task=task,
        spec=RolloutJobSpec.model_validate(
            {"tasks": {"stream": True}, "handler": "math", "agent": {"type": "oracle"}}
        ),
        rollout="r",
        sample_index=0,
        timeout=60.0,
        carry={} if submitted is None else {"answer": submitted},
        trajectory=Trajectory(
            id="r", job="j", task_id="t", group_id="g", sample_index=0,
            messages=[Message(role="user", content="q"), Message(role="assistant", content=said)],
        ),
    )  # fmt: skip


def right_forms(gold: str) -> list[str]:
    number = float(gold) if "." in gold else int(gold)
    separated = f"{number:,}"
    return [
        f"Adding up gives \\boxed{{{gold}}}.",
        f"So it is $\\boxed{{{separated}}}$",
        f"two and two\n#### {separated}",
        f"After 3 steps, the answer is {separated}.",
        f"**The answer is: ${gold}**",
    ]


def wrong_forms(gold: str) -> list[str]:
    number = float(gold) if "." in gold else int(gold)
    return [
        f"\\boxed{{{number + 1}}}",
        f"#### {number * 10 + 3}",
        f"The answer is {-number if number else 5}.",
        f"The right number {gold} came up, but the answer is {number + 0.5}.",
    ]


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.nightly, id="all"), pytest.param(10, id="tenth")]
)
@shared
async def test_gsm8k_gold_answers_score_1_and_perturbed_ones_0(
    handler: MathHandler, gsm8k: list[str], step: int
) -> None:
    assert len(gsm8k) == 1319
    tried = gsm8k[::step]
    right = wrong = 0
    for solution in tried:
        gold = final_answer(solution)
        scores = [(await handler.eval(context(solution, said))).reward for said in right_forms(gold)]
        right += all(score == 1.0 for score in scores)
        scores = [(await handler.eval(context(solution, said))).reward for said in wrong_forms(gold)]
        wrong += all(score == 0.0 for score in scores)
    assert (right, wrong) == (len(tried), len(tried))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{unbalanced and \\boxed{3}", "3"),
        ("\\boxed{1} \\fbox{2}", "2"),
        ("\\boxed{\\boxed{5}}", "{5}"),
        ("#### 3\n\\boxed{1}", "1"),
        ("\\boxed{200}, and more. The final answer is $10,455$. I hope it is correct.", "10,455"),
        ("\\boxed{5}. The answer is less than 7", "5"),
        ("#### 1,234,567", "1,234,567"),
        ("the answer is 2\n#### 3", "3"),
        ("#### 3\n#### 4\nthe answer is 5", "5"),
        ("#### 2. Conclusion\nThe answer is 7.", "7"),
        ("#### Step 2\nThe answer is 7.", "7"),
        ("first line\nThe answer is 12.", "12"),
        ("The answer is 2. No, the answer: 3", "3"),
        ("The answer is 2\nThe answer is 4\nbye", "4"),
        ("ANSWER = 6", "6"),
        ("**Final Answer**:\n\n$7$", "7"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("The final answer is \\(12\\). I hope it is correct.", "12"),
        ("The answer is $1$ and $2$", "1 , 2"),
        ("答案：42。", "42"),
        ("She makes $18 every day.", "$18"),
        ("She makes 9 * 2 = 18 dollars. Well done!", "18"),
        ("It is 3 or 5.", "3 or 5"),
        ("We add 5 to 6", "We add 5 to 6"),
        ("so it is $x = 7$ again", "x = 7"),
        ("\\[ x + 1 \\]", "x + 1"),
        ("`7`", "7"),
        ("The day is Monday.", "The day is Monday"),
        ("<answer>24</answer>", "24"),
        ("<answer>It is 24.</answer> Bye.", "24"),
        ("<answer>3</answer> <answer>\\boxed{4}</answer>", "3, \\boxed{4}"),
        ("<answer>3</answer> or <answer>4</answer>", "3, 4"),
        ('{"answer": 24}', "24"),
        ("```\n24\n```", "24"),
        ("**24** apples", "24 apples"),
        ("- **Total:** 24", "24"),
        ("=> 24", "24"),
        ("A: 24", "24"),
        ("#### -\\frac{7}{12}", "-\\frac{7}{12}"),
        ("\\begin{align*}\nx&=12+12\\\\\n&=24.\n\\end{align*}", "24"),
        ("The roots are 1, 2, and 3.", "1, 2, and 3"),
        ("The vertex of it is (3, -4).", "(3, -4)"),
        ("She makes 9 * $2 = $18", "$18"),
        ("She sells 9 eggs for $2 each, so she makes $18.", "$18"),
        ("He made a profit of $70,000 on the $80,000 house.", "$70,000"),
        ("7 are red, so 5 are blue", "5"),
        ("The answer is 24, not 25", "24"),
        ("the answer is 24 since each of the 12 pairs has 2", "24"),
        ("James runs 540 meters (3 sprints × 3 times × 60 meters).", "540"),
        ("There are exactly $24$ pairs $(a,b)$ with $a<b$.", "24"),
        ("The minimum value is $24$, attained at $x=3$", "24"),
        ("5 apples, which cost $10", "5"),
        ("The correct option is E", "E"),
        ("So the answer is option E", "E"),
        ("#### E", "E"),
        ("It will be Saturday.", "Saturday"),
        ("所以x的值为60。", "60"),
        ("答：一共60人。", "60"),
        ("綜上，答案為60。", "60"),
        ("$x=1$或$x=2$", "x=1 , x=2"),
    ],
)
def test_where_the_answer_stands(text: str, found: str) -> None:
    assert statements(text)[0].text == found


@pytest.mark.parametrize(
    "text",
    [
        "The answer is not 24", "greater than 24", "at most 24", "x is not equal to 24", "anything but 24",
        "negative 24", "minus 24", "square root of 24", "one over 24", "half of 24", "a multiple of 24",
        "24 plus one", "It is 24 or more.", "It has 24 apples or more.", "It is 24 less than 30.", "0 to 24",
        "I have 3 apples and 7 pears.", "It's 4 or it's 5", "4 unless it is 5", "The answer is on page 24.",
        "The answer is $4$ or maybe $5$", "The answer is $4$ if n is odd and $5$ if even",
        r"\boxed{\text{not }5}", r"\boxed{24\text{ less than }x}", "so f is f = 3y + 2 in this case",
        "x 不等于 5。", "答案不是5。", "I doubt that it is Saturday.", "The ratio is 5:6.", "nowhere near 24",
        "She is 5 feet 6 inches tall.", "The odds are 1 in 5",
    ],
)  # fmt: skip
def test_a_number_that_is_not_what_a_sentence_states(text: str) -> None:
    assert [each.words for each in statements(text)] == [True]


def test_boxes_that_stand_together_are_also_a_list() -> None:
    assert [each.text for each in statements("\\boxed{2} \\boxed{3}")] == ["3", "2, 3"]
    assert [each.text for each in statements("$\\boxed{2}$, or $\\boxed{3}$")] == ["2, 3"]
    apart = "\\boxed{2} was the first try: it is no solution at all \\boxed{3}"
    assert [each.text for each in statements(apart)] == ["3"]
    assert statements("") == statements("   \n ") == []


@pytest.mark.parametrize(
    ("gold", "said", "reward"),
    [
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("x^2 + 2x + 1", "\\boxed{(x+1)^2}", 1.0),
        ("x^2 + 2x + 1", "\\boxed{(x-1)^2}", 0.0),
        ("12", "I do not know", 0.0),
        ("12", "", 0.0),
    ],
)
@shared
async def test_equal_is_what_mathematics_says(
    handler: MathHandler, gold: str, said: str, reward: float
) -> None:
    assert (await handler.eval(context(gold, said))).reward == reward


@shared
async def test_a_submitted_answer_goes_before_what_was_said(handler: MathHandler) -> None:
    assert (await handler.eval(context("12", "\\boxed{12}", submitted="13"))).reward == 0.0
    assert (await handler.eval(context("12", "\\boxed{13}", submitted="12"))).reward == 1.0


@shared
async def test_people_are_shown_what_was_compared(handler: MathHandler) -> None:
    compared, silent = context("a #### 12", "so \\boxed{13}"), context("12", "")
    for each in (compared, silent):
        assert (await handler.eval(each)).reward == 0.0
    assert compared.shown == "compared answer: 13 (in the last box)\nexpected: 12\ndifferent"
    assert silent.shown == "There is no answer.\nexpected: 12"
    joined = context("10500", "It is 10 500")
    assert (await handler.eval(joined)).reward == 1.0
    assert joined.shown == "compared answer: 10 500 (at the end of the text)\nexpected: 10500\nequal"
    apart = context("153,370", "153, 370")
    assert (await handler.eval(apart)).reward == 1.0
    assert (apart.shown or "").endswith("\nequal: read by taking numbers between commas apart")
    unread = context("5", "\\boxed{\\frac{}")
    assert (await handler.eval(unread)).reward == 0.0
    assert (unread.shown or "").endswith("\ndifferent: the answer cannot be read as a formula")


class Breaking(ChildProcesses):
    """Children that end in these ways, one after the other, and then judge all to be equal."""

    def __init__(self, *ends: type[ChildFailed]) -> None:
        super().__init__("no.module", what="the verifier", failed="VerifierFailed", timeout="VerifierTimeout")
        self.ends = list(ends)
        self.asked: list[tuple[Sequence[str], str, float]] = []

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.asked.append((request["golds"], request["answer"], seconds))
        if self.ends:
            raise self.ends.pop(0)("it ended")
        return {"equal": True, "why": "", "answered": bool(request["answer"])}


@pytest.mark.parametrize(
    ("ends", "reward", "components", "reason", "asked"),
    [
        ((), 1.0, {"answered": 1.0}, "", "a"),
        ((ChildFailed,), 1.0, {"answered": 1.0}, "", "aa"),
        ((ChildTimeout,), 0.0, {"answered": 1.0, "verify_timeout": 1.0}, "VerifyTimeout", "a"),
        (
            (ChildFailed, ChildTimeout), 0.0, {"answered": 1.0, "verify_timeout": 1.0},
            "VerifyTimeout", "aa",
        ),
        ((ChildFailed,) * 2, 0.0, {"answered": 1.0}, "AnswerUnusable", "aag"),
        ((ChildFailed,) * 3, 0.0, {"answered": 1.0}, "AnswerUnusable", "aagg"),
    ],
)  # fmt: skip
async def test_an_answer_that_ends_its_comparison_scores_0(
    ends: tuple[type[ChildFailed], ...], reward: float, components: dict[str, float], reason: str, asked: str
) -> None:
    handler, breaking = MathHandler(), Breaking(*ends)
    await handler.close()
    handler._children = breaking
    found = await handler.eval(context("12", "\\boxed{13}"))
    assert (found.reward, found.components, found.reason) == (reward, components, reason)
    texts = {"a": (["12"], "\\boxed{13}", 10.0), "g": (["12"], "12", 10.0)}
    assert breaking.asked == [texts[each] for each in asked]


async def test_a_verifier_that_compares_nothing_is_not_the_policys_failing() -> None:
    handler = MathHandler()
    await handler.close()
    handler._children = Breaking(*(ChildFailed,) * 4)
    with pytest.raises(ChildFailed):
        await handler.eval(context("12", "\\boxed{13}"))
    quick = Breaking()
    handler._children = quick
    hurried = context("12", "\\boxed{13}")
    hurried.timeout = 4.0
    assert (await handler.eval(hurried)).reward == 1.0
    assert quick.asked == [(["12"], "\\boxed{13}", 4.0)]
    assert (await handler.eval(context("12", ""))).components == {"answered": 0.0}


@shared
async def test_a_task_without_an_answer_is_refused(handler: MathHandler) -> None:
    assert handler.check(Task(id="t", prompt="q")) == ["answer: required by the handler 'math'"]
    with pytest.raises(TaskInvalid, match="answer: required"):
        await handler.eval(context("", "\\boxed{1}"))


@pytest.mark.parametrize(
    ("answers", "said", "reward"),
    [
        (["7", r"\frac{14}{3}"], "7", 1.0), (["7", r"\frac{14}{3}"], r"\boxed{14/3}", 1.0),
        (["7", r"\frac{14}{3}"], r"\boxed{8}", 0.0), (["7", "8"], "", 0.0),
        ([r"\frac{", "8"], r"\boxed{8}", 1.0), (["8", r"\frac{"], r"\boxed{8}", 1.0),
    ],
)  # fmt: skip
@shared
async def test_any_accepted_answer_is_right(
    handler: MathHandler, answers: list[str], said: str, reward: float
) -> None:
    given = context("", said)
    given.task = Task(id="t", prompt="q", answers=answers)
    assert handler.check(given.task) == []
    assert (await handler.eval(given)).reward == reward
    if not reward and said:
        assert (given.shown or "").count("expected: ") == len(answers)


@shared
async def test_an_accepted_answer_that_cannot_be_read_never_makes_a_0(handler: MathHandler) -> None:
    given = context("", "\\boxed{9}")
    given.task = Task(id="t", prompt="q", answers=["7", "\\frac{"])
    with pytest.raises(ChildFailed, match="answer: the expected answer cannot be read"):
        await handler.eval(given)


async def test_whom_a_verifier_dies_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the answer's doing only where the expected one can still be compared with itself."""
    deadly = {"13"}

    async def ask(self: ChildProcesses, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        if any(word in request["answer"] for word in deadly):
            raise ChildFailed("the process died")
        return {"equal": request["answer"] in request["golds"], "why": "", "answered": True}

    monkeypatch.setattr(ChildProcesses, "ask", ask)
    handler = MathHandler()
    found = await handler.eval(context("12", "\\boxed{13}"))
    assert (found.reward, found.reason) == (0.0, "AnswerUnusable")
    deadly.add("12")
    with pytest.raises(ChildFailed):
        await handler.eval(context("12", "\\boxed{13}"))


async def test_a_comparison_without_end_is_ended_and_the_next_one_works() -> None:
    handler = MathHandler()

    async def equal(gold: str, answer: str, seconds: float) -> bool:
        verdict = await handler._children.ask({"golds": [gold], "answer": answer}, seconds)
        return bool(verdict["equal"])

    try:
        assert await equal("4", "2+2", 60.0)
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        heart = asyncio.create_task(beat())
        started = time.monotonic()
        with pytest.raises(ChildTimeout):
            await equal("1", "9^{9^{9^{9}}} + \\sin(9^{9^{9}})", 1.0)
        heart.cancel()
        # The event loop continued in the meantime.
        assert beats > 5
        assert time.monotonic() - started < patience(30)
        assert await equal("4", "\\sqrt{16}", 60.0)
    finally:
        await handler.close()
