"""Parsers of what test frameworks print. Test names are those that SWE-bench's data sets use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from rollyard_pipeline.handlers.swe.results import (
    ERROR,
    FAILED,
    PASSED,
    SKIPPED,
    STATUSES,
    Results,
    without_message,
    without_seconds,
)

START: Final = ">>>>> Start Test Output"
_CODE: Final = ">>>>> Test Exit Code:"
_EXIT: Final = re.compile(rf"^{_CODE} (\d{{1,9}})\s*$", re.MULTILINE)
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def parse(parser: str, log: str, script: str = "") -> Results:
    """Return the results that a log shows.

    If the script prints a line that begins the tests' output, they are those after its first appearance. Code
    of the repository may print the line as well, which leaves no result out: the script's own comes first, or
    all that follows the other one is read.
    """
    results = Results()
    lines = _ESCAPES.sub("", log).splitlines()
    if START in script:
        begins = [number for number, line in enumerate(lines) if line.strip() == START]
        lines = lines[begins[0] + 1 :] if begins else []
    _PARSERS[parser](lines, results)
    return results


def exit_code(log: str, script: str, ended: int | None) -> int | None:
    """Return the status of the test command: what the script prints as such, else the script's own status.

    Of several that are printed, one that is not 0 counts.
    """
    if _CODE not in script:
        return ended
    return max(map(int, _EXIT.findall(log)), default=None)


_WORKER: Final = re.compile(r"\s*+\[gw\d++\]\s++(?:\[\s*+\d++%\]\s++)?")
"""What pytest-xdist prints before a result: `[gw0] [ 50%] `."""
_RESULT: Final = re.compile(rf"\s({'|'.join(STATUSES)})(?=\s|$)")


def _pytest(lines: Iterable[str], results: Results, name: Callable[[str], str]) -> None:
    """Read lines such as `PASSED tests/test_x.py::test_y[a b]` and `tests/test_x.py::test_y PASSED [ 5%]`."""
    for line in lines:
        worker = _WORKER.match(line)
        line = line[worker.end() :] if worker is not None else line
        first, rest = (*line.split(None, 1), "", "")[:2]
        if first in STATUSES and rest and not rest.startswith("["):
            # A message follows the other results. Brackets hold a count or the progress, not a name.
            results.add(name(rest.strip() if first == PASSED else without_message(rest)), first)
            continue
        result = _RESULT.search(line)
        test = line[: result.start()].strip() if result is not None else ""
        head, bracket, _ = test.partition("[")
        whole = "::" in head and len(head.split()) == 1 and (not bracket or test.endswith("]"))
        if result is not None and whole:
            results.add(name(test), result[1])


def _without_paths(test: str) -> str:
    """Return a name in which an absolute path as a parameter is reduced to its last part."""
    match = re.fullmatch(r"(.*?)\[(\S*)\]", test)
    if match is None:
        return test  # Data sets have a parameter with spaces as it is, or cut at the first one.
    value = match[2]
    if value.startswith("/") and not value.startswith("//") and "*" not in value:
        value = "/" + value.rsplit("/", 1)[-1]
    return f"{match[1]}[{value}]"


def _dotted(test: str) -> str:
    return ".".join(test.split("::")[1:])


def _mouse_buttons(test: str) -> str:
    return test.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")


_NAMES: Final[Mapping[str, Callable[[str], str]]] = {
    "pytest": str,
    "pytest_v2": str,
    "seaborn": str,
    "pytest_options": _without_paths,
    "matplotlib": _mouse_buttons,
    "r2e": _dotted,
}
"""How the data sets of each parser of pytest's output name a test."""


def logged_name(parser: str, test: str) -> str:
    """Return the name that a data set gives to a test of pytest."""
    return _NAMES[parser](test)


_DJANGO_ENDS: Final = (
    (re.compile(r"^(.*) \.\.\. (?:ok|OK)$"), PASSED),
    (re.compile(r"^(.*) \.\.\. skipped\b"), SKIPPED),
    (re.compile(r"^(.*) \.\.\. expected failure$"), PASSED),
    (re.compile(r"^(.*) \.\.\. FAIL$"), FAILED),
    (re.compile(r"^(.*) \.\.\. ERROR$"), ERROR),
    (re.compile(r"^(.*) \.\.\. unexpected success$"), FAILED),
)
_DJANGO_HEADS: Final = ((re.compile(r"^FAIL: (.*)$"), FAILED), (re.compile(r"^ERROR: (.*)$"), ERROR))
_UNITTEST_NAME: Final = re.compile(r"^\w+ \([\w.]+\)")


