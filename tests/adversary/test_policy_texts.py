"""What the policy says and its tests print, made so that a pattern looks at it again and again."""

from __future__ import annotations

import time

import pytest
from rollyard_pipeline.handlers.answers import final_answer
from rollyard_pipeline.handlers.blocks import MAX_ANSWER
from rollyard_pipeline.handlers.code.programs import program_of, whole_program
from rollyard_pipeline.handlers.markup import folded
from rollyard_pipeline.handlers.stem import letter, quantities
from rollyard_pipeline.handlers.swe.handler import patch_of
from rollyard_pipeline.handlers.swe.log_parsers import exit_code, parse
from rollyard_pipeline.sandboxes.egress.limits import EgressRefused
from rollyard_pipeline.sandboxes.egress.proxy import MAX_HEAD, parse_head
from rollyard_tasks.formats.swebench.diffs import changed_files
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(
    "a text makes a pattern look at it again and again, so that the worker stands still",
    boundary="evaluation",
    surface="texts of answers and logs",
    stopped_by="every text is read in linear time",
)


MANY = 200_000
"""Characters. A pattern whose time grows with the square would need an hour."""
BLANKS, LINES = " " * MANY, "\n" * MANY


def test_answers_of_blanks() -> None:
    assert final_answer(f"#### x{BLANKS}y").endswith("x")
    assert final_answer(f"#### 5{BLANKS}") == "5"
    assert final_answer(f"the answer is:{LINES}") == "the answer is:"
    assert final_answer("the answer is " * (MANY // 14) + "7") == "7"
    assert final_answer(f"answer{BLANKS}" * 3) == "answer"


def test_numbers_and_letters_of_blanks() -> None:
    for filler in (BLANKS, LINES, "(" * MANY, "=5" * MANY, "1 " * MANY, "{" * MANY, "\\frac" * MANY):
        assert [one.value for one in quantities(f"{filler}=\n5 m")] == [5.0]
        assert letter(f"{filler}\nAnswer: B", ["iron", "gold"]) == "B"
        assert folded(filler + "gold").endswith("gold")
    assert letter("Answer:" + BLANKS, ["iron", "gold"]) is None


def test_fenced_blocks_of_blanks() -> None:
    for fence in (f"```{BLANKS}x\n", f"```{LINES}", f"{BLANKS}```{BLANKS}x"):
        assert patch_of(fence)
        assert program_of(fence).text
    some = BLANKS[: MAX_ANSWER // 4]
    assert patch_of(f"```diff{some}\na\n```") == "a\n"
    assert program_of(f"{some}```{some}py\na()\n{some}```").text == "a()\n"


@pytest.mark.attack(
    "an answer of fences, lists, quotations or strings without end takes minutes to read",
    surface="handlers `code`, `swe`",
    stopped_by="its last 131,072 characters are read, in linear time and beside the worker's other work",
)
@pytest.mark.parametrize(
    "lines",
    [
        "```\n", "```py\nf()\n```\n", "- ", "> ", "-\n", "````md\n```md\n```\n````\n", "`\n",
        '```py\ns="""\n```\n', "```py\ns = [\n", f"```py\n{'(' * 190}\n```\n", f"```py\n{'9' * 5000}\n```\n",
        "\n ", " \n", "f(a)[1]\n",
    ],
)  # fmt: skip
def test_blocks_without_end(lines: str) -> None:
    """Only the end of an answer is read, and each part of it a few times at most."""
    answer = f"```\n{lines * (4 * MAX_ANSWER // len(lines))}\n```\n"
    started = time.process_time()
    assert program_of(answer, "f").text
    assert time.process_time() - started < patience(6.0)


def test_hunks_without_end() -> None:
    answer = "```diff\n@@ -1,9 +1,9 @@\n ```\n" * (MAX_ANSWER // 5)
    started = time.process_time()
    assert patch_of(answer)
    assert time.process_time() - started < patience(6.0)


@pytest.mark.parametrize("end", ["", "```\n"])
def test_a_program_that_is_long(end: str) -> None:
    """The parser holds all threads of the worker, so it gets no long text."""
    answer = "f(a)[1]\n" * (8 * MAX_ANSWER // 8)
    started = time.process_time()
    assert whole_program("def f(a):\n", answer + end, "f").text.strip().endswith("f(a)[1]")
    assert time.process_time() - started < patience(2.5)


def test_a_diff_of_quotes() -> None:
    assert changed_files('diff --git "a/x' + '" "b/' * MANY + "z") == []
    assert changed_files("diff --git a/x" + " b/" * MANY) != []


@pytest.mark.parametrize("parser", ["tap", "jest", "sympy", "go", "cargo", "django", "unittest", "pytest"])
def test_logs_of_blanks(parser: str) -> None:
    for line in (
        f"ok{BLANKS}x", f"ok 1 - x{BLANKS}y", f"\u2713 x{BLANKS}y", f"\u2713{BLANKS}(5 ms", "_" * MANY,
        "test" * MANY, f"test x{' ... ' * MANY}", f"{BLANKS}--- PASS", f"test_x (m){BLANKS}ok", BLANKS,
    ):  # fmt: skip
        assert len(parse(parser, line)) <= 1
    assert exit_code(f">>>>> Test Exit Code: {'9' * 5000}\n", ">>>>> Test Exit Code:", 0) is None
    assert exit_code(f">>>>> Test Exit Code: 1{BLANKS}x\n", ">>>>> Test Exit Code:", 0) is None


def test_a_field_of_blanks() -> None:
    """The proxy reads a head before it knows whether its host is allowed."""
    begin, end = b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nX:", b"\x01\r\n\r\n"
    with pytest.raises(EgressRefused, match="a field of the request is malformed"):
        parse_head(begin + b" \t" * ((MAX_HEAD - len(begin) - len(end)) // 2) + end)
    assert b"X: a b\r\n" in parse_head(begin + b" \ta b \t\r\n\r\n").forwarded
