"""The page of attacks is current, and the marks from which it is made are whole."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from rollyard_testing.adversary import (
    policy_channel,
    policy_environment,
    policy_evaluation,
    policy_leftovers,
    policy_sabotage,
    policy_walls,
)
from rollyard_testing.adversary.defences import BOUNDARIES, Defence, MarkInvalid, defences
from rollyard_testing.checkout import ROOT
from rollyard_testing.pace import patience

MODULE = SimpleNamespace()
BOUNDARY = pytest.mark.attack(boundary="worker", surface="job token").mark
WHOLE = pytest.mark.attack("a token is changed", stopped_by="an HMAC").mark


def item(*marks: tuple[bool, pytest.Mark], of_parameters: tuple[pytest.Mark, ...] = ()) -> Any:
    """Return a test with these marks, nearest first, each with whether it is the module's."""
    test = SimpleNamespace(nodeid="tests/a.py::test_b", callspec=SimpleNamespace(marks=list(of_parameters)))
    test.iter_markers_with_node = lambda name: [(MODULE if above else test, mark) for above, mark in marks]
    return test


def test_the_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/attacks_page.py", "--check"], capture_output=True, text=True,
        timeout=patience(300),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_a_test_adds_to_the_mark_of_its_module() -> None:
    assert defences(item((False, WHOLE), (True, BOUNDARY))) == [
        Defence(boundary="worker", surface="job token", attack="a token is changed", stopped_by="an HMAC")
    ]


def test_several_marks_are_several_defences() -> None:
    other = pytest.mark.attack("it is kept", surface="claims", stopped_by="it ends with its job").mark
    shown = defences(item((False, WHOLE), (False, other), (True, BOUNDARY)))
    assert [(one.surface, one.attack) for one in shown] == [
        ("job token", "a token is changed"), ("claims", "it is kept"),
    ]  # fmt: skip


def test_an_attack_of_a_table_adds_to_the_mark_of_its_test() -> None:
    common = pytest.mark.attack(stopped_by="an HMAC").mark
    own = pytest.mark.attack("a token is changed").mark
    (shown,) = defences(item((False, own), (False, common), (True, BOUNDARY), of_parameters=(own,)))
    assert (shown.attack, shown.stopped_by) == ("a token is changed", "an HMAC")


@pytest.mark.parametrize(
    "marks",
    [
        [],
        [(True, BOUNDARY)],
        [(False, WHOLE)],
        [(False, pytest.mark.attack("x", stopped_by="").mark), (True, BOUNDARY)],
        [(False, pytest.mark.attack("x", stopped_by="y", boundary="moon").mark), (True, BOUNDARY)],
        [(False, pytest.mark.attack("x", stopped_by="y", spelling="z").mark), (True, BOUNDARY)],
    ],
)
def test_a_mark_that_lacks_a_part_or_has_an_unknown_one_is_refused(marks: list[Any]) -> None:
    with pytest.raises(MarkInvalid, match=r"^tests/a\.py::test_b: "):
        defences(item(*marks))


def test_every_boundary_has_attacks() -> None:
    page = (ROOT / "docs/reference/attacks.md").read_text()
    parts = page.split("\n## ")[1:]
    assert [part.partition("\n")[0] for part in parts] == list(BOUNDARIES.values())
    assert [part for part in parts if part.count("\n| ") < 2] == []


def test_names_of_attacks_are_unique() -> None:
    tables = (
        *policy_walls.ATTACKS, *policy_evaluation.ATTACKS, *policy_leftovers.ATTACKS, *policy_channel.ATTACKS,
        *policy_sabotage.ATTACKS, *policy_environment.IN_BASH, *policy_environment.IN_PYTHON,
        *policy_environment.IN_GIT, *policy_environment.IN_GIT_OF_INIT,
    )  # fmt: skip
    assert [name for name, count in Counter(one.name for one in tables).items() if count > 1] == []
