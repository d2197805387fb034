"""What the contracts of imports do not say: no modules import each other in a circle."""

from __future__ import annotations

import configparser
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """An import for the types alone counts, too: who reads one of the modules has to read all of them."""
    contracts = configparser.ConfigParser()
    contracts.read_string((ROOT / ".importlinter").read_text())
    packages = contracts["importlinter"]["root_packages"].split()
    imports = grimp.build_graph(*packages, cache_dir=None)
    arrows = {name: imports.find_modules_directly_imported_by(name) for name in imports.modules}
    assert len(arrows) > 600
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")
