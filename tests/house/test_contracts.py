"""The contracts that keep packages pure: an import of the clock that is planted into any module is caught."""

from __future__ import annotations

import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """An import for the types alone counts, too: who reads one of the modules has to read all of them."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    imports = grimp.build_graph(*packages, cache_dir=None)
    arrows = {name: imports.find_modules_directly_imported_by(name) for name in imports.modules}
    assert len(arrows) > 600
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")
