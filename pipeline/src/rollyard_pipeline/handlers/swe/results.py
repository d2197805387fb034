"""Results of tests, and the score that they give."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollyard_crds.fields.swe_tests import PYTEST_PARSERS, SweTests
from rollyard_process.log_text import one_line

from rollyard_pipeline.handlers.swe.report_plugin import plain

PASSED: Final = "PASSED"
FAILED: Final = "FAILED"
ERROR: Final = "ERROR"
SKIPPED: Final = "SKIPPED"
XFAIL: Final = "XFAIL"
XPASS: Final = "XPASS"
STATUSES: Final = (PASSED, XFAIL, XPASS, SKIPPED, FAILED, ERROR)
"""All results, the worst last."""
MISSING: Final = "MISSING"
"""What stands in place of a result where a test has none."""
_WEIGHT: Final = {status: weight for weight, status in enumerate((*STATUSES, MISSING))}
_SHOWN: Final = 10  # The largest number of tests that a message names for each result.
_SHOWN_NAME: Final = 160  # The largest number of characters of a name in a message.
_SHOWN_LIST: Final = 1_900  # The largest number of characters about a list of tests, of 4,096 in all.
_TIME: Final = r"\d++(?:\.\d++)?\s?m?s"
_SECONDS: Final = re.compile(rf"(?<!\s)\s++(?:\({_TIME}\)|\[{_TIME}\]|in {_TIME}ec|# time={_TIME})$")
"""The time that a test took, after its name. No pattern here looks at a part of a line many times."""
_BARE_SECONDS: Final = re.compile(rf"(?<!\s)\s++{_TIME}$")
"""What may be either such a time or the end of a sentence such as `waits 5s`."""
_MOST_DASHES: Final = 20
_MOST_NAME: Final = 8_192  # The number of characters searched for a name. A name of a task has at most half.


class Results(dict[str, str]):
    """The result of each test by its name. Of several results for one test, the worst counts."""

    def add(self, test: str, status: str) -> None:
        """Add a result. What a program prints in addition to the real result can therefore only make it
        worse."""
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
    path, separator, rest = plain(test).partition("::")
    if not separator:
        return all(part.isidentifier() for part in path.split("."))
    return path.endswith(".py") and all(part.isidentifier() for part in rest.split("::"))


@dataclass(frozen=True, slots=True)
class Score:
    """How many of the tests that decide have the result that they should have.

    Attributes:
        solved: Whether all have.
        fail_to_pass: The share of those that failed before, or of all if the expected results are listed.
        pass_to_pass: The share of those that passed before.
        message: Which tests do not have it, for people; empty if all have.
    """

    solved: bool
    fail_to_pass: float
    pass_to_pass: float
    message: str


class Reported:
    """The names under which tests were reported, to find those that a name of a data set stands for.

    A name stands for the test of exactly this name. If there is none, and results are those of pytest, it may
    have been cut at a space, as SWE-bench's parsers do: it stands for all tests whose names begin with it and
    continue with a space.

    Args:
        tests: The tests of the task.
        names: The names of the tests that were reported.
    """

    def __init__(self, tests: SweTests, names: Iterable[str]) -> None:
        self._timed = tests.log_parser not in PYTEST_PARSERS
        self._names = set(names)
        # The names of other frameworks are sentences, and one may begin as another one does.
        self._spaced = [] if self._timed else sorted(name for name in self._names if " " in name)
        listed = (*tests.fail_to_pass, *tests.pass_to_pass, *(tests.expected or ()))
        self._listed = {name.strip() for name in listed}
        self._longer: dict[str, list[str]] = {}
        for name in self._names - self._listed if self._timed else ():
            self._longer.setdefault(_BARE_SECONDS.sub("", name), []).append(name)

    def of(self, test: str) -> list[str]:
        """Return the names of the tests that this name of a data set stands for."""
        name = test.strip()
        if self._timed:
            return self._sentence(name) or self._sentence(without_seconds(name)) or self._shorter(name)
        if name in self._names:
            return [name]
        first, last = (bisect_left(self._spaced, name + after) for after in (" ", "!"))
        return self._spaced[first:last]

    def _sentence(self, name: str) -> list[str]:
        """Return the name itself, and those that are longer by a time."""
        exact = [name] if name in self._names else []
        return list(dict.fromkeys([*exact, *self._longer.get(name, ())]))

    def _shorter(self, long_name: str) -> list[str]:
        """Return the name without the time at its end, if that is not another test of the data set."""
        name = _BARE_SECONDS.sub("", long_name)
        return [name] if name in self._names and name not in self._listed else []


def without_seconds(test: str) -> str:
    """Return a name without the time that a test took, such as `adds (3 ms)` or `adds # time=0.4ms`."""
    return _SECONDS.sub("", test).strip()


def without_message(text: str) -> str:
    """Return the name of a test from `NAME - MESSAGE`. A name may have ` - ` within its brackets."""
    parts = text[:_MOST_NAME].split(" - ", _MOST_DASHES)
    if "[" not in parts[0]:
        return parts[0].strip()
    heads = [" - ".join(parts[:count]) for count in range(1, len(parts) + 1)]
    closed = [head for head in heads if head.endswith("]")]
    balanced = [head for head in closed if head.count("[") == head.count("]")]
    return next(iter(balanced or closed or heads)).strip()


def score(tests: SweTests, results: Mapping[str, str]) -> Score:
    """Return the score of the results."""
    if tests.expected is not None:
        return _equal(tests, tests.expected, results)
    reported = Reported(tests, results)
    fails, failed = _met(tests, tests.fail_to_pass, results, reported, (PASSED, XFAIL))
    passes, broken = _met(tests, tests.pass_to_pass, results, reported, (PASSED, XFAIL, SKIPPED))
    messages = [
        _shown(f"{field}: {met.count(False)} of {len(met)} did not pass", unmet)
        for field, met, unmet in (("fail_to_pass", fails, failed), ("pass_to_pass", passes, broken))
        if unmet
    ]
    return Score(not messages and bool(fails or passes), _share(fails), _share(passes), "\n".join(messages))


def _met(
    tests: SweTests,
    listed: Sequence[str],
    results: Mapping[str, str],
    reported: Reported,
    good: Sequence[str],
) -> tuple[list[bool], dict[str, list[str]]]:
    """Return whether each test has a good result, and those that do not by their result."""
    # A report names every test, and a log may leave out those that passed.
    absent_passes = tests.absent_passes and tests.verdict == "log"
    met: list[bool] = []
    unmet: dict[str, list[str]] = {}
    for test in listed:
        names = reported.of(test)
        bad = [name for name in names if results[name] not in good]
        for name in bad:
            unmet.setdefault(results[name].lower(), []).append(name)
        if not names and not absent_passes:
            unmet.setdefault(MISSING.lower(), []).append(test)
        met.append(not bad and (bool(names) or absent_passes))
    return met, unmet


def _equal(tests: SweTests, expected: Mapping[str, str], results: Mapping[str, str]) -> Score:
    """Return the score where every result must be the expected one, and no other test may have run."""
    reported = Reported(tests, results)
    same: list[bool] = []
    others = {name: None for name, status in results.items() if status != SKIPPED and without_message(name)}
    unmet: dict[str, list[str]] = {}
    for test, status in expected.items():
        if status == SKIPPED or not without_message(test):
            continue
        names = reported.of(test) or reported.of(without_message(test))
        worst = max((results[name] for name in names), key=_WEIGHT.__getitem__, default=MISSING)
        same.append(worst == status)
        if worst != status:
            unmet.setdefault(f"{worst} in place of {status}", []).append(test)
        for name in names:
            others.pop(name, None)
    if others:
        unmet["not expected"] = list(others)
    if not same:
        return Score(False, 0.0, 1.0, "expected: no test decides")
    message = _shown(f"expected: {same.count(False)} of {len(same)} differ", unmet) if unmet else ""
    return Score(not unmet, _share(same), 1.0, message)


def _shown(headline: str, unmet: Mapping[str, Sequence[str]]) -> str:
    """Return a line that names the first tests of each result."""
    parts = []
    for result, tests in unmet.items():
        names = list(dict.fromkeys(tests))
        first = [name if len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]}…" for name in names[:_SHOWN]]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts.append(f"{result}: {', '.join(map(one_line, first))}{more}")
    line = f"{headline}: {'; '.join(parts)}"
    return line if len(line) <= _SHOWN_LIST else f"{line[:_SHOWN_LIST]}…"


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 1.0
