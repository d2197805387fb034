"""The report of a run of pytest: tests of all kinds, wherever pytest is started."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.fields.swe_tests import SweTests
from rollyard_pipeline.handlers.swe.handler import ReportFiles, SignedReport
from rollyard_sandbox.client.results import FileContent
from rollyard_sandbox.errors import FileError
from rollyard_testing.pace import patience

SHARED = "class Base:\n    def test_inherited(self):\n        assert True\n"
KINDS = '''"""Tests of many kinds."""
from __future__ import annotations

import asyncio, functools, unittest
from unittest import mock

import hypothesis, pytest
from hypothesis import strategies
from base import Base
import product

@pytest.fixture(params=[1, 2])
def number(request):
    return request.param

def test_plain(number):
    """A docstring."""
    assert product.same(number) == number

def test_that_returns():
    if product.same(1) == 1:
        return
    assert False

def test_with_functions():
    def inner(x):
        return x
    for each in [inner(x) for x in range(3) if (lambda x: x)(x)]:
        if each:
            return None

@pytest.mark.parametrize("text", ["a b", "c[d]", "e::f", "x\\ny"])
def test_of_texts(text):
    assert text

@mock.patch("product.same", return_value=5)
def test_mocked(same):
    assert product.same(1) == 5

def wrapped(test):
    @functools.wraps(test)
    def wrapper(*arguments, **keywords):
        return test(*arguments, **keywords)
    return wrapper

def replaced(test):
    def test_replaced():
        test()
    return test_replaced

@wrapped
def test_wrapped(number):
    assert number

@replaced
def test_replaced():
    assert True

@hypothesis.settings(max_examples=3, database=None, derandomize=True)
@hypothesis.given(strategies.integers())
def test_drawn(x):
    assert product.same(x) == x

@pytest.mark.asyncio
async def test_awaited():
    await asyncio.sleep(0)
    return

class TestClass(Base):
    def test_method(self):
        assert self
    @staticmethod
    def test_static():
        assert True
    class TestInner:
        def test_deep(self):
            with pytest.raises(ValueError, match="x"):
                raise ValueError("x")

class Case(unittest.TestCase):
    def test_case(self):
        self.assertEqual(product.same(1), 1)
    @mock.patch("product.same", return_value=5)
    def test_case_mocked(self, same):
        self.assertEqual(product.same(0), 5)
    def test_parts(self):
        for part in range(2):
            with self.subTest(part=part):
                self.assertTrue(part < 2)

class Inheriting(Case):
    pass

class Wrapper:
    def __init__(self, test):
        self.__wrapped__ = test
        functools.update_wrapper(self, test)
    def __call__(self, *arguments, **keywords):
        return self.__wrapped__(*arguments, **keywords)

@Wrapper
def test_in_an_object():
    assert True

class TestOwnMethods:
    def fail(self):
        return None
    def assertTrue(self, value):
        return bool(value)
    def test_own(self):
        self.fail()
        assert self.assertTrue(True)

class Counting(unittest.TestCase):
    calls = 0
    def setUp(self):
        type(self).calls += 1
    def test_count_1(self):
        self.assertEqual(self.calls, 1)
    def test_count_2(self):
        self.assertEqual(self.calls, 2)

def test_that_leaves_functions(request):
    def done():
        return None
    request.addfinalizer(done)
    def inner(a):
        return a
    assert inner.__code__.co_names == ()

def test_that_patches(monkeypatch):
    monkeypatch.setattr("os.getcwd", None)
    monkeypatch.setattr("os.path.exists", None)
    monkeypatch.setattr("builtins.open", None)
    assert product.same(1) == 1

class TestOther:
    def test_inherited(self):
        assert product

def made(limit):
    def test():
        assert limit < 5
    return test
for limit in range(2):
    globals()["test_made_%d" % limit] = made(limit)
def test_added(self):
    self.assertTrue(product.same(True))
setattr(Case, "test_added", test_added)
del test_added

def test_skipped():
    pytest.skip("no")

@pytest.mark.xfail
def test_expected_to_fail():
    assert False

def test_failing():
    assert product.same(1) == 2
'''
PASSING = (
    "test_plain[1]", "test_that_returns", "test_with_functions", "test_mocked", "test_wrapped[2]",
    "test_replaced", "test_drawn", "test_awaited", "TestClass::test_method", "TestClass::test_static",
    "TestClass::test_inherited", "TestOther::test_inherited", "test_in_an_object",
    "TestOwnMethods::test_own", "Counting::test_count_1", "Counting::test_count_2",
    "test_that_leaves_functions", "test_that_patches", "TestClass::TestInner::test_deep", "Case::test_case",
    "Case::test_parts", "Case::test_case_mocked", "Inheriting::test_case", "test_made_1",
    "Case::test_added", "test_of_texts[a b]", "test_of_texts[c[d]]", "test_of_texts[e::f]",
    "test_of_texts[x\\ny]",
)  # fmt: skip
OTHERS = {"test_skipped": "SKIPPED", "test_expected_to_fail": "XFAIL", "test_failing": "FAILED"}


class Files:
    """A sandbox of which only the files are there."""

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    async def read_file(self, path: str, *, max_bytes: int, offset: int) -> FileContent:
        if not Path(path).exists():
            raise FileError(path, reason="FileNotFound")
        data = Path(path).read_bytes()
        return FileContent(data[offset : offset + max_bytes], offset, len(data), 0o600)


def report_of(repository: Path, command: str, **fields: Any) -> tuple[SignedReport, str]:
    """Run a command in a repository, and return the report of its tests and what it printed."""
    tests = SweTests.model_validate({"script": command, **fields})
    client: Any = Files()
    files = ReportFiles(client, str(repository.parent / "report"))
    asyncio.run(files.write(tests, str(repository)))
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(repository.parent),
    }
    ran = subprocess.run(
        ["bash", "-c", command], cwd=repository, env=files.environment(variables), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=patience(120), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return asyncio.run(files.read(tests.log_parser)), ran.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "tests").mkdir(parents=True)
    (folder / "product.py").write_text("def same(x):\n    return x\n")
    (folder / "tests/base.py").write_text(SHARED)
    (folder / "tests/test_kinds.py").write_text(KINDS)
    return folder


@pytest.mark.parametrize(
    ("command", "settings", "names"),
    [
        ("python -m pytest -q tests", "", "tests/test_kinds.py"),
        ("python -m pytest -q -n 2 tests", "", "tests/test_kinds.py"),
        # Results are named from the folder in which pytest is started, wherever its own root folder is.
        ("PYTHONPATH=$PYTHONPATH:.. && cd tests && pytest -q test_kinds.py", "pytest.ini", "test_kinds.py"),
        ("python -m pytest -q tests", "../pytest.ini", "tests/test_kinds.py"),
    ],
    ids=["plain", "workers", "below_the_root", "above_the_root"],
)
def test_tests_of_all_kinds(repository: Path, command: str, settings: str, names: str) -> None:
    if settings:
        (repository / settings).write_text("[pytest]\n")
    fails = [f"{names}::{name}" for name in PASSING]
    hidden = {"tests/test_kinds.py": KINDS}
    report, printed = report_of(repository, command, fail_to_pass=fails, files=hidden)
    assert report.complete, printed
    assert report.tampered == set(), printed
    assert set(fails) <= report.controlled
    assert {test: report.results.get(test) for test in fails} == dict.fromkeys(fails, "PASSED")
    others = {f"{names}::{name}": status for name, status in OTHERS.items()}
    assert {test: report.results.get(test) for test in others} == others


def test_names_with_dots_are_controlled_too(repository: Path) -> None:
    """R2E names tests by their classes, and its tests lie in a hidden folder."""
    report, printed = report_of(
        repository, "python -m pytest -q tests", log_parser="r2e", protected=["tests"],
        expected={"Case.test_case": "PASSED", "test_plain[1]": "PASSED"},
    )  # fmt: skip
    assert (report.complete, report.tampered) == (True, set()), printed
    assert {"Case.test_case", "test_plain[1]", "test_plain[2]"} == report.controlled
    assert report.results["TestClass.test_method"] == "PASSED"


def test_what_is_started_beside_pytest_has_no_part_in_the_report(repository: Path) -> None:
    (repository / "tests/test_kinds.py").write_text(
        "import os, subprocess, sys\n\n\ndef test_programs():\n"
        "    assert 'rollyard' not in str(os.environ) and 'rollyard_report' not in sys.modules\n"
        "    code = 'import sys; assert not [name for name in sys.modules if \"rollyard\" in name]'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
        "    run = [sys.executable, '-m', 'pytest', '-q', '--collect-only', 'tests']\n"
        "    assert b'Error' not in subprocess.run(run, check=True, capture_output=True).stderr\n"
    )
    (repository / "setup.py").write_text("print('set up')\n")
    name = "tests/test_kinds.py::test_programs"
    command = "python setup.py && python -m pytest -q tests && python -m pytest -q tests"
    report, printed = report_of(repository, command, fail_to_pass=[name])
    assert (report.complete, report.tampered, report.controlled) == (True, set(), {name}), printed
    assert report.results == {name: "PASSED"}
    assert "set up" in printed


@pytest.mark.parametrize("command", ["python -c 'import pytest; pytest.main()'", "pip --version", "true"])
def test_a_program_that_starts_pytest_by_itself_makes_no_report(repository: Path, command: str) -> None:
    report, _ = report_of(repository, command, fail_to_pass=["tests/test_kinds.py::test_plain[1]"])
    assert not report.complete
