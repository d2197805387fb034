"""The policy's program, which is taken out of what it said, and the code that a test needs before it."""

from __future__ import annotations

import ast
import re
from typing import Final

_FENCED: Final = re.compile(
    r"^[ \t]*+```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE | re.I
)

_FUNCTION: Final = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)", re.MULTILINE)


def program_of(text: str) -> str:
    """Return the last fenced block of Python in an answer, else all of it."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def whole_program(prefix: str, text: str, entry_point: str | None) -> str:
    """Return the program to run.

    Where the prefix begins the function that the policy has to complete, its answer may be the whole function
    or the rest of it. It is the whole one if it is a program that defines the name.
    """
    program = program_of(text)
    if not prefix:
        return program
    if entry_point is None or not _begins(prefix, entry_point) or _defines(program, entry_point):
        # The helpers of the prefix stay there. Its last function may have no body yet.
        return f"{completed(prefix)}\n\n{program}"
    return f"{prefix}{program}"


def completed(prefix: str) -> str:
    """Return the prefix as a program that can be compiled: a function without a body gets one."""
    for rest in ("", "\n    pass\n", "\n        pass\n"):
        if parsed(prefix + rest) is not None:
            return prefix + rest
    return prefix


def _begins(prefix: str, name: str) -> bool:
    return name in _FUNCTION.findall(prefix)


def _defines(program: str, name: str) -> bool:
    tree = parsed(program)
    return tree is not None and any(
        isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in (name, "Solution")
        for node in tree.body
    )


def parsed(program: str) -> ast.Module | None:
    """Return the syntax tree of a program, or None if it has none."""
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_DEFINING: Final = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
)
"""The statements that have no effect but the names that they define, apart from what a module does itself."""


def needed(helpers: str, program: str, name: str) -> str:
    """Return the helpers of a test, or "" if they only define names that the test does not mention.

    Args:
        helpers: The code that stands before the test.
        program: The test.
        name: The name of the tested function, which is no helper.
    """
    tree = parsed(helpers)
    if tree is None or not all(isinstance(statement, _DEFINING) for statement in tree.body):
        return helpers
    words = set(re.findall(r"\w+", program))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined = node.name
        elif isinstance(node, ast.alias):
            defined = (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined = node.id
        else:
            continue
        if defined == "*" or (defined in words and defined != name):
            return helpers
    return ""
