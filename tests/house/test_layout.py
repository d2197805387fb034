"""The layout of the packages: every folder with modules is one, and says what lives in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/src/**/__init__.py"))


def test_all_packages_are_found() -> None:
    roots = {folder.partition("/")[0] for folder in FOLDERS}
    assert {"api", "cli", "client", "crds", "engine", "operator", "pipeline", "sandbox-image"} < roots
    # Every folder with modules is a package: one without `__init__.py` would escape the checks below.
    modules = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/src/**/*.py")}
    assert sorted(modules) == FOLDERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_lives_in_it(folder: str) -> None:
    text = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
    assert (ast.get_docstring(ast.parse(text)) or "").strip(), f"{folder}/__init__.py has no docstring"
