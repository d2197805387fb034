"""The format `apps`: question, input_output, starter_code and solutions, as APPS and TACO write them."""

from __future__ import annotations

from typing import Any, Final

from rollyard_tasks.formats.contests import call_tests, request
from rollyard_tasks.formats.ids import row_id
from rollyard_tasks.formats.interface import Row, TaskFormat

_KEPT: Final = ("difficulty", "source", "name", "url", "date", "tags", "time_limit", "memory_limit")
"""Columns that are kept in the metadata."""


class AppsFormat(TaskFormat):
    """Reads programming contests; the handler is `code`.

    `input_output` has `inputs` and `outputs`, and `fn_name` if a function is called. The first one of the
    solutions is for the agent `oracle`.
    """

    columns = (("question", "input_output"), ("question", "input_output", "solutions"))

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row."""
        tests = call_tests(row.row("input_output"))
        instruction = request(row.text("starter_code", ""), tests.get("entry_point"))
        fields: dict[str, Any] = {
            "prompt": f"{row.text('question')}\n\n{instruction}",
            "tests": tests,
            "metadata": {name: row.values[name] for name in _KEPT if name in row.values},
            **row_id(row, "problem_id", "id"),
        }
        programs = row.items("solutions") if row.values.get("solutions") else []
        if programs:
            answer = f"```python\n{programs[0]}\n```"
            fields["solution"] = [{"name": "submit", "arguments": {"answer": answer}}]
        return fields
