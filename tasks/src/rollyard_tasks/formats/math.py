"""The format `math`: tables of questions and answers, as GSM8K, DeepScaleR, AIME and MATH write them."""

from __future__ import annotations

import re
from typing import Any, Final

from rollyard_tasks.formats.answers import answer_fields
from rollyard_tasks.formats.ids import row_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat

_REQUEST: Final = r"Put your final answer within \boxed{}."
_HASHES: Final = "####"
_NO_ANSWERS: Final = frozenset({"proof", "notfound"})
"""What NuminaMath has instead of an answer."""
_UNREAD: Final = re.compile(r"[a-e]|body|choices|input_output|op[a-e]|options?(_?[a-e1-5])?|table")
"""Columns that change a question of mathematics, in addition to those that change every task. Tables
of multiple choice have a column for each choice, such as `A` or `option_1`."""
_KEPT: Final = frozenset(
    {
        "category",
        "competition",
        "difficulty",
        "domain",
        "level",
        "part",
        "problem number",
        "problem_source",
        "problem_type",
        "question_type",
        "source",
        "subject",
        "topic",
        "type",
        "url",
        "year",
    }
)
"""Columns that are kept in the metadata, in lower case. Solutions are not among them."""


class MathFormat(TaskFormat):
    r"""Reads rows with a question and its answer; the handler is `math`.

    The question is in `question` or `problem`. The answer is in `answer` or `expected_answer`: a text, a
    number, or a list of accepted ones. If an answer ends with `#### n`, as in GSM8K, only `n` is taken. A row
    without an answer may have a `solution` with `\boxed{…}`, which the handler reads as it does the policy's.
    AIME's tables begin these names with an upper-case letter.
    """

    columns = (
        ("question", "answer"),
        ("problem", "answer"),
        ("problem", "solution"),
        ("Problem", "Answer"),
        ("Question", "Answer"),
        ("question", "expected_answer"),
        ("problem", "expected_answer"),
    )

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row, which asks for the answer in a box."""
        for name in row.values:
            if _UNREAD.fullmatch(name.lower()) and row.values[name] not in ("", [], {}):
                raise RowRefused(name, "is part of the question, and this format does not read it")
        question = row.text(_column(row, "question", "problem"))
        return {
            "prompt": f"{question}\n\n{_REQUEST}",
            **_answer(row),
            "metadata": {name: value for name, value in row.values.items() if name.lower() in _KEPT},
            **row_id(row, "id", "ID", "unique_id", "uuid", "problem_id", "question_id"),
        }


def _column(row: Row, *names: str) -> str:
    """Return which of these columns a row fills, or the first name if it fills none.

    Raises:
        RowRefused: It fills several.
    """
    spellings = [spelling for name in names for spelling in (name, name.capitalize())]
    filled = [spelling for spelling in spellings if row.values.get(spelling, "") != ""]
    if len(filled) > 1:
        raise RowRefused(filled[1], f"cannot stand beside {filled[0]!r}: this format reads one of them")
    return filled[0] if filled else names[0]


def _answer(row: Row) -> dict[str, Any]:
    key, solution = _column(row, "answer", "expected_answer"), _column(row, "solution")
    if row.values.get(key, "") == "" and solution in row.values:
        if r"\boxed" not in row.text(solution):
            raise RowRefused(solution, rf"has no \boxed{{…}}, and there is no column {key!r}")
        return {"answer": row.text(solution)}
    fields = answer_fields(row, key)
    answer = fields.get("answer", "").strip()
    if answer.lower() in _NO_ANSWERS:
        raise RowRefused(key, "says that there is no answer which can be compared")
    _, hashes, rest = answer.rpartition(_HASHES)
    if not hashes or "\n" in rest.strip():  # Then it is a heading of Markdown.
        return fields
    if not rest.strip():
        raise RowRefused(key, f"has nothing after {_HASHES}")
    return {"answer": rest.strip()}
