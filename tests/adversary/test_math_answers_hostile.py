"""What a policy says to be scored by `math` without the right answer, or to break its scoring."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rollyard_crds import RolloutJobSpec, Task
from rollyard_crds.task import MAX_ANSWERS
from rollyard_pipeline.handlers.base import ANSWER, StageContext
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_pipeline.handlers.statements import statements
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handler `math`")


shared = pytest.mark.asyncio(loop_scope="module")
SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "math", "agent": {"type": "oracle"}}
)
LIMIT = patience(10.0)
"""The seconds that reading an answer may take, which are few even on a busy machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def handler() -> AsyncIterator[MathHandler]:
    handler = MathHandler()
    yield handler
    await handler.close()


def context(gold: str, said: str, seconds: float = 60.0) -> StageContext:
    task = Task(id="t", prompt="?", answer=gold)
    return StageContext(task, SPEC, "rollout", 0, seconds, carry={ANSWER: said})


@pytest.mark.attack(
    "an answer lists guesses in boxes or a sentence, is an interval, a variable or an equation that holds "
    "the right number, a loose approximation, or a letter that stands for a unit",
    stopped_by="the place of an answer is chosen by its form; numbers are compared by value, lists "
    "element by element, and nothing is left out but words and abbreviations of units",
)
@pytest.mark.parametrize(
    ("gold", "said"),
    [
        # Several boxes are a list, or the last one counts.
        ("2", r"\boxed{1}\boxed{2}\boxed{3}"), ("2", r"\boxed{1}, \boxed{2}, \boxed{3}"),
        ("2", r"\boxed{2} \boxed{3}"), ("2", r"\boxed{2} or \boxed{3}"), ("2", r"\boxed{\boxed{2} 3}"),
        ("2", "".join(rf"\boxed{{{number}}}" for number in range(100))),
        # Several numbers are a list.
        ("5", "3 or 5"), ("5", "5 or 3"), ("5", "It is 3 or 5."), ("3", "It is 3 or 5."),
        ("5", "The answer is 3, 4 or 5."),
        ("5", r"\boxed{5 \text{ or } 6}"), ("5", "4 5 6"), ("5", r"\boxed{4 5}"), ("5", "between 4 and 5"),
        ("5", r"$4$ or $5$"), ("5", r"$4$, $5$"), ("5", r"\{4, 5\}"),
        ("5", "4; 5"), ("5", "5/6"), ("5", "5|6"),
        ("5", "The answer is 5. The answer is 6."), ("5", "We add 5 to 6"), ("5", r"\boxed{5 \quad 6}"),
        ("5", r"\boxed{5 \\ 6}"), ("5", r"\boxed{5 ~ 6}"), ("5", r"\begin{pmatrix}5\\6\end{pmatrix}"),
        # An answer that holds the key, or could be anything.
        ("5", "[4, 6]"), ("5", "4 < x < 6"), ("5", r"x \ge 5"), ("5", "x"), ("5", r"\mathbb{R}"),
        ("5", r"x \in \mathbb{R}"), ("5", "f(x)"), ("5", "5x"), ("5", "5^x"), ("5", r"5 + \epsilon"),
        ("5", r"\pm 5"), ("5", r"\mp 5"), ("5", r"|5|, -5"), ("[0, 1]", r"\mathbb{R}"), ("[0, 1]", "[0, 2]"),
        ("5", "x = x"), ("5", "5 = 5x"), ("5", "2x = 5"),
        ("5", "x^2 = 5"), ("5", r"x \ne 5"), ("x = 5", "x = x"),
        ("x = 5", "0 = 0"), ("x = 5", r"x \ge 5"), ("5", r"6 \approx 5"), ("5", r"x \approx 6"),
        # No numbers at all.
        ("0", "nan"), ("0", r"\frac{0}{0}"), ("0", r"\text{NaN}"), ("5", "inf"), (r"\infty", r"-\infty"),
        (r"\infty", r"\frac{1}{0}"), ("5", r"\frac{5}{0}"), ("5", r"5 + \infty"), ("0", r"\infty - \infty"),
        ("0", r"\emptyset"), ("0", r"\{\}"), ("0", ""), ("0", r"\boxed{}"), ("5", "?"),
        # Loose approximations.
        (r"\pi", "3.14"), (r"\pi", "3.1415"), (r"\frac13", "0.333"), (r"\frac13", "0.33333"),
        ("1000000007", "1000000008"), ("1000000007", "1000000007.5"), ("1000000007", r"1 \cdot 10^9"),
        ("0.0000001", "0"), ("0", "0.0000001"), ("10^{-9}", "10^{-10}"), ("10^{20}", "10^{20} + 1"),
        ("100!", "100! + 1"), (r"6.63 \times 10^{-34}", r"1.00 \times 10^{-34}"), ("16386.16", "16386.17"),
        # Units and letters that math-verify leaves out.
        ("3t", "3"), ("3", "3t"), ("3", "3h"), ("5m", "5"),
        ("5", "5m"), ("2c", "2"), ("7s", "7"), ("4d", "4"),
        ("x", "X"), ("2V", "2v"), ("x + X", "2x"), ("5 cm", "5 km"), ("ABC", "CBA"), ("C", "A, B, C"),
        ("C", "A or C"), ("C", "(A) (B) (C)"), ("Yes", "Yes and No"), ("Yes", "No. Yes"),
        # Equations that no library solves.
        ("x^2 + 1 = 0", "x^2 + 2 = 0"), ("x^2 + 1 = 0", "x^4 + 1 = 0"), ("y = x^2", "y = x^2 + 1"),
        ("1101_2", "1101_3"), ("12:30", "12:45"), ("510", "10 500"), (r"\frac34", "2 1/4"), ("15", "10 5"),
        ("20", "10 2"), ("1.5", "1 5"), ("234", "1, 234"), ("1234", "1, 234"), ("8120", "(8,120)"),
    ],
)  # fmt: skip
@shared
async def test_answers_that_score_nothing(handler: MathHandler, gold: str, said: str) -> None:
    found = await handler.eval(context(gold, said))
    assert (found.reward, found.reason) == (0.0, "")
    assert (await handler.eval(context(gold, gold))).reward == 1.0


