"""A policy that tries to escape: the kernel, the host's files and its processes stay out of its reach."""

from __future__ import annotations

import pytest
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.adversary.attacks import Attack, cases
from rollyard_testing.adversary.policy_walls import ATTACKS

pytestmark = pytest.mark.attack(boundary="sandbox")


@pytest.mark.parametrize("attack", cases(ATTACKS))
def test_the_walls_hold(lab: Lab, attack: Attack) -> None:
    lab.attack(attack)
