"""Results of tests, and the score that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollyard_crds.fields.swe_tests import SweTests

PASSED: Final = "PASSED"
FAILED: Final = "FAILED"
ERROR: Final = "ERROR"
SKIPPED: Final = "SKIPPED"
XFAIL: Final = "XFAIL"
XPASS: Final = "XPASS"
STATUSES: Final = (PASSED, XFAIL, XPASS, SKIPPED, FAILED, ERROR)
"""All results, the worst last."""
_WEIGHT: Final = {status: place for place, status in enumerate(STATUSES)}


class Results(dict[str, str]):
    """The result of each test by its name. Of several results for one test, the worst counts."""

    def add(self, test: str, status: str) -> None:
        """Add a result. What a program prints beside the real result can therefore only make it worse."""
        if _WEIGHT[status] >= _WEIGHT.get(self.get(test, ""), -1):
            self[test] = status

    def failures(self) -> bool:
        """Return whether any test failed."""
        return any(status in (FAILED, ERROR) for status in self.values())


def deciding(tests: SweTests) -> list[str]:
    """Return the names of the tests that must pass, without those that are known to have passed before."""
    if tests.expected is not None:
        return [test for test, status in tests.expected.items() if status == PASSED]
    return tests.fail_to_pass


def in_a_function(test: str) -> bool:
    """Return whether the name is that of a function or a method, and not, for example, of a doctest."""
    first = test.split("[")[0].split(" ")[0]
    path, separator, rest = first.partition("::")
    if not separator:
        return all(part.isidentifier() for part in first.split("."))
    return path.endswith(".py") and all(part.isidentifier() for part in rest.split("::"))


@dataclass(frozen=True, slots=True)
class Score:
    """How many of the tests that decide have the result that they should have.

    Attributes:
        solved: Whether all have.
        fail_to_pass: The share of those that failed before, or of all if the expected results are listed.
        pass_to_pass: The share of those that passed before.
    """

    solved: bool
    fail_to_pass: float
    pass_to_pass: float


def score(tests: SweTests, results: Mapping[str, str]) -> Score:
    """Return the score of the results."""
    if tests.expected is not None:
        return _equal(tests.expected, results)
    # A report names every test, and a log may leave out those that passed.
    absent_passes = tests.absent_passes and tests.verdict == "log"
    fails = [
        results[test] in (PASSED, XFAIL) if test in results else absent_passes for test in tests.fail_to_pass
    ]
    passes = [
        _passed(results, test, absent_passes) or results.get(test) == SKIPPED for test in tests.pass_to_pass
    ]
    return Score(all(fails) and all(passes) and bool(fails or passes), _share(fails), _share(passes))


def _passed(results: Mapping[str, str], test: str, absent_passes: bool) -> bool:
    found = results.get(test)
    return absent_passes if found is None else found in (PASSED, XFAIL)


def _equal(expected: Mapping[str, str], results: Mapping[str, str]) -> Score:
    """Return the score where every result must be the expected one, and no other test may have run."""
    wanted = {_plain(test): status for test, status in expected.items() if status != SKIPPED and _plain(test)}
    found = {_plain(test): status for test, status in results.items() if status != SKIPPED and _plain(test)}
    same = [found.get(test) == status for test, status in wanted.items()]
    return Score(bool(wanted) and all(same) and len(found) == len(wanted), _share(same), 1.0)


def _plain(test: str) -> str:
    return test.split(" - ")[0].strip()


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 1.0
