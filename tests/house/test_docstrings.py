"""Every public class and function of the packages has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/src/*/__init__.py"))
GENERATED = "storage/migrations/versions"
"""Alembic's revisions, whose module docstring says what `upgrade` and `downgrade` do."""


def undocumented(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[int, str]]:
    """Yield line and name of public classes, functions and methods without a docstring."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if node.name.startswith("_") or any(one.endswith(("overload", ".setter")) for one in decorators):
            continue
        if not ast.get_docstring(node):
            yield node.lineno, owner + node.name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{node.name}.")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package: str) -> None:
    modules = [path for path in sorted((ROOT / package).rglob("*.py")) if GENERATED not in path.as_posix()]
    assert modules
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules
        for line, name in undocumented(ast.parse(path.read_text(encoding="utf-8")).body)
    ]
    assert not found, "\n".join(found)
