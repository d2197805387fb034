"""math-verify's own tables, judged by the handler `math`. Where it does not agree, the reason stands here.

The tables are in the source distribution and not in the wheel. They are fetched from the package index that
pip is configured for, once, and are never copied here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_pipeline.handlers import StageContext
from rollyard_pipeline.handlers.base import ANSWER
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_testing.pace import patience

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollyard" / "math-verify"
_PACKAGE = "tests"  # The name by which these modules import each other.
SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "math", "agent": {"type": "oracle"}}
)
OTHERWISE = {
    "test_all.test_number_extraction:6": "1.22 for 1,22: a comma in a key separates numbers",
    "test_all.test_number_extraction:17": "0.111 for 0,111: the same",
    "test_all.test_complex_math_expressions:7": "0.33 for 1/3: the row asks for 2 decimals",
    "test_all.test_complex_math_expressions:13": "2.6667 for 8/3: the same",
    "test_yujianll.test_string_extraction:9": "1 - 1/e and 1 + 1/e are called equal",
}
"""The rows on which the handler does not agree. A row that it begins to agree on is taken out here."""
LEFT_OUT = {
    "test_all.test_set_rel_assymetry": "whether an inequality is compared with an interval is an option; "
    "here it always is, in both directions",
    "test_strict.test_strict_variable_comparison": "whether variables have names is an option there",
}
"""The functions whose rows depend on an option which the handler does not have."""


class TablesMissing(Exception):
    """pip cannot fetch the source distribution."""


class Row(NamedTuple):
    """A row of a table: what a model said, and whether the table calls it equal to the expected answer.

    The name is the module, the function and the place of the row, as in "test_all.test_symbols:0".
    """

    name: str
    gold: str
    answer: str
    equal: bool


def tables() -> list[Row]:
    """Return every row of math-verify's tests that compares an answer with an expected one.

    Raises:
        TablesMissing: pip cannot fetch them.
    """
    folder = _fetched()
    rows: list[Row] = []
    with _importable(folder):
        # test_all is imported by the others.
        for path in sorted(folder.glob("test_*.py"), key=lambda path: (path.stem != "test_all", path.stem)):
            rows += _rows(path)
    return rows


def _fetched() -> Path:
    """Return the folder of the tests of the version that is installed."""
    version = importlib.metadata.version("math-verify")
    folder = CACHE / version
    if not list(folder.glob("*/tests")):
        CACHE.mkdir(parents=True, exist_ok=True)
        # A test that is stopped in the middle leaves nothing where the next one looks.
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
            done = subprocess.run(
                [*command, "-d", made, f"math-verify=={version}"],
                capture_output=True, text=True, timeout=patience(240),
            )  # fmt: skip
            if done.returncode != 0:
                raise TablesMissing(f"pip cannot fetch math-verify's tests: {done.stderr.strip()[-500:]}")
            (packed,) = Path(made).glob("*.tar.gz")
            with tarfile.open(packed) as archive:
                archive.extractall(folder, filter="data")
    (tests,) = folder.glob("*/tests")
    return tests


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the modules of a folder import each other as a package, for as long as it lasts."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == _PACKAGE}
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE]:
            del sys.modules[name]
        sys.modules.update(before)


def _rows(path: Path) -> list[Row]:
    name = f"{_PACKAGE}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    rows = []
    for function in list(vars(module).values()):
        if getattr(function, "__module__", None) != name:
            continue
        for mark in getattr(function, "pytestmark", ()):
            names = [each.strip() for each in mark.args[0].split(",")]
            if not {"gold", "pred"} <= set(names):
                continue
            for place, values in enumerate(mark.args[1]):
                row = dict(zip(names, values, strict=True))
                equal = bool(row["expected"] if "expected" in row else row["result"])
                where = f"{path.stem}.{function.__name__}:{place}"
                rows.append(Row(where, row["gold"], row["pred"], equal))
    return rows


def _judged(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.name.partition(":")[0] not in LEFT_OUT]


async def test_the_tables_of_math_verify(missing: Callable[[str], NoReturn]) -> None:
    try:
        rows = _judged(tables())
    except TablesMissing as error:
        missing(str(error))
    assert len(rows) == 269
    handler = MathHandler()
    otherwise, wrongly_rewarded = set(), set()
    try:
        for row in rows:
            task = Task(id=row.name, prompt="?", answer=row.gold)
            context = StageContext(task, SPEC, "r", 0, 60.0, carry={ANSWER: row.answer})
            reward = (await handler.eval(context)).reward
            if reward != float(row.equal):
                otherwise.add(row.name)
            if reward > float(row.equal):
                wrongly_rewarded.add(row.name)
    finally:
        await handler.close()
    assert wrongly_rewarded == set()
    assert otherwise == set(OTHERWISE)
