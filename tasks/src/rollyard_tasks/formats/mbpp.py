"""The format `mbpp`: text or prompt, code, test_list and test_setup_code or test_imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any, Final

from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat


class MbppFormat(TaskFormat):
    """Reads a description, assertions and a reference solution; the handler is `code`.

    The prompt shows the first assertion, which says how the function is called, and the code that makes the
    objects it is called with. The other assertions stay hidden, and so does `test`, the program with the
    additional tests of MBPP+.
    """

    columns = (("text", "code", "test_list"), ("prompt", "code", "test_list"))

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row. Its function is the last one of the solution that the tests call."""
        code = _program(row.text("code"), "code", "is not a Python program")
        tests = [str(test) for test in row.items("test_list")]
        if not tests:
            raise RowRefused("test_list", "must not be empty")
        name = _function(code, _program("\n".join(tests), "test_list", "is not a list of Python statements"))
        text = row.text("text" if row.values.get("text") else "prompt")
        setup = row.text("test_setup_code", "")
        setup_program = _program(setup, "test_setup_code", "is not a Python program")
        imports = ""
        if "test_imports" in row.values:
            imports = "\n".join(map(str, row.items("test_imports")))
        # Setup code that uses classes of the solution can run only after it, and in the same place.
        helpers = imports if _uses(setup_program, _defined(code)) else f"{setup}\n{imports}".strip("\n")
        objects = setup if any(map(_makes, setup_program.body)) else ""
        hidden = [row.text("test")] if "test" in row.values else []
        holds = f"{objects}\n{tests[0]}" if objects else tests[0]
        fields: dict[str, Any] = {
            "prompt": f"{text}\n\nWrite the Python function {name}, for which this holds:\n{holds}",
            "tests": {
                "entry_point": name,
                "prefix": helpers,
                "setup": objects,
                "helpers": helpers,
                "cases": [{"program": test} for test in (*tests, *hidden)],
            },
            "solution": [{"name": "submit", "arguments": {"answer": f"```python\n{row.text('code')}\n```"}}],
        }
        if "task_id" in row.values:
            fields["id"] = task_id("mbpp", row.values["task_id"])
        return fields


_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def _program(text: str, field: str, problem: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowRefused(field, problem) from error


def _makes(statement: ast.stmt) -> bool:
    """Return whether a statement of setup code may make an object that is more than plain data."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return False
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))


def _defined(code: ast.Module) -> dict[str, ast.stmt]:
    """Return what defines each name of a program, in the order of the definitions."""
    definitions: dict[str, ast.stmt] = {}
    for node in code.body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign):
            definitions |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return definitions


def _uses(program: ast.Module, names: Iterable[str]) -> bool:
    """Return whether a program uses one of the names without defining it itself."""
    used = {node.id for node in ast.walk(program) if isinstance(node, ast.Name)}
    return not used.isdisjoint({*names} - _defined(program).keys())


def _function(code: ast.Module, tests: ast.Module) -> str:
    nodes = list(ast.walk(tests))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    called = {
        node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    candidates = [
        name
        for name, node in _defined(code).items()
        # A function may be passed to another one. A value, such as a lambda, has to be called.
        if name in (names if isinstance(node, _FUNCTIONS) else called) and not isinstance(node, ast.ClassDef)
    ]
    if not candidates:
        raise RowRefused("test_list", "calls no function of 'code'")
    return candidates[-1]
