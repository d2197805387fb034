"""The layout of the packages: folders hold few, short modules, and every folder says what lives in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = 16
"""The limit for the modules of one folder, without `__init__` and `__main__`."""
MOST_LINES = 430
"""The limit for the lines of one module. It is meant to have at most about 400."""
FOLDERS = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/src/**/__init__.py"))


def test_all_packages_are_found() -> None:
    roots = {folder.partition("/")[0] for folder in FOLDERS}
    assert {"api", "cli", "client", "crds", "engine", "operator", "pipeline", "sandbox-image"} < roots
    # Every folder with modules is a package: one without `__init__.py` would escape the checks below.
    modules = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/src/**/*.py")}
    assert sorted(modules) == FOLDERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_holds_few_modules(folder: str) -> None:
    modules = sorted(path.stem for path in (ROOT / folder).glob("*.py"))
    counted = [name for name in modules if not name.startswith("__")]
    assert len(counted) <= MOST_MODULES, f"{folder} holds {len(counted)} modules: {', '.join(counted)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_are_short(folder: str) -> None:
    lines = {path.name: len(path.read_bytes().splitlines()) for path in (ROOT / folder).glob("*.py")}
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert not long, f"{folder} holds modules of more than {MOST_LINES} lines: {long}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_lives_in_it(folder: str) -> None:
    text = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
    assert (ast.get_docstring(ast.parse(text)) or "").strip(), f"{folder}/__init__.py has no docstring"
