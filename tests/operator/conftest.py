"""What the tests of the operator share."""

from __future__ import annotations

import pytest
from rollyard_testing.operator.sandboxworld import World


@pytest.fixture
async def world() -> World:
    return World()
