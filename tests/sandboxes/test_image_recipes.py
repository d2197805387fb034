"""The image recipes, which scripts/images builds, say what the rest of Rollyard relies on."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from rollyard_crds.claims import COPY_ARGV, EXEC_SERVER_ARGV
from rollyard_sandbox.copying import ENTRIES

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = {
    "api": "api",
    "operator": "operator",
    "worker": "pipeline",
    "engine": "engine",
    "sandbox": "sandbox-image",
}


def recipe(folder: str) -> str:
    return (ROOT / folder / "Containerfile").read_text()


@pytest.mark.parametrize("folder", [*COMPONENTS.values(), "sandbox-image/default"])
def test_images_run_as_a_numbered_ordinary_user(folder: str) -> None:
    users = re.findall(r"^USER (\S+)$", recipe(folder), re.MULTILINE)
    assert users[-1] == ("1000:1000" if folder.endswith("default") else "10001:10001")


def test_the_runtime_image_copies_itself_by_default() -> None:
    found = re.search(r"^ENTRYPOINT (.+)$", recipe("sandbox-image"), re.MULTILINE)
    assert tuple(json.loads(found[1])) == COPY_ARGV
    # In the image the runtime lies at the root, in a sandbox below its mount.
    for path in (*COPY_ARGV, *EXEC_SERVER_ARGV):
        if path.startswith("/"):
            parts = Path(path).parts
            assert (parts[2] if parts[1] == ".rollyard" else parts[1]) in ENTRIES


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_has_its_own_extra(component: str) -> None:
    """An image installs the extra of its component."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras[component]
    assert "/wheels/install" in recipe(COMPONENTS[component])
    assert '$(cat "$wheels/extras")' in (ROOT / "scripts" / "image-install").read_text()