ENDLESS = (
    "9^{9^{9^{9}}}",
    r"\frac{1}{9^{9^{9}}!}",
    "(((9!)!)!)!",
    r"\binom{10^9}{10^8}",
    r"\prod_{k=1}^{10^9} k",
)
MORE_ENDLESS = (
    r"\sum_{k=1}^{10^{12}} \frac{1}{k}", "9**9**9**9", r"\int_0^1 \sin(\cos(\tan(x^x))) dx", "9e999999999",
    r"\sqrt[9^9]{9^{9^9}}", "x" * 4000, r"\lim_{x \to 0} \frac{\sin(x^{9^9})}{x}", r"(x+1)^{10^6}",
    r"\cos(10^{10^{8}})", r"10^{-10^{9}}", r"10^{10^{10}}.0", "-" * 4000 + "1",
)  # fmt: skip
BROKEN = (
    "(" * 5000 + "1" + ")" * 5000, "1" * 60_000, r"\boxed{" * 20_000, r"\boxed{1}" * 7000, "\x00", "\ud800",
    "__import__('os').system('true')", r"\boxed{__import__('os')._exit(1)}", "lambda: 0", r"\text{" * 2000,
    "1, " * 2000 + "1", r"\begin{pmatrix}" + (" & ".join("1" * 99) + r" \\ ") * 20 + r"\end{pmatrix}",
)  # fmt: skip
MORE_BROKEN = (
    r"\frac{1}{" * 1000 + "1" + "}" * 1000, "{" * 4000, "x^" * 2000 + "1", "1+" * 2000 + "1",
    r"0.\overline{" + "3" * 4000 + "}",
)  # fmt: skip


