"""A policy that forges: only the hidden test decides the reward, and it is not seen before Eval."""

from __future__ import annotations

import pytest
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.adversary.attacks import Attack, cases
from rollyard_testing.adversary.policy_evaluation import ATTACKS

pytestmark = pytest.mark.attack(boundary="evaluation")


@pytest.mark.parametrize("attack", cases(ATTACKS))
def test_only_the_hidden_test_decides(lab: Lab, attack: Attack) -> None:
    lab.attack(attack)
    assert not (lab.folder / "made").exists()
    assert (lab.folder / "host-secret").read_text() == lab.secrets["a file of the host"]
