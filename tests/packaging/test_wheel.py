"""The wheel and the source distribution hold what an installation needs, and the wheel works on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from rollyard_testing.checkout import ROOT, files
from rollyard_testing.pace import patience

pytestmark = [pytest.mark.packaging, pytest.mark.nightly]

PACKAGES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
    "targets"
]["wheel"]["packages"]


def tracked(folder: str) -> set[str]:
    """Return the files of a folder that git would commit, relative to the folder's parent."""
    parent = ROOT / Path(folder).parent
    listed = files(Path(folder).name, folder=parent)
    return {name for name in listed if (parent / name).is_file()}


def test_every_package_below_a_src_folder_is_listed() -> None:
    there = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/src/*/__init__.py")}
    assert there == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_the_whole_package(wheel: Path, package: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = tracked(package)
    assert f"{Path(package).name}/py.typed" in wanted
    assert wanted - names == set()


def test_the_source_distribution_holds_what_is_built_and_shown_from_a_checkout(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "Makefile",
        "CHANGELOG.md",
        "LICENSE",
        "helm/rollyard/Chart.yaml",
        "examples/quickstart/job.yaml",
    }
    assert wanted | {"scripts/setup", "docs/index.md", "pyproject.toml"} <= names
    assert [name for name in names if name.startswith((".venv/", "runs/", "build/"))] == []


def test_an_environment_with_the_wheel_alone_runs_the_command(wheel: Path, tmp_path: Path) -> None:
    """The dependencies come from this environment; Rollyard itself must come from the wheel."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")],
        check=True,
        timeout=patience(60),
    )
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--root-user-action=ignore", str(wheel)]
    subprocess.run(install, check=True, timeout=patience(100))
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # It comes behind the environment's own packages, and without the .pth file that names this tree.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=patience(60)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(
        str(python), "-c", "import rollyard, rollyard_api; print(rollyard.__file__, rollyard_api.__file__)"
    )
    assert [Path(path).is_relative_to(site) for path in where.split()] == [True, True]
    command = str(python.with_name("rollyard"))
    assert "quickstart" in run(command, "--help")
    assert "train.py" in run(command, "init", "sums")
    assert run(command, "version") == f"rollyard {wheel.name.split('-')[1]}\n"
    points = "from importlib.metadata import entry_points as of; print(*of(group='rollyard.tools').names)"
    assert "bash" in run(str(python), "-c", points).split()
