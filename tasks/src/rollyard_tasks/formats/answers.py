"""Answers as the columns of data sets hold them: texts and numbers, one or several that are accepted."""

from __future__ import annotations

import json
import math
from typing import Any

from rollyard_crds.task import MAX_ANSWERS

from rollyard_tasks.formats.interface import Row, RowRefused


def answer_fields(row: Row, key: str) -> dict[str, Any]:
    """Return the field `answer` of a task or, where a column lists several accepted answers, `answers`.

    A list of texts may be written as a JSON text. Other lists in a text, such as [0, 1], are one answer. A
    whole number is written without a fraction: 204.0 is 204.

    Raises:
        RowRefused: The column is absent, empty, or holds something else.
    """
    value = row.values.get(key)
    if value is None:
        raise RowRefused(row.name(key), "is missing")
    listed = _listed(value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    answers = list(dict.fromkeys(_text(row, key, each) for each in listed))
    if not 1 <= len(answers) <= MAX_ANSWERS:
        raise RowRefused(row.name(key), f"must be 1 to {MAX_ANSWERS} accepted answers")
    return {"answer": answers[0]} if len(answers) == 1 else {"answers": answers}


def _listed(text: str) -> list[str]:
    try:
        value = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return [text]  # An interval such as [0, 1) is an answer.
    return value if isinstance(value, list) and all(isinstance(each, str) for each in value) else [text]


def _text(row: Row, key: str, value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not isinstance(value, str):
        raise RowRefused(row.name(key), "must be a text or a number, or a list of accepted ones")
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
    if not text.strip():
        raise RowRefused(row.name(key), "must not be empty")
    return text
