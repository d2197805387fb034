"""The format `mbpp`: text or prompt, code, test_list and test_setup_code or test_imports."""

from __future__ import annotations

import ast
from typing import Any

from rollyard_crds.task_formats.ids import task_id
from rollyard_crds.task_formats.interface import Row, RowRefused, TaskFormat


class MbppFormat(TaskFormat):
    """Reads a description, assertions and a reference solution; the handler is `code`.

    The prompt shows the first assertion, which says how the function is called. The others stay hidden.
    """

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row. Its function is the last one of the solution that the tests call."""
        code = row.text("code")
        tests = [str(test) for test in row.items("test_list")]
        if not tests:
            raise RowRefused("test_list", "must not be empty")
        name = _function(code, "\n".join(tests))
        text = row.text("text" if row.values.get("text") else "prompt")
        helpers = row.text("test_setup_code", "")
        if row.values.get("test_imports") is not None:
            helpers = "\n".join([helpers, *map(str, row.items("test_imports"))])
        found: dict[str, Any] = {
            "prompt": f"{text}\n\nWrite the Python function {name}, for which this holds:\n{tests[0]}",
            "tests": {
                "entry_point": name,
                "prefix": helpers,
                "helpers": helpers,
                "cases": [{"program": test} for test in tests],
            },
            "solution": [{"name": "submit", "arguments": {"answer": f"```python\n{code}\n```"}}],
        }
        if row.values.get("task_id") is not None:
            found["id"] = task_id("mbpp", row.values["task_id"])
        return found


def _function(code: str, tests: str) -> str:
    try:
        defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowRefused("code", "is no Python program") from error
    try:
        named = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowRefused("test_list", "is no list of Python statements") from error
    called = [name for name in defined if name in named]
    if not called:
        raise RowRefused("test_list", "calls no function of 'code'")
    return called[-1]
