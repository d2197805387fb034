"""Eval runs nothing of what the policy left in its home, its work folder or its environment.

Each hidden test here fails unless something that the policy left runs in its place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.adversary.attacks import Attack
from rollyard_testing.adversary.policy_environment import IN_BASH, IN_GIT, IN_PYTHON


@pytest.mark.parametrize("attack", IN_BASH, ids=lambda attack: attack.name)
def test_eval_starts_nothing_of_the_policy(lab: Lab, attack: Attack) -> None:
    assert lab.attack(attack).trajectory.reward_reason == ""


@pytest.mark.parametrize("attack", IN_PYTHON, ids=lambda attack: attack.name)
def test_eval_imports_nothing_of_the_policy(bubblewrap_lab: Lab, attack: Attack) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("this machine has no /usr/bin/python3")
    bubblewrap_lab.attack(attack)


@pytest.mark.parametrize("attack", IN_GIT, ids=lambda attack: attack.name)
def test_git_in_eval_runs_nothing_of_the_policy(bubblewrap_lab: Lab, attack: Attack) -> None:
    if not Path("/usr/bin/git").exists():
        pytest.skip("this machine has no /usr/bin/git")
    bubblewrap_lab.attack(attack)


HONEST = Attack(
    name="imports_the_work",
    goal="Import the policy's module, because the hidden test asks for it.",
    steps=("echo 'def double(x): return 2 * x' > work.py",),
    test_script=(
        "python3 -c 'import sys; sys.path.append(\"/work\"); import work; sys.exit(work.double(2) != 4)' && "
        "PYTHONPATH=/work python3 -c 'import work'"
    ),
    reward=1.0,
)


def test_a_test_can_still_ask_for_the_policys_module(bubblewrap_lab: Lab) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("this machine has no /usr/bin/python3")
    bubblewrap_lab.attack(HONEST)
