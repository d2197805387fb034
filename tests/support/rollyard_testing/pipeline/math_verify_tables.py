"""The tables of math-verify's own tests, which its source distribution holds and its wheel does not.

They are fetched from the package index that pip is configured for, once, and are never copied here.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollyard_testing.pace import patience

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollyard" / "math-verify"
_PACKAGE = "tests"  # The name by which these modules import each other.


class TablesMissing(Exception):
    """pip cannot fetch the source distribution."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: The module, the function and the place of the row, as in "test_all.test_symbols:0".
        gold: The expected answer.
        answer: What a model said.
        equal: Whether the table calls them equal.
        options: What else the table gives, such as `precision`.
    """

    name: str
    gold: str
    answer: str
    equal: bool
    options: dict[str, object]


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
    assert spec is not None
    assert spec.loader is not None
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
                equal = bool(row.pop("expected") if "expected" in row else row.pop("result"))
                where = f"{path.stem}.{function.__name__}:{place}"
                rows.append(Row(where, row.pop("gold"), row.pop("pred"), equal, row))
    return rows
