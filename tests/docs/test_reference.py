"""The documentation builds without a warning, and the API reference holds every public name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from rollyard_testing.pace import patience

pytestmark = [pytest.mark.static, pytest.mark.nightly]

inventories = pytest.importorskip(
    "sphinx.util.inventory", reason="Sphinx is missing: pip install -e '.[docs]'"
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the HTML pages. A warning of Sphinx is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html",
         "-d", str(folder / "doctrees"), str(ROOT / "docs"), str(folder / "html")],
        capture_output=True, text=True, timeout=patience(170),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def documented(site: Path) -> set[str]:
    """Return the Python names that the reference describes."""
    inventory = inventories.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {name for kind, names in inventory.data.items() if kind.startswith("py:") for name in names}


@pytest.mark.parametrize(
    "package",
    [
        "rollyard",
        "rollyard_crds",
        "rollyard_pipeline.handlers",
        "rollyard_pipeline.agents",
        "rollyard_pipeline.harnesses",
        "rollyard_pipeline.tools",
        "rollyard_pipeline.tool_parsers",
        "rollyard_pipeline.rewards",
    ],
)
def test_the_reference_describes_every_public_name(documented: set[str], package: str) -> None:
    public = importlib.import_module(package).__all__
    assert public
    homes = [package, "rollyard_crds", "rollyard_crds.trajectory"] if package == "rollyard" else [package]
    assert [
        name
        for name in public
        if name not in ("__version__", "errors") and not any(f"{home}.{name}" in documented for home in homes)
    ] == []


def test_every_page_is_in_the_table_of_contents(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    contents = (site / "index.html").read_text()
    assert [
        str(page) for page in pages if page.name != "index.html" and f'href="{page}"' not in contents
    ] == []
