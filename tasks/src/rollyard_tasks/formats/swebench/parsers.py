"""Names of log parsers in other projects' rows, and what they are called here."""

from __future__ import annotations

from typing import Final, get_args

from rollyard_crds.fields.swe_tests import LogParser

from rollyard_tasks.formats.interface import Row, RowRefused

KNOWN: Final = frozenset(get_args(LogParser))
_OTHERS: Final = {
    "pytest_with_options": "pytest_options", "gotest": "go", "go_test": "go", "rust": "cargo",
    "cargo_test": "cargo", "vitest": "jest", "python_unittest": "unittest", "tap_node": "tap",
}  # fmt: skip


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
