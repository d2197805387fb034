"""A plugin of pytest that reports results where no program can forge them by printing.

Eval writes this file beside a secret and gives both to pytest in the sandbox. It is for Python 3.5 and later,
and for every version of pytest since 3. The first process that loads it takes the secret, before anything of
the repository is imported, and removes it. Each line of the report is signed with it, and signatures are
chained, so that no line can be added, left out or repeated from outside of this module.

Code of the repository runs in the same process. It could make every test pass, for example by replacing what
runs tests or what compares values. After a test, the plugin therefore puts a function that fails
in its place, which goes the same way, and reports whether it counted as failed.
"""

import ast
import functools
import hashlib
import hmac
import json
import os
import sys
from typing import Any

NAME = "rollyard_report"
SECRET = "secret"
REPORT = "report"


class Writer:
    """The report of one run of pytest."""

    def __init__(self, folder: str, given: Any) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self.file = os.open(os.path.join(folder, REPORT), flags, 0o600)
        self.secret = given["secret"].encode()
        self.names = frozenset(given["control"])
        self.last = ""

    def write(self, **entry: Any) -> None:
        """Write one line: a signature and JSON."""
        text = json.dumps(entry, sort_keys=True)
        self.last = hmac.new(self.secret, (self.last + text).encode(), hashlib.sha256).hexdigest()
        os.write(self.file, (self.last + " " + text + "\n").encode())


class Reporter:
    """The hooks of one run of pytest."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.config = None  # type: Any
        self.controlling = False

    def name(self, node: str) -> str:
        """Return a test's name as pytest's summary shows it."""
        shorten = getattr(self.config, "cwd_relative_nodeid", None)
        return str(shorten(node)) if shorten is not None else node

    def pytest_configure(self, config: Any) -> None:
        """Keep the configuration."""
        self.config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the result of a test, or of what was done before or after it."""
        if self.controlling:
            return
        expected = hasattr(report, "wasxfail")
        if report.when == "call" and report.passed:
            status = "XPASS" if expected else "PASSED"
        elif report.failed:
            status = "FAILED" if report.when == "call" else "ERROR"
        elif report.skipped:
            status = "XFAIL" if expected else "SKIPPED"
        else:
            return
        self.writer.write(test=self.name(report.nodeid), status=status)

    def pytest_collectreport(self, report: Any) -> None:
        """Write that a file could not be loaded."""
        if report.failed:
            self.writer.write(test=self.name(report.nodeid) or ".", status="ERROR")

    def pytest_sessionfinish(self) -> None:
        """Write the last line."""
        self.writer.write(end=True)

    def control(self, item: Any) -> None:
        """Run a function that fails in the place of a test that decides, and report whether it failed."""
        name = self.name(item.nodeid)
        first = name.split()[0] if name.split() else name
        if self.controlling or first.split("[")[0] not in self.writer.names or _expected_to_fail(item):
            return
        self.controlling = True
        try:
            failed = _counts_as_failed(item)
        except Exception:
            failed = False
        finally:
            self.controlling = False
        self.writer.write(control=name, failed=failed)


def _expected_to_fail(item: Any) -> bool:
    find = getattr(item, "get_closest_marker", None) or getattr(item, "get_marker", None)
    return find is None or find("xfail") is not None or not hasattr(item, "obj")


def _counts_as_failed(item: Any) -> bool:
    from _pytest import runner

    info = runner.CallInfo  # type: Any

    case = getattr(item, "_testcase", None)
    if case is None and type(item).__name__ == "TestCaseFunction":
        case = getattr(item, "instance", None)
    test = item.obj

    def fails(*_arguments: Any, **_keywords: Any) -> None:
        """Fail, unless something that is false counts as true."""
        if _comparisons_fail(case if case is not None else getattr(item, "instance", None)):
            raise AssertionError("this function fails, to see whether a failure is noticed")

    def run() -> None:
        item.ihook.pytest_runtest_call(item=item)

    # Unittest keeps what the test has raised in the item, where its own report still has to find it.
    raised = getattr(item, "_excinfo", None)
    item._excinfo = None
    item.obj = fails
    if case is not None:
        setattr(case, item.name, fails)
    try:
        call = info.from_call(run, when="call") if hasattr(info, "from_call") else info(run, "call")
        return bool(item.ihook.pytest_runtest_makereport(item=item, call=call).failed)
    finally:
        item.obj = test
        item._excinfo = raised
        if case is not None:
            vars(case).pop(item.name, None)


def _comparisons_fail(case: Any) -> bool:
    """Return whether what tests compare with still notices a difference."""
    import pytest

    def raises_nothing() -> None:
        with pytest.raises(ValueError, match="x"):
            pass

    def asserts_nothing() -> None:
        from _pytest.assertion.rewrite import rewrite_asserts

        source = b"assert 0 == 1"
        tree = ast.parse(source)
        rewrite_asserts(tree, source)
        exec(compile(tree, "control", "exec"), {})

    attempts = [raises_nothing, asserts_nothing]  # type: Any
    for name, arguments in (
        ("assertEqual", (0, 1)), ("assertTrue", (False,)), ("assertFalse", (True,)), ("assertIn", (0, [])),
        ("assertNotIn", (0, [0])), ("assertIsNone", (0,)), ("assertIs", (0, None)), ("fail", ()),
        ("assertNotEqual", (0, 0)),
        ("assertAlmostEqual", (0, 1)), ("assertListEqual", ([0], [1])), ("assertDictEqual", ({}, {0: 0})),
        ("assertRaises", (ValueError, int)), ("assertGreater", (0, 1)), ("assertLess", (1, 0)),
    ):  # fmt: skip
        method = getattr(case, name, None)
        if method is not None:
            attempts.append(functools.partial(method, *arguments))
    arrays = sys.modules.get("numpy.testing")
    if arrays is not None:
        attempts.append(functools.partial(arrays.assert_equal, 0, 1))
        attempts.append(functools.partial(arrays.assert_allclose, [0.0], [1.0]))
    for attempt in attempts:
        try:
            attempt()
        except BaseException:
            continue
        return False
    return not (hasattr(pytest, "approx") and pytest.approx(1) == 0)


def _begin() -> Any:
    folder = os.path.dirname(os.path.abspath(__file__))
    options = os.environ.get("PYTEST_ADDOPTS", "").replace("-p " + NAME, "").strip()
    if options:
        os.environ["PYTEST_ADDOPTS"] = options
    else:
        os.environ.pop("PYTEST_ADDOPTS", None)
    path = os.path.join(folder, SECRET)
    try:
        with open(path) as file:
            given = json.load(file)
        os.unlink(path)
    except (OSError, ValueError):
        return None
    return Reporter(Writer(folder, given))


def _hooks(reporter: Reporter) -> Any:
    """Return the hooks that this module gets, from which pytest takes them."""
    import pytest

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(item: Any) -> Any:
        outcome = yield
        if outcome.excinfo is None or not issubclass(outcome.excinfo[0], (KeyboardInterrupt, SystemExit)):
            reporter.control(item)

    return {
        "pytest_runtest_call": pytest_runtest_call,
        "pytest_configure": reporter.pytest_configure,
        "pytest_runtest_logreport": reporter.pytest_runtest_logreport,
        "pytest_collectreport": reporter.pytest_collectreport,
        "pytest_sessionfinish": reporter.pytest_sessionfinish,
    }


if __name__ == NAME:
    _reporter = _begin()
    if _reporter is not None:
        globals().update(_hooks(_reporter))
