"""The format `humaneval`: task_id, prompt, entry_point, canonical_solution and test, as OpenAI wrote them."""

from __future__ import annotations

from typing import Any, Final

from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.interface import Row, TaskFormat

_REQUEST: Final = "Complete this Python function. Answer with the whole function."


class HumanEvalFormat(TaskFormat):
    """Reads the beginning of a function and a program that checks it; the handler is `code`."""

    columns = (("task_id", "prompt", "entry_point", "test"),)

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row, with the canonical solution for the agent `oracle`."""
        prompt, name = row.text("prompt"), row.text("entry_point")
        fields: dict[str, Any] = {
            "id": task_id(*row.text("task_id").split("/")),
            "prompt": f"{_REQUEST}\n\n```python\n{prompt}```",
            "tests": {
                "entry_point": name,
                "prefix": prompt,
                "helpers": prompt,
                "cases": [{"program": row.text("test")}],
            },
        }
        solution = row.text("canonical_solution", "")
        if solution:
            answer = f"```python\n{prompt}{solution}\n```"
            fields["solution"] = [{"name": "submit", "arguments": {"answer": answer}}]
        return fields
