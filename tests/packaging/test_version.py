"""One version: pyproject.toml states it, and every other place says the same."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import rollyard
import yaml
from click.testing import CliRunner
from rollyard.main import cli
from rollyard_process import version

ROOT = Path(__file__).resolve().parents[2]
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_installed_distribution_states_it() -> None:
    assert version.installed_version() == VERSION, "install the tree again: pip install -e '.[dev]'"
    assert rollyard.__version__ == VERSION


def test_the_command_prints_it() -> None:
    assert CliRunner().invoke(cli, ["version"]).output == f"rollyard {VERSION}\n"


def test_the_chart_states_it_twice() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "rollyard" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_changelog_has_a_place_for_the_next_version() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "## Unreleased"


def test_a_tree_that_is_not_installed_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version.metadata, "version", not_found)
    assert version.installed_version() == version.UNKNOWN
