"""What the tests of the operator share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_testing.operator.fakecluster import FakeControlPlane, FakeKube
from rollyard_testing.operator.operatorlab import Lab, hurry, running, settings_in
from rollyard_testing.operator.sandboxworld import World


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
async def lab(tmp_path: Path, quick: None) -> AsyncIterator[Lab]:
    async with running(Lab(settings_in(tmp_path), FakeKube(), FakeControlPlane())) as made:
        yield made
