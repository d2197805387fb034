"""SECURITY.md names tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "SECURITY.md"
NAMED = re.compile(r"([\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?")

TABLES = "rollyard_testing.adversary.policy_"
"""How the names of the modules begin that hold tables of attacks."""


def rows() -> list[list[str]]:
    """Return the cells of each row below 'What stops what'."""
    _, _, text = PAGE.read_text().partition("## What stops what")
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| surface")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named() -> set[tuple[str, str, str]]:
    """Return file, test and attack (or an empty string) of everything that the page names."""
    return {(file, test, attack) for row in rows() for file, test, attack in NAMED.findall(row[-1])}


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def tables_of(path: Path) -> Iterator[Path]:
    """Yield the file itself, and the modules of `rollyard_testing` that hold its tables of attacks."""
    yield path
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(TABLES):
            assert node.module is not None
            yield TESTS.joinpath("support", *node.module.split(".")).with_suffix(".py")


def attacks_of(path: Path) -> list[str]:
    """Return the names of the attacks in a file's tables. A rollout that deserves a reward is not one."""
    return [
        keyword.value.value
        for table in tables_of(path)
        for node in ast.walk(ast.parse(table.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Attack"
        and "reward" not in [keyword.arg for keyword in node.keywords]
        for keyword in node.keywords
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
    ]


def files() -> list[Path]:
    return sorted((TESTS / "adversary").glob("test_*.py"))


def test_each_row_is_whole_and_names_a_test() -> None:
    assert rows() != []
    assert [row for row in rows() if len(row) != 4 or not all(row) or not NAMED.search(row[-1])] == []


def test_each_row_belongs_to_a_table() -> None:
    """A row behind a paragraph is shown as text, and a header without rows as an empty table."""
    _, _, text = PAGE.read_text().partition("## What stops what")
    lines = ["", *text.splitlines()]
    orphans = [
        line[:80]
        for before, line in pairwise(lines)
        if line.startswith("| ") and not before.startswith("|") and not line.startswith("| surface")
    ]
    empty = [
        number
        for number, (before, line) in enumerate(pairwise([*lines, ""]))
        if before.startswith("|---") and not line.startswith("| ")
    ]
    assert (orphans, empty) == ([], [])


@pytest.mark.parametrize("file", sorted({file for file, _, _ in named()}))
def test_each_named_test_exists(file: str) -> None:
    path = TESTS / file
    assert path.is_file()
    there, attacks = {test.name for test in functions_of(path)}, set(attacks_of(path))
    wanted = [(test, attack) for name, test, attack in named() if name == file]
    assert [test for test, _ in wanted if test not in there] == []
    text = path.read_text()
    assert [attack for _, attack in wanted if attack and attack not in attacks and attack not in text] == []


def test_names_of_attacks_are_unique() -> None:
    names = [name for path in files() for name in attacks_of(path)]
    assert sorted(names) == sorted(set(names))