ENDLESS_COMPARISON = pytest.mark.attack(
    "an answer never ends its comparison, uses up its memory or breaks the parser, so that the evaluation "
    "fails and begins again",
    stopped_by="a child process with limits of time and memory; texts reach a parser of LaTeX only, never "
    "`eval`; the expected answer compared with itself proves whose doing it is",
)


@ENDLESS_COMPARISON
@pytest.mark.parametrize(
    "said",
    [
        *ENDLESS,
        *BROKEN,
        *(pytest.param(said, marks=pytest.mark.nightly) for said in (*MORE_ENDLESS, *MORE_BROKEN)),
    ],
    ids=lambda said: ascii(said[:24]),
)
@shared
async def test_an_answer_that_breaks_its_comparison_scores_0(handler: MathHandler, said: str) -> None:
    """It is never an infrastructure failure, and the next answer is judged."""
    found = await handler.eval(context("2", said, seconds=0.5))
    assert found.reward == 0.0
    assert found.reason in ("", "VerifyTimeout", "AnswerUnusable")
    assert (await handler.eval(context("2", "2"))).reward == 1.0


@ENDLESS_COMPARISON
@pytest.mark.parametrize(
    "part",
    [
        "answer is ", "answer ", "\\boxed{", " ", "\n", "9", "#### ", "####9", "\\(", "$", "$1$ and ",
        "1, ", "a 1 ",
        "is 1 or ", ". ", "I hope it is correct", "<|", "-$", "答案",
        "\\[", "\\frac", "final answer is ", "*", "A", "answer is A", "答案是", "is 1 ", "aa 1 ",
        "1 h 1 min ", "**", "**a", "<answer>", "</answer>", "\\begin{align}",
        "{\"answer\": ", "(1, ", "$1 ", "and ", "或",
    ],
)  # fmt: skip
def test_where_an_answer_stands_is_found_in_little_time(part: str) -> None:
    """Also the stage worker looks for it, whose other rollouts must not wait."""
    said = part * (65_536 // len(part))
    began = time.monotonic()
    statements(said)
    statements(said + "\n7")
    assert time.monotonic() - began < LIMIT


@pytest.mark.attack(
    "an answer lists all answers that might be accepted",
    stopped_by="each accepted answer is compared with the whole answer",
)
@pytest.mark.parametrize(
    "said",
    [
        "7, 8", "7 or 8", r"\boxed{7, 8}", r"\boxed{7} or \boxed{8}", r"\{7, 8\}", "It is 7 or 8.", "7; 8",
        "The answer is 7 or 8.", r"$7$, $8$", "7 8 9", r"\pm 7", "7 is not it", "[7, 8]", "7 ≤ x ≤ 8",
        " ".join(map(str, range(100))), ", ".join(map(str, range(100))), r"\boxed{7}, \boxed{8}, \boxed{9}",
        "<answer>7</answer> <answer>8</answer>",
    ],
)  # fmt: skip
@shared
async def test_a_list_of_everything_is_none_of_the_accepted_answers(handler: MathHandler, said: str) -> None:
    """Each accepted answer is compared by itself: two guesses are no answer, although both are right."""
    given = context("", said)
    given.task = Task(id="t", prompt="?", answers=["7", "8"])
    assert (await handler.eval(given)).reward == 0.0
    given.carry[ANSWER] = "7"
    assert (await handler.eval(given)).reward == 1.0


@pytest.mark.attack(
    "an answer that is slow to compare holds a process of the worker for each accepted answer",
    stopped_by="all comparisons of an answer share one time limit",
)
@shared
async def test_many_accepted_answers_share_one_limit_of_time(handler: MathHandler) -> None:
    """Otherwise an answer that is slow to compare would hold a process of the worker for each of them."""
    given = context("", ENDLESS[0], seconds=1.0)
    given.task = Task(id="t", prompt="?", answers=[str(number) for number in range(MAX_ANSWERS)])
    began = time.monotonic()
    found = await handler.eval(given)
    assert (found.reward, found.reason) == (0.0, "VerifyTimeout")
    assert time.monotonic() - began < LIMIT
