"""Eval runs nothing of what the policy left in its home, its work folder or its environment.

Each hidden test here fails unless something that the policy left runs in its place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.adversary.attacks import Attack, cases
from rollyard_testing.adversary.policy_environment import IN_BASH, IN_GIT, IN_GIT_OF_INIT, IN_PYTHON

pytestmark = pytest.mark.attack(boundary="evaluation")


@pytest.mark.parametrize("attack", cases(IN_BASH))
def test_eval_starts_nothing_of_the_policy(lab: Lab, attack: Attack) -> None:
    assert lab.attack(attack).trajectory.reward_reason == ""


@pytest.mark.parametrize("attack", cases(IN_PYTHON))
def test_eval_imports_nothing_of_the_policy(bubblewrap_lab: Lab, attack: Attack) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("this machine has no /usr/bin/python3")
    bubblewrap_lab.attack(attack)


@pytest.mark.parametrize("attack", cases([*IN_GIT, *IN_GIT_OF_INIT]))
def test_git_in_eval_runs_nothing_of_the_policy(bubblewrap_lab: Lab, attack: Attack) -> None:
    if not Path("/usr/bin/git").exists():
        pytest.skip("this machine has no /usr/bin/git")
    assert bubblewrap_lab.attack(attack).trajectory.reward_reason == ""


GIT = Attack(
    name="configures_git",
    goal="Have git start programs that Init's repository and the hidden test's own ones are set up with.",
    steps=(
        "git -C repo config --unset diff.external; rm repo/.git/hooks/pre-commit; echo two > repo/a; "
        "git -C repo diff",
    ),
    sandbox={
        "setup": (
            "git init -q repo; cd repo; echo one > a; git add a; git config diff.external true; "
            "git config user.name a; git config user.email a@b; git commit -q -m a; "
            "printf '#!/bin/sh\\ntouch ../hooked\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit"
        )
    },
    shows=(r"^\+two",),
    test_script="""
set -e
[ -z "$(git -C repo diff)" ]; git -C repo commit -q -a -m b; [ -e hooked ]
for place in new "$TMPDIR/new"; do
    git init -q "$place"; cd "$place"; echo one > a; git add a; echo two > a
    git config --global user.name a; git config --global user.email a@b; git config diff.external 'echo own'
    git diff | grep -q own
    printf '#!/bin/sh\\ntouch hooked\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit
    git commit -q -m a; [ -e hooked ]; cd /work
done
""",
    reward=1.0,
)


@pytest.mark.attack(
    "an honest test configures repositories of its own, or relies on Init's",
    surface="Eval's git",
    stopped_by="it works",
)
def test_a_test_can_still_configure_git(bubblewrap_lab: Lab) -> None:
    if not Path("/usr/bin/git").exists():
        pytest.skip("this machine has no /usr/bin/git")
    bubblewrap_lab.attack(GIT)


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


@pytest.mark.attack(
    "an honest test asks for the policy's module", surface="Eval's environment", stopped_by="it is imported"
)
def test_a_test_can_still_ask_for_the_policys_module(bubblewrap_lab: Lab) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("this machine has no /usr/bin/python3")
    bubblewrap_lab.attack(HONEST)
