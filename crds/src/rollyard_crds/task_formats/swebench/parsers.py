"""Names of log parsers in other projects' rows, and what they are called here."""

from __future__ import annotations

from typing import Final, get_args

from rollyard_crds.fields.swe_tests import PYTEST_PARSERS, LogParser
from rollyard_crds.task_formats.interface import Row, RowRefused

KNOWN: Final = frozenset(get_args(LogParser))
_OTHERS: Final = {
    "pytest_with_options": "pytest_options", "gotest": "go", "go_test": "go", "rust": "cargo",
    "cargo_test": "cargo", "vitest": "jest", "python_unittest": "unittest", "tap_node": "tap",
}  # fmt: skip
_SETS_PYTHONPATH: Final = "PYTHONPATH="
_KEEPS_PYTHONPATH: Final = ("$PYTHONPATH", "${PYTHONPATH")


def parser(row: Row, name: str, field: str) -> str:
    """Return the name of a parser, such as `pytest` for `parse_log_pytest`.

    Raises:
        RowRefused: There is no such parser.
    """
    short = name.removeprefix("parse_log_").removeprefix("parse_").lower()
    short = _OTHERS.get(short, short)
    if short not in KNOWN:
        raise RowRefused(row.name(field), f"no such log parser; known are: {', '.join(sorted(KNOWN))}")
    return short


def verdict(parser: str, script: str) -> str:
    """Return where results can be taken from: a report, if the script lets the report's plugin load."""
    if parser not in PYTEST_PARSERS or "PYTEST_ADDOPTS=" in script:
        return "log"
    for line in script.splitlines():
        if _SETS_PYTHONPATH in line and not any(kept in line for kept in _KEEPS_PYTHONPATH):
            return "log"
    return "report"
