"""The format `livecodebench`: question_content, starter_code, public and private test cases, and metadata."""

from __future__ import annotations

from typing import Any

from rollyard_tasks.file_rows import json_value
from rollyard_tasks.formats.contests import CONTEST_PREFIX, request
from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat
from rollyard_tasks.formats.pickled_text import PickleRefused, pickled_text

_KEPT = ("question_title", "platform", "contest_id", "contest_date", "difficulty")


class LiveCodeBenchFormat(TaskFormat):
    """Reads programming contests with public and private tests; the handler is `code`.

    Private tests are a JSON text, or the same pickled, compressed and in base64, which is read without
    unpickling. Numbers are compared with a tolerance.
    """

    columns = (("question_content", "public_test_cases"),)

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row. Its tests call a function if its metadata names one."""
        metadata = row.row("metadata", optional=True)
        name = metadata.text("func_name", "") or None
        given = _cases(row, "public_test_cases") + _cases(row, "private_test_cases")
        if not given:
            raise RowRefused("private_test_cases", "must not be empty")
        ask = request(row.text("starter_code", ""), name)
        tests = {"entry_point": name, "prefix": CONTEST_PREFIX, "cases": given, "compare": "numeric"}
        found: dict[str, Any] = {
            "prompt": f"{row.text('question_content')}\n\n{ask}",
            "tests": {key: value for key, value in tests.items() if value is not None},
            "metadata": {key: str(row.values[key]) for key in _KEPT if key in row.values},
        }
        if "question_id" in row.values:
            found["id"] = task_id("livecodebench", row.values["question_id"])
        return found


def _cases(row: Row, field: str) -> list[dict[str, str]]:
    value = row.values.get(field)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        del value  # The text that it holds is as large, and has to be parsed.
        try:
            value = pickled_text(row.values.pop(field))
        except PickleRefused as error:
            raise RowRefused(field, str(error)) from error
    if isinstance(value, str):
        try:
            value = json_value(value)
        except ValueError as error:
            raise RowRefused(field, "is a text that is no JSON") from error
    if value is None and field == "private_test_cases":
        return []
    if not isinstance(value, list):
        raise RowRefused(field, "must be a list")
    cases = []
    for place, case in enumerate(value):
        if not isinstance(case, dict):
            raise RowRefused(f"{field}[{place}]", "must be an object with input and output")
        each = Row(case, row.number, f"{field}[{place}]")
        cases.append({"input": each.text("input", ""), "output": each.text("output", "")})
    return cases
