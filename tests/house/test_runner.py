"""scripts/test on tests that were written for it: what it repeats, excuses, interrupts and says."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.pace import patience

pytestmark = pytest.mark.slow

RUNNER = Path(__file__).resolve().parents[2] / "scripts" / "test"
CONFTEST = 'pytest_plugins = ["rollyard_testing.levels"]\n'
FIRST = """
    import pathlib
    from rollyard_testing.invariants import invariant
    import pytest

    def first(name):
        path = pathlib.Path(name)
        seen = path.exists()
        path.touch()
        return not seen
"""
"""`first(name)` is true the first time."""


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Return a function that writes tests into a folder of its own, and returns the folder."""

    def write(text: str) -> Path:
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
        (tmp_path / "tests" / "test_some.py").write_text(textwrap.dedent(FIRST) + textwrap.dedent(text))
        return tmp_path

    return write


def run(folder: Path) -> tuple[int, str]:
    """Run the runner in a folder, and return its exit status and what it printed."""
    # The outer run's processes say of themselves that they are xdist's.
    env = {name: word for name, word in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, str(RUNNER), "check"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(50),
    )
    return done.returncode, done.stdout


def test_what_passes_the_second_time_is_flaky_and_shown_last(written: Any) -> None:
    folder = written(
        """
        @pytest.fixture(scope="session")
        def broken():
            assert not first("fixture"), "the server did not start"

        @pytest.mark.parametrize("number", range(6))
        def test_with_a_fixture(broken, number):
            pass

        def test_flaky():
            print("words of the failure")
            assert not first("flaky"), "only once"

        def test_good():
            pass
        """
    )
    status, said = run(folder)
    assert status == 0, said
    assert "\n8 passed, 0 failed, 0 skipped\n" in said
    end = said.rpartition("8 passed, 0 failed")[2]
    assert "words of the failure" in end
    assert end.rstrip().splitlines()[-1].startswith("FLAKY tests/test_some.py::test_")
    assert "FLAKY tests/test_some.py::test_flaky" in (folder / "build/tests/flaky.txt").read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def test_it():\n    assert False", "failed, twice: tests/test_some.py::test_it"),
        (
            'def test_it():\n    with invariant():\n        assert not first("x"), "two results"',
            "an invariant is broken: tests/test_some.py::test_it",
        ),
        (
            '@pytest.mark.static\ndef test_it():\n    assert not first("x"), "a wrong type"',
            "failed: tests/test_some.py::test_it",
        ),
        (
            '@pytest.mark.parametrize("n", range(5))\ndef test_it(n):\n    assert not first(f"x{n}")',
            "failed: tests/test_some.py::test_it[4]",
        ),
        ("def test_it():\n    import os\n    os._exit(3)", "failed: tests/test_some.py::test_it"),
        ("import nothing_of_this_name", "pytest ended with status"),
    ],
    ids=["failed-twice", "invariant", "types", "five", "crash", "not-collected"],
)
def test_what_is_not_excused(written: Any, text: str, told: str) -> None:
    status, said = run(written(text))
    assert status == 1, said
    assert f"{told}" in said, said
    assert "No test was flaky." in said