def _unittest(lines: Iterable[str], results: Results) -> None:
    """Read `test_x (module.Case) ... ok`. A docstring or other output may stand between name and result."""
    waiting = ""
    for line in map(str.rstrip, lines):
        for pattern, status in (*_DJANGO_ENDS, *_DJANGO_HEADS):
            match = pattern.match(line)
            if match is None:
                continue
            shown = match[1].split(" ... ")[0].strip()
            results.add(shown, status)
            if waiting and waiting != shown:
                results.add(waiting, status)
            waiting = ""
            break
        else:
            if waiting and line.lower() in ("ok", "fail", "error"):
                results.add(waiting, {"ok": PASSED, "fail": FAILED, "error": ERROR}[line.lower()])
                waiting = ""
                continue
            named = _UNITTEST_NAME.match(line)
            if named is not None:
                waiting = line.split(" ... ")[0].strip()


_SYMPY_LINE: Final = re.compile(r"^(\w++) (E|F|ok|s|f)\b")
_SYMPY_FAILURE: Final = re.compile(r"^_++ (?:.*\.py:)?(test\w*) _+$")
_SYMPY: Final = {"E": ERROR, "F": FAILED, "ok": PASSED, "s": SKIPPED, "f": PASSED}


def _sympy(lines: Iterable[str], results: Results) -> None:
    """Read `test_x ok` and the headlines of failures, `____ sympy/x.py:test_y ____`."""
    for line in lines:
        match = _SYMPY_LINE.match(line)
        if match is not None and "test" in match[1]:
            results.add(match[1], _SYMPY[match[2]])
        failure = _SYMPY_FAILURE.match(line.strip())
        if failure is not None:
            results.add(failure[1], FAILED)


def _patterns(table: Mapping[str, str], pattern: str) -> Callable[..., None]:
    """Return a parser for lines with groups `test` and `status`, whose words the table explains."""
    compiled = re.compile(pattern)

    def read(lines: Iterable[str], results: Results) -> None:
        for line in lines:
            match = compiled.match(line)
            if match is not None:
                results.add(without_seconds(match["test"]), table[match["status"]])

    return read


def _tap(lines: Iterable[str], results: Results) -> None:
    """Read `ok 1 - name` and `not ok 2 - name # SKIP`."""
    pattern = re.compile(r"^\s*+(not ok|ok)\s++\d*+\s*+(?:- )?(.*)$", re.IGNORECASE)
    remark = re.compile(r"\s#\s*+(?:SKIP|TODO)\b", re.IGNORECASE)
    for line in lines:
        match = pattern.match(line)
        name, *rest = remark.split(match[2], 1) if match is not None else ("",)
        if match is not None and name:
            passed = SKIPPED if rest else PASSED
            results.add(without_seconds(name), passed if match[1].lower() == "ok" else FAILED)


_PARSERS: Final[Mapping[str, Callable[[Iterable[str], Results], None]]] = {
    **{parser: partial(_pytest, name=name) for parser, name in _NAMES.items()},
    "django": _unittest,
    "unittest": _unittest,
    "sympy": _sympy,
    "go": _patterns(
        {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED},
        r"^\s*--- (?P<status>PASS|FAIL|SKIP): (?P<test>\S+)",
    ),
    "cargo": _patterns(
        {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED},
        r"^test (?P<test>.+?) \.\.\. (?P<status>ok|FAILED|ignored)\b",
    ),
    "jest": _patterns(
        {"✓": PASSED, "√": PASSED, "✕": FAILED, "×": FAILED, "○": SKIPPED, "↓": SKIPPED},
        r"^\s*+(?P<status>[✓√✕×○↓])\s++(?:skipped )?(?P<test>.+)$",
    ),
    "tap": _tap,
}
"""The parsers by the names that `swe.log_parser` takes."""
