"""Fixtures that start the product under attack, once per kind of sandbox and test session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollyard_testing.adversary.attacklab import Lab, a_lab
from rollyard_testing.adversary.defences import defences
from rollyard_testing.sandboxes.rootfolder import make_image, make_sif, podman_image

_PROGRAMS = ("chmod", "cp", "date", "ln", "mkfifo", "mv")
"""The programs that the attacks call in addition to those of other tests."""

DAILY_ON_APPTAINER = re.compile(
    r"\[apptainer-(host_processes|reading_the_hidden_test|immortal_processes|control_plane|memory_bomb)\]"
    r"|test_an_honest_solution_is_rewarded"
)
"""One attack for each thing that may differ from bubblewrap: walls, Eval, leftovers, network, limits."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other attacks on Apptainer to the night: every day they are tried on bubblewrap."""
    for item in items:
        here = item.path.is_relative_to(Path(__file__).parent)
        if here and item.get_closest_marker("apptainer") and not DAILY_ON_APPTAINER.search(item.name):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def _says_what_it_shows(request: pytest.FixtureRequest) -> None:
    """Fail a test whose marks do not say which attack it tries, at which boundary, and what stops it."""
    defences(request.node)


@pytest.fixture(scope="session")
def bubblewrap_lab(bubblewrap_works: None) -> Iterator[Lab]:
    with a_lab("--sandbox", "bubblewrap") as lab:
        yield lab


@pytest.fixture(scope="session")
def apptainer_lab(apptainer_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder: Path = tmp_path_factory.mktemp("image")
    sif = make_sif(make_image(folder / "root", *_PROGRAMS))
    with a_lab("--sandbox", "apptainer", "--default-image", str(sif)) as lab:
        yield lab


@pytest.fixture(scope="session")
def podman_lab(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = make_image(tmp_path_factory.mktemp("image") / "root", *_PROGRAMS)
    with podman_image(root) as image, a_lab("--sandbox", "podman", "--default-image", image) as lab:
        yield lab


@pytest.fixture(
    params=[
        "bubblewrap",
        pytest.param("apptainer", marks=pytest.mark.apptainer),
        pytest.param("podman", marks=(pytest.mark.podman, pytest.mark.nightly)),
    ]
)
def lab(request: pytest.FixtureRequest) -> Lab:
    """Return the product with each kind of sandboxes that isolates on one node."""
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found
