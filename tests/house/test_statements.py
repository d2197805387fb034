"""The statements that write a table stand in one module, and one module calls those that move a rollout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.static

API = Path(__file__).resolve().parents[2] / "api" / "src" / "rollyard_api"
WRITERS = {
    "rollouts": "storage/rollouts.py",
    "payloads": "storage/rollouts.py",
    "groups": "storage/groups.py",
    "jobs": "storage/jobs.py",
    "plugins": "storage/jobs.py",
    "dynamic_sampling": "storage/jobs.py",
    "sampling_targets": "storage/jobs.py",
    "pools": "storage/pools.py",
    "backends": "storage/pools.py",
    "claims": "rollouts/claims.py",
    "cursors": "trajectories/acknowledged.py",
    "blobs": "jobs/blobs.py",
    "blob_pieces": "jobs/blobs.py",
    "assignments": "rollouts/assignments.py",
}
"""The tables that one module writes, and that module."""
MOVES = {"change", "add", "keep"}
"""The functions of `storage.rollouts` that change what a rollout is, which only transitions call."""
MOVER = "rollouts/transitions.py"


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(API.rglob("*.py")):
        yield path.relative_to(API).as_posix(), ast.parse(path.read_text())


SOURCES = dict(sources())


def writes(tree: ast.Module) -> Iterator[str]:
    """Yield the tables, as the schema names them, that calls of `insert`, `update` and `delete` name."""
    aliases = {
        name.asname or name.name: name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(("schema", "view_tables"))
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if called not in ("insert", "update", "delete"):
            continue
        of_method = [function.value] if isinstance(function, ast.Attribute) else []
        for argument in (*node.args, *(keyword.value for keyword in node.keywords), *of_method):
            if isinstance(argument, ast.Name) and argument.id in aliases:
                yield aliases[argument.id]


@pytest.mark.parametrize(("table", "writer"), WRITERS.items())
def test_one_module_writes_a_table(table: str, writer: str) -> None:
    assert [path for path, tree in SOURCES.items() if table in writes(tree)] == [writer]


def test_only_transitions_change_rollouts() -> None:
    callers = set()
    for path, tree in SOURCES.items():
        names = {
            name.asname or name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "rollyard_api.storage"
            for name in node.names
            if name.name == "rollouts"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in MOVES and isinstance(node.value, ast.Name):
                callers |= {path} if node.value.id in names else set()
            if isinstance(node, ast.ImportFrom) and node.module == "rollyard_api.storage.rollouts":
                callers |= {path for name in node.names if name.name in MOVES}
    assert callers == {MOVER}
