"""The layout of the packages: few modules in each folder, and every folder says what lives in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = 16
"""The limit for the modules of one folder, without `__init__` and `__main__`."""
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
def test_a_folder_says_what_lives_in_it(folder: str) -> None:
    text = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
    assert (ast.get_docstring(ast.parse(text)) or "").strip(), f"{folder}/__init__.py has no docstring"
