"""The contracts that keep packages pure: an import of the clock that is planted into any module is caught."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from rollyard_testing.pace import patience

ROOT = Path(__file__).parents[2]
CONTRACTS = ".importlinter"
PLANTED = "time"
PURE_PACKAGES = (
    "rollyard_api.machine",
    "rollyard_drivers.reconcile",
    "rollyard_operator.pods",
    "rollyard_operator.sandboxes.planning",
    "rollyard_slurm.readers",
    "rollyard_slurm.scheduling",
    "rollyard_slurm.scripts",
)
_LINK = re.compile(r"^-?\s*(?P<importer>[\w.]+) -> (?P<imported>[\w.]+) \(l\.", re.MULTILINE)
LINT_SECONDS = patience(120.0)


def _sections() -> configparser.ConfigParser:
    sections = configparser.ConfigParser()
    sections.read_string((ROOT / CONTRACTS).read_text())
    return sections


def _pure_contracts() -> list[configparser.SectionProxy]:
    """Return the contracts that forbid the clock. Each of their values has one name a line."""
    return [one for one in _sections().values() if PLANTED in one.get("forbidden_modules", "").split()]


def _path(module: str, root: Path = ROOT) -> Path:
    (found,) = root.glob(f"*/src/{module.split('.')[0]}")
    return found.joinpath(*module.split(".")[1:])


def _modules(package: str) -> list[str]:
    """Return a module itself, or all modules of a package; an __init__.py is the package's own name."""
    folder = _path(package)
    if not folder.is_dir():
        return [package]
    found = []
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        found.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return found


PURE_MODULES = sorted(
    {
        module
        for one in _pure_contracts()
        for name in one["source_modules"].split()
        for module in _modules(name)
    }
)


def _lint(tree: Path) -> tuple[bool, set[tuple[str, str]]]:
    """Return whether the contracts of a tree hold, and the imports that are named where they do not."""
    sources = os.pathsep.join(str(path) for path in sorted(tree.glob("*/src")))
    program = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": sources, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=LINT_SECONDS,
    )
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    return done.returncode == 0, {(m["importer"], m["imported"]) for m in _LINK.finditer(done.stdout)}


def _copied(folder: Path) -> Path:
    for source in ROOT.glob("*/src"):
        shutil.copytree(
            source, folder / source.parent.name / "src", ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / CONTRACTS, folder)
    return folder


def _plant(tree: Path, module: str) -> None:
    path = _path(module, tree)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    file.write_text(file.read_text() + f"\nimport {PLANTED}\n")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """Return what the contracts report of a tree in which every pure module imports the clock."""
    tree = _copied(tmp_path_factory.mktemp("planted"))
    for module in PURE_MODULES:
        _plant(tree, module)
    kept, links = _lint(tree)
    assert not kept
    return links


@pytest.mark.parametrize("package", PURE_PACKAGES)
def test_a_contract_covers_the_whole_package_and_indirect_imports(package: str) -> None:
    covering = [one for one in _pure_contracts() if package in one["source_modules"].split()]
    assert covering
    for one in covering:
        assert one["type"] == "forbidden"
        assert {"asyncio", "httpx", "os", "subprocess", "time"} <= {*one["forbidden_modules"].split()}
        assert "allow_indirect_imports" not in one
        assert "ignore_imports" not in one


@pytest.mark.parametrize("module", PURE_MODULES)
def test_a_clock_planted_into_a_pure_module_is_reported(module: str, reported: set[tuple[str, str]]) -> None:
    assert (module, PLANTED) in reported


def test_a_clock_behind_an_import_is_reported(tmp_path: Path) -> None:
    tree = _copied(tmp_path)
    (module,) = (name for name in _modules("rollyard_crds") if name.endswith(".base"))
    _plant(tree, module)
    kept, links = _lint(tree)
    assert not kept
    assert (module, PLANTED) in links
    assert any(importer.startswith("rollyard_drivers.reconcile.") for importer, _ in links)


def test_the_tree_as_it_is_keeps_its_contracts(tmp_path: Path) -> None:
    kept, links = _lint(_copied(tmp_path))
    assert kept
    assert not links


def test_no_modules_import_each_other_in_a_circle() -> None:
    """An import for the types alone counts, too: who reads one of the modules has to read all of them."""
    packages = _sections()["importlinter"]["root_packages"].split()
    imports = grimp.build_graph(*packages, cache_dir=None)
    arrows = {name: imports.find_modules_directly_imported_by(name) for name in imports.modules}
    assert len(arrows) > 600
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")
